"""Packing: no answer sees another, every position learns its token, every answer is used once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.batches import collate, compact, deal, num_positions, plan_batches, plan_epoch
from models.draft import DraftModel
from tests.lessons import made_up_row
from tests.tiny import tiny_model

EOS = 2  # the tiny tokenizer's, and its padding too

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)

# ---------------------------------------------------------------- packing


@given(shapes)
def test_a_supervised_position_holds_the_token_before_the_one_of_its_law(
    shape: list[tuple[int, int]],
) -> None:
    """Every second prompt is recorded, too."""
    rows = [
        made_up_row(index, *lengths, record_prompt=index % 2 == 1)
        for index, lengths in enumerate(shape)
    ]
    batch = collate(rows)
    assert len(batch.tokens_T) == sum(map(num_positions, rows))
    assert batch.num_supervised == len(batch.top_ids_NK) == sum(row.num_laws for row in rows)
    found = 0
    for number, row in enumerate(rows):
        whole = [*row.prompt.tolist(), *row.generated.tolist()]
        mine = (batch.segments_T == number).nonzero().squeeze(-1)
        assert batch.tokens_T[mine].tolist() == whole[:-1]
        assert batch.positions_T[mine].tolist() == list(range(len(whole) - 1))
        for place in range(row.num_laws):
            position = int(batch.supervised_N[found])
            before = int(batch.positions_T[position])
            assert int(batch.segments_T[position]) == number
            assert before + 1 == len(whole) - row.num_laws + place
            assert whole[before + 1] == int(batch.next_N[found])
            assert torch.equal(batch.top_ids_NK[found], row.top_ids[place])
            assert torch.equal(batch.top_log_p_NK[found], row.top_log_p[place])
            found += 1
    assert found == batch.num_supervised


def test_laws_of_fewer_ids_are_filled_up_with_what_has_no_probability() -> None:
    rows = [made_up_row(index, 3, 4, top_k=top_k) for index, top_k in enumerate((2, 6, 1))]
    batch = collate(rows)
    assert batch.top_ids_NK.shape == batch.top_log_p_NK.shape == (12, 6)
    for number, row in enumerate(rows):
        mine, num_ids = slice(4 * number, 4 * number + 4), row.top_ids.shape[1]
        assert torch.equal(batch.top_ids_NK[mine, :num_ids], row.top_ids)
        assert torch.equal(batch.top_log_p_NK[mine, :num_ids], row.top_log_p)
        assert not batch.top_log_p_NK[mine, num_ids:].exp().any()


def test_eos_is_supervised_though_it_is_the_padding_id_too() -> None:
    rows = [made_up_row(index, 3, 4, last=EOS) for index in range(3)]
    batch = collate(rows)
    assert (batch.next_N == EOS).sum() >= 3
    ends = batch.supervised_N[torch.tensor([3, 7, 11])]
    # the position before EOS predicts it; EOS itself, which predicts nothing, is not an input
    assert batch.tokens_T[ends].tolist() == [int(row.generated[-2]) for row in rows]
    assert batch.next_N[torch.tensor([3, 7, 11])].tolist() == [EOS] * 3


def test_eos_inside_a_prompt_hides_nothing() -> None:
    """Chat templates end every turn with EOS: attention still reaches what comes before."""
    row = made_up_row(1, 6, 3)
    row.prompt[2] = EOS
    mask = collate([row]).mask()[0, 0]
    assert torch.equal(mask, torch.ones(8, 8, dtype=torch.bool).tril())


@given(shapes)
def test_the_mask_is_causal_inside_each_answer(shape: list[tuple[int, int]]) -> None:
    batch = collate([made_up_row(index, *lengths) for index, lengths in enumerate(shape)])
    mask = batch.mask()[0, 0]
    size = len(batch.tokens_T)
    expected = [
        [bool(batch.segments_T[i] == batch.segments_T[j]) and j <= i for j in range(size)]
        for i in range(size)
    ]
    assert mask.tolist() == expected


@pytest.mark.parametrize(("prompt", "generated"), [(0, 3), (3, 0)])
def test_an_answer_without_a_supervised_token_is_refused_by_number(
    prompt: int, generated: int
) -> None:
    with pytest.raises(ValueError, match="answer 41: "):
        collate([made_up_row(1, 2, 2), made_up_row(41, prompt, generated)])


@pytest.fixture(scope="module")
def model() -> DraftModel:
    return DraftModel(tiny_model(num_layers=2)).eval()


def test_packed_answers_do_not_see_each_other(model: DraftModel) -> None:
    rows = [made_up_row(i, p, g) for i, (p, g) in enumerate([(5, 9), (1, 1), (12, 4), (2, 20)])]
    with torch.no_grad():
        packed = model(collate(rows))[0]
        alone = [model(collate([row]))[0] for row in rows]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_packed_is_what_transformers_computes_for_each_answer(model: DraftModel) -> None:
    """Against the plain model on plain token ids: its positions, its attention."""
    rows = [made_up_row(i, p, g) for i, (p, g) in enumerate([(5, 9), (3, 2), (12, 4)])]
    batch = collate(rows)
    with torch.no_grad():
        packed = model(batch)[0, batch.supervised_N] @ model.head.T
        expected = []
        for row in rows:
            ids = torch.cat([row.prompt, row.generated]).unsqueeze(0)
            expected.append(model.full[0](input_ids=ids).logits[0, len(row.prompt) - 1 : -1])
    torch.testing.assert_close(packed, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_attention_by_answer_is_attention_under_the_whole_mask(model: DraftModel) -> None:
    """On a CPU answers are attended to one by one; elsewhere a mask hides them from each other."""
    batch = collate([made_up_row(i, p, g) for i, (p, g) in enumerate([(5, 9), (1, 1), (12, 4)])])
    found = []
    own = model.config._attn_implementation
    for implementation in (own, "sdpa", "eager"):
        model.full[0].set_attn_implementation(implementation)
        features = model(batch)
        gradient = torch.autograd.grad(features.square().mean(), list(model.body.parameters()))
        found.append([features.detach(), *gradient])
    model.full[0].set_attn_implementation(own)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-4)


def test_changing_one_answer_leaves_the_others_features_alone(model: DraftModel) -> None:
    """The gradient of one answer's features reaches no other answer's embeddings."""
    rows = [made_up_row(index, 4, 5, vocab_size=100) for index in range(3)]
    for number, row in enumerate(rows):  # disjoint ids, so that an embedding belongs to one answer
        row.prompt += 100 * number
        row.generated += 100 * number
    batch = collate(rows)
    table = model.body.get_input_embeddings().weight
    features = model(batch)[0, batch.segments_T == 1]
    (gradient,) = torch.autograd.grad(features.square().sum(), table)
    used = gradient.abs().sum(-1).nonzero().squeeze(-1)
    assert len(used) and bool(((used >= 100) & (used < 200)).all())


# ---------------------------------------------------------------- plans


@given(lengths, st.integers(1, 100), st.integers(0, 3))
def test_an_epoch_uses_each_answer_once_within_the_budget(
    sizes: list[int], budget: int, epoch: int
) -> None:
    steps = plan_epoch(sizes, tokens_per_step=budget, seed=0, epoch=epoch)
    assert sorted(index for step in steps for index in step) == list(range(len(sizes)))
    for step in steps:
        assert len(step) == 1 or sum(sizes[i] for i in step) <= budget
    for step, following in zip(
        steps, steps[1:], strict=False
    ):  # cut only where the next did not fit
        assert sum(sizes[i] for i in step) + sizes[following[0]] > budget


def test_an_epochs_order_is_its_own_and_repeatable() -> None:
    sizes = list(range(1, 60))
    plan = [plan_epoch(sizes, tokens_per_step=64, seed=3, epoch=epoch) for epoch in range(3)]
    assert plan == [
        plan_epoch(sizes, tokens_per_step=64, seed=3, epoch=epoch) for epoch in range(3)
    ]
    assert plan[0] != plan[1] != plan[2] != plan[0]
    assert plan[0] != plan_epoch(sizes, tokens_per_step=64, seed=4, epoch=0)


@given(lengths, st.integers(1, 200), st.integers(1, 5))
def test_the_answers_of_a_step_do_not_depend_on_the_number_of_processes(
    sizes: list[int], budget: int, num_processes: int
) -> None:
    options = {"tokens_per_step": budget, "seed": 1, "num_epochs": 2.0}
    alone = list(plan_batches(sizes, **options))
    shared = list(plan_batches(sizes, **options, num_processes=num_processes))
    assert [len(step) for step in shared] == [num_processes] * len(alone)
    assert [Counter(step[0]) for step in alone] == [
        Counter(index for share in step for index in share) for step in shared
    ]


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 6))
def test_a_step_is_dealt_evenly(sizes: list[int], num_processes: int) -> None:
    step = list(range(len(sizes)))[::-1]
    shares = deal(step, sizes, num_processes)
    assert sorted(index for share in shares for index in share) == sorted(step)
    assert all(share == sorted(share, key=step.index) for share in shares)
    loads = [sum(sizes[i] for i in share) for share in shares]
    # no process has more than the emptiest one and one answer on top
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert sum(not share for share in shares) == max(0, num_processes - len(step))


@given(lengths, st.floats(0.05, 3.0))
def test_epochs_are_counted_in_steps(sizes: list[int], num_epochs: float) -> None:
    options = {"tokens_per_step": 64, "seed": 0}
    plan = [step[0] for step in plan_batches(sizes, num_epochs=num_epochs, **options)]
    expected: list[list[int]] = []
    epoch = 0
    while epoch < num_epochs:
        steps = plan_epoch(sizes, epoch=epoch, **options)
        expected += steps[: max(1, round(min(1.0, num_epochs - epoch) * len(steps)))]
        epoch += 1
    assert plan == expected


def test_compact_answers_make_the_same_batch() -> None:
    rows = [made_up_row(i, 3, 5 + i, hidden_size=8) for i in range(4)]
    rows[2].top_ids[1, 0] = 2**17  # of a large vocabulary
    before = collate(rows)
    sizes = [row.top_ids.nbytes for row in rows]
    for row in rows:
        compact(row)
    shares = [size // row.top_ids.nbytes for row, size in zip(rows, sizes, strict=True)]
    assert shares == [4, 4, 2, 4]
    assert all(row.hidden is None for row in rows)
    after = collate(rows)
    assert after.top_ids_NK.dtype is torch.int64
    for name, value in vars(before).items():
        same = torch.equal(getattr(after, name), value) if name != "rows" else True
        assert same, name
