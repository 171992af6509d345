"""AdaSPEC: which positions a reference selects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data.batches import Batch, collate
from models.draft import DraftModel, from_layers
from tests.lessons import made_up_row
from tests.tiny import VOCAB_SIZE, tiny_model
from train.head import Head, features_of
from train.objectives import forward_kl, lump
from train.select import Selection, num_selected, select


def test_the_largest_gaps_of_each_answer_are_selected() -> None:
    gap = torch.tensor([0.1, 5.0, -1.0, 4.0, 0.3, 9.0, 8.0, 7.0])
    assert select(gap, [5, 3], 0.4).tolist() == [1, 3, 5, 6]
    assert select(gap, [5, 3], 1.0).tolist() == list(range(8))
    assert select(torch.zeros(5), [5], 0.4).tolist() == [0, 1]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.floats(0.01, 1), st.integers(0, 99))
def test_selection_is_a_share_and_leaves_out_nothing_larger(
    counts: list[int], share: float, seed: int
) -> None:
    gap = torch.randn(sum(counts), generator=torch.Generator().manual_seed(seed))
    kept = select(gap, counts, share)
    assert kept.tolist() == sorted(set(kept.tolist()))
    offset = 0
    for count in counts:
        inside = [i for i in kept.tolist() if offset <= i < offset + count]
        outside = [i for i in range(offset, offset + count) if i not in inside]
        assert len(inside) == num_selected(count, share) >= 1
        assert share * count <= len(inside) + 1e-6 < share * count + 1 + 2e-6
        assert not outside or gap[outside].max() <= gap[inside].min()
        offset += count


@pytest.mark.parametrize(("count", "share", "kept"), [(100, 0.07, 7), (10, 0.4, 4), (1, 0.4, 1)])
def test_a_share_is_rounded_up_but_not_by_rounding_error(
    count: int, share: float, kept: int
) -> None:
    assert num_selected(count, share) == kept


def kl_by_hand(model: DraftModel, batch: Batch) -> Tensor:
    """KL(p || q) of recorded ids and rest, over the whole vocabulary."""
    with torch.no_grad():
        log_q = (model(batch)[0, batch.supervised_N] @ model.head.T).log_softmax(-1)
    return forward_kl(lump(batch.top_log_p_NK), lump(log_q.gather(-1, batch.top_ids_NK)))


@pytest.mark.parametrize("num_hot", [VOCAB_SIZE, 200])
def test_a_reference_selects_where_it_is_ahead(num_hot: int) -> None:
    target = tiny_model(4)
    draft, reference = (DraftModel(from_layers(target, layers)) for layers in ([0], [0, 1]))
    rows = [made_up_row(i, 3, 5 + i) for i in range(4)]
    batch = collate(rows)
    counts = [row.num_laws for row in rows]
    hot = None if num_hot == VOCAB_SIZE else torch.arange(num_hot)
    options = {"num_cold": VOCAB_SIZE, "dtype": torch.float32, "chunk": 7}
    heads = [Head(model.head, hot, **options) for model in (draft, reference)]  # type: ignore[arg-type]
    chosen = Selection(reference, heads[1], 0.4).choose(
        batch, counts, features_of(draft, batch, torch.float32), heads[0], None, seed=0
    )
    if hot is None:  # with fewer ids the rest is larger, and so is what is lumped into it
        gap = kl_by_hand(draft, batch) - kl_by_hand(reference, batch)
        assert torch.equal(chosen, select(gap, counts, 0.4))
    line = batch.supervise(chosen)
    assert line.num_supervised == len(chosen) == sum(num_selected(count, 0.4) for count in counts)
    assert torch.equal(line.next_N, batch.next_N[chosen])
    assert torch.equal(line.tokens_T, batch.tokens_T)
