"""Encoded laws decode to what was recorded: the same ids, log-probabilities within the documented
bound, the same mass.
"""

# M laws, V vocabulary, K ids of the longest law

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from data.codec import (
    FURTHER,
    FURTHER_BITS,
    LARGEST_DROP,
    SECOND,
    UNRECORDED,
    Laws,
    cut_at_mass,
    encode,
    join,
    law_bytes,
    pack,
    unpack,
    width,
)

SIZES = (2, 3, 300, 4096, 2**16, 2**16 + 1, 152_064)
ROUNDING = 1e-5  # of float32 sums


@st.composite
def recorded(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Ids and log-probabilities MK as generation hands them over, and the vocabulary's size.

    Laws from nearly flat to nearly one-hot, some with ids of no probability at all.
    """
    vocab_size = draw(st.sampled_from(SIZES))
    num_laws = draw(st.integers(1, 12))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread_M1 = torch.tensor(
        draw(
            st.lists(
                st.sampled_from([0.0, 0.3, 2.0, 8.0, 60.0]), min_size=num_laws, max_size=num_laws
            )
        )
    ).unsqueeze(-1)
    logits_MV = torch.randn(num_laws, vocab_size, generator=rng) * spread_M1
    if draw(st.booleans()):
        logits_MV[:, draw(st.integers(1, vocab_size - 1)) :] = -torch.inf
    top = logits_MV.log_softmax(-1).topk(min(draw(st.integers(1, 64)), vocab_size), -1)
    mass = draw(st.floats(0.01, 1.0))
    return top.indices, cut_at_mass(top.values, mass), vocab_size


def decoded(recording: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor]:
    ids_MK, log_p_MK, vocab_size = recording
    return Laws.of(encode(ids_MK, log_p_MK, vocab_size), vocab_size).decode(0, len(ids_MK))


def documented_error(log_p: list[float]) -> float:
    """Twice the largest half of what lies between the steps around a distance, and 2**-10."""
    off = worst = 0.0
    for place, (above, below) in enumerate(pairwise(log_p)):
        steps = (FURTHER if place else SECOND).tolist()
        drop = above - below + off  # from the decoded one above, which is off as far as that
        cell = min(max(bisect_left(steps, drop), 1), len(steps) - 1)
        off = (steps[cell] - steps[cell - 1]) / 2
        worst = max(worst, off)
    return 2 * worst + 2**-10


@given(recorded(), st.integers(0, 2**32))
def test_a_law_may_have_no_ids(recording: tuple[Tensor, Tensor, int], seed: int) -> None:
    """As of a server that leaves some out: the others are what they are without it."""
    ids_MK, log_p_MK, vocab_size = recording
    empty_M = torch.rand(len(ids_MK), generator=torch.Generator().manual_seed(seed)) < 0.5
    holed = (ids_MK, log_p_MK.masked_fill(empty_M.unsqueeze(-1), UNRECORDED), vocab_size)
    (_, whole), (_, found) = decoded(recording), decoded(holed)
    assert bool((found[empty_M] == UNRECORDED).all())
    assert torch.equal(found[~empty_M], whole[~empty_M][:, : found.shape[1]])


@given(recorded())
def test_ids_are_exact_and_log_probabilities_within_the_bound(
    recording: tuple[Tensor, Tensor, int],
) -> None:
    ids_MK, log_p_MK, _ = recording
    found_ids, found_log_p = decoded(recording)
    assert found_ids.dtype is torch.int64 and found_log_p.dtype is torch.float32
    assert found_ids.shape[1] == int((log_p_MK > UNRECORDED).sum(-1).max())
    for law, ids, values, new_ids, new_values in zip(
        range(len(ids_MK)), ids_MK, log_p_MK, found_ids, found_log_p, strict=True
    ):
        num = int((values > UNRECORDED).sum())
        assert new_ids[:num].tolist() == ids[:num].tolist(), law
        assert not new_ids[num:].any() and bool((new_values[num:] == UNRECORDED).all())
        assert bool((new_values[:num].diff() <= 0).all()), "probabilities fall"
        error = (new_values[:num] - values[:num]).abs().max()
        assert error <= documented_error(values[:num].tolist()) + ROUNDING


@given(recorded())
def test_the_mass_is_kept_and_never_above_one(recording: tuple[Tensor, Tensor, int]) -> None:
    mass_M = recording[1].double().exp().sum(-1)
    found_M = decoded(recording)[1].exp().sum(-1)
    assert bool((found_M <= 1).all())
    smaller_M = torch.minimum(mass_M, 1 - mass_M).clamp(min=0)
    assert bool(((found_M - mass_M).abs() <= smaller_M * 2**-11 + 2**-20 + ROUNDING / 10).all())


@given(recorded(), st.data())
def test_a_part_is_decoded_without_the_rest(
    recording: tuple[Tensor, Tensor, int], data: st.DataObject
) -> None:
    """Every other byte of the packed tensors may be garbage."""
    ids_MK, log_p_MK, vocab_size = recording
    start = data.draw(st.integers(0, len(ids_MK)))
    stop = data.draw(st.integers(start, len(ids_MK)))
    tensors = encode(ids_MK, log_p_MK, vocab_size)
    read: set[tuple[str, int]] = set()

    def watched(name: str, first: int, after: int) -> Tensor:
        read.update((name, place) for place in range(first, after))
        return tensors[name][first:after]

    part = Laws(tensors["counts"], vocab_size, watched).decode(start, stop)
    whole = Laws.of(tensors, vocab_size).decode(0, len(ids_MK))
    num_ids = int(tensors["counts"][start:stop].sum())
    longest = part[0].shape[1]
    assert torch.equal(part[0], whole[0][start:stop, :longest])
    assert torch.equal(part[1], whole[1][start:stop, :longest])
    assert bool((whole[1][start:stop, longest:] == UNRECORDED).all())
    # up to seven numbers more on either side
    assert sum(name == "ids" for name, _ in read) * 8 <= (num_ids + 14) * width(vocab_size)


@given(recorded(), recorded())
def test_joined_laws_are_those_of_both(
    one: tuple[Tensor, Tensor, int], other: tuple[Tensor, Tensor, int]
) -> None:
    """Also what collating does: the shorter ones are filled up, and encoding sees no difference."""
    ids_MK, log_p_MK = join([one[:2], other[:2]])
    size = max(one[2], other[2])
    both = encode(ids_MK, log_p_MK, size)
    parts = [encode(ids, log_p, size) for ids, log_p, _ in (one, other)]
    for name in ("counts", "rest", "second"):
        assert torch.equal(both[name], torch.cat([part[name] for part in parts])), name


@given(st.integers(1, 24), st.lists(st.integers(0, 2**24 - 1), max_size=40))
def test_packed_numbers_come_back(bits: int, numbers: list[int]) -> None:
    values_L = torch.tensor([number % 2**bits for number in numbers], dtype=torch.int64)
    packed = pack(values_L, bits)
    assert len(packed) == -(-len(numbers) // 8) * bits
    assert unpack(packed, bits)[: len(numbers)].tolist() == values_L.tolist()


@pytest.mark.parametrize(
    ("vocab_size", "bits"), [(2, 1), (3, 2), (49_152, 16), (2**16, 16), (2**16 + 1, 17)]
)
def test_ids_take_the_fewest_bits(vocab_size: int, bits: int) -> None:
    assert width(vocab_size) == bits


@given(recorded())
def test_a_law_takes_what_is_said_before_the_run(recording: tuple[Tensor, Tensor, int]) -> None:
    ids_MK, log_p_MK, vocab_size = recording
    counts = (log_p_MK > UNRECORDED).sum(-1).tolist()
    num_bytes = sum(tensor.nbytes for tensor in encode(ids_MK, log_p_MK, vocab_size).values())
    expected = sum(law_bytes(num, vocab_size) for num in counts)
    assert expected <= num_bytes <= expected + width(vocab_size) + FURTHER_BITS


@given(recorded(), st.floats(0.01, 1.0))
def test_a_law_ends_where_its_mass_is_reached(
    recording: tuple[Tensor, Tensor, int], mass: float
) -> None:
    before = recording[1]
    for whole, kept in zip(before, cut_at_mass(before, mass), strict=True):
        num = int((kept > UNRECORDED).sum())
        assert num >= 1
        assert torch.equal(kept[:num], whole[:num])
        sums = whole.double().exp().cumsum(0)
        assert num == 1 or sums[num - 2] < mass + ROUNDING
        if num < int((whole > UNRECORDED).sum()):
            assume(abs(float(sums[num - 1]) - mass) > ROUNDING)
            assert sums[num - 1] >= mass or whole[num - 1] - whole[num] > LARGEST_DROP


def test_laws_of_more_than_255_ids() -> None:
    log_p_MK = torch.linspace(0, -5, 300).log_softmax(-1).repeat(2, 1)
    ids_MK = torch.arange(300).flip(0).repeat(2, 1)
    found = decoded((ids_MK, log_p_MK, 300))
    assert torch.equal(found[0], ids_MK)
    torch.testing.assert_close(found[1], log_p_MK, atol=0.01, rtol=0)


def test_nan_stays_nan() -> None:
    """What cannot be learned from is not made to look as if it could."""
    log_p_MK = torch.tensor([[-0.1, -3.0], [float("nan"), float("nan")]])
    found = decoded((torch.tensor([[4, 2], [0, 1]]), log_p_MK, 5))[1]
    assert bool(found[0].isfinite().all()) and bool(found[1].isnan().all())
