"""The draft's own text: drawn from its law, wherever and beside whatever it is written."""

from __future__ import annotations

import torch
from torch import Tensor

from conf.groups import ObjectiveConfig
from data.batches import collate
from data.shards import Row
from models.draft import DraftModel, from_layers
from tests.lessons import made_up_row
from tests.tiny import VOCAB_SIZE, tiny_model
from train.head import Head
from train.objectives import objective
from train.rollout import choose_start, continue_answers, roll_out

HOT = torch.arange(3, VOCAB_SIZE, 2)


def draft(hot: Tensor | None = HOT) -> tuple[DraftModel, Head]:
    model = DraftModel(from_layers(tiny_model(4), [0, 1]))
    with torch.no_grad():
        model.map.weight.add_(torch.randn(32, 32, generator=torch.Generator().manual_seed(3)) / 9)
    return model, Head(model.head, hot, num_cold=8, dtype=torch.float32, chunk=64)


def by_hand(model: DraftModel, head: Head, beginning: Tensor, uniforms: Tensor) -> list[int]:
    """Token after token, each from the whole text again and the law over the hot ids."""
    text = beginning.tolist()
    for uniform in uniforms.tolist():
        row = made_up_row(0, 1, 1)
        row.prompt, row.generated = torch.tensor(text), torch.tensor([0])
        with torch.no_grad():
            features = model(collate([row]))[0, -1]
        law = (features @ model.head[head.hot_ids_H].T).softmax(-1).double()
        text.append(int(head.hot_ids_H[int((law.cumsum(-1) <= uniform * law.sum()).sum())]))
    return text[len(beginning) :]


def some_beginnings() -> list[Tensor]:
    rng = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB_SIZE, (length,), generator=rng) for length in (1, 9, 4)]


def test_a_rollout_is_drawn_from_the_drafts_law_row_by_row() -> None:
    model, head = draft()
    beginnings = some_beginnings()
    uniforms = torch.rand(3, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    together = roll_out(model, head, beginnings, uniforms, stop_ids=())
    for row, beginning in enumerate(beginnings):
        assert together[row].tolist() == by_hand(model, head, beginning, uniforms[row])
        (alone,) = roll_out(model, head, [beginning], uniforms[row : row + 1], stop_ids=())
        assert torch.equal(alone, together[row])


def test_a_rollout_ends_at_a_stop_id() -> None:
    model, head = draft()
    uniforms = torch.rand(3, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    whole = roll_out(model, head, some_beginnings(), uniforms, stop_ids=())
    stop = int(whole[1][3])
    ended = roll_out(model, head, some_beginnings(), uniforms, stop_ids={stop})
    first = whole[1].tolist().index(stop)
    assert torch.equal(ended[1], whole[1][: first + 1])


def test_the_draft_takes_over_in_proportion_to_rejection() -> None:
    rejection = torch.tensor([0.1, 0.0, 0.5, 0.2])
    count = 8000
    starts = torch.tensor([choose_start(rejection, (i + 0.5) / count) for i in range(count)])
    shares = starts.bincount(minlength=4) / count
    torch.testing.assert_close(shares, rejection / rejection.sum(), rtol=0, atol=1e-3)
    assert {choose_start(torch.zeros(3), u) for u in (0.1, 0.5, 0.9)} == {0, 1, 2}
    assert choose_start(rejection, 1 - 1e-12) == 3


def continued(rows: list[Row], share: float, seed: str = "0-0") -> list[Row]:
    model, head = draft()
    with torch.no_grad():
        batch = collate(rows)
        features = model(batch)[0, batch.supervised_N]
    return continue_answers(
        model, head, rows, features, share=share, num_tokens=5, stop_ids=(), seed=seed
    )


def test_answers_are_continued_with_the_given_probability_and_stay_packable() -> None:
    rows = [made_up_row(i, 4, 6 + i % 7, record_prompt=i % 2 == 0) for i in range(60)]
    assert continued(rows, 0.0) == rows
    new = continued(rows, 0.5)
    changed = [(old, row) for old, row in zip(rows, new, strict=True) if row is not old]
    assert 15 < len(changed) < 45
    for old, row in changed:
        kept = len(row.generated) - 5
        assert 0 <= kept < len(old.generated)
        assert torch.equal(row.generated[:kept], old.generated[:kept])
        assert bool(torch.isin(row.generated[kept:], HOT).all())
        assert row.num_laws - len(row.generated) == old.num_laws - len(old.generated)
    assert collate(new).num_supervised == sum(row.num_laws for row in new)
    assert all(row is not old for old, row in zip(rows, continued(rows, 1.0), strict=True))


def test_what_happens_to_an_answer_depends_on_seed_and_number_alone() -> None:
    rows = [made_up_row(i, 4, 9) for i in range(12)]
    whole = continued(rows, 0.5)
    part = continued(rows[5:], 0.5)
    for one, other in zip(whole[5:], part, strict=True):
        assert torch.equal(one.generated, other.generated)
    again = continued(rows, 0.5, seed="0-1")
    assert any(not torch.equal(a.generated, b.generated) for a, b in zip(whole, again, strict=True))


def test_no_gradient_passes_through_the_sampled_text() -> None:
    """The text is data: what is differentiated is the loss on it."""
    model, head = draft()
    rows = [made_up_row(i, 4, 9) for i in range(3)]
    batch = collate(rows)
    features = model(batch)[0, batch.supervised_N]
    new = continue_answers(
        model, head, rows, features, share=1.0, num_tokens=5, stop_ids=(), seed=""
    )
    assert not any(p.grad is not None for p in model.parameters())
    batch = collate(new)
    assert not batch.tokens_T.is_floating_point()
    sums, gradient = head.backward(
        model(batch)[0, batch.supervised_N].detach(),
        batch,
        objective(ObjectiveConfig(), 0.0),
        scale=1.0,
        rng=torch.Generator(),
    )
    assert sums.count == batch.num_supervised and not gradient.requires_grad
