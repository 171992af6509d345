"""The sampling law and the draws from it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.decoding.kernels import largest
from models.decoding.sampling import (
    NonFiniteLogits,
    Sampling,
    draw,
    draw_mixed,
    law,
    penalise,
)

LAST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1, which torch.rand can return

# Few distinct values, so that ties are common; an infinite one stands for a forbidden id.
logit = st.one_of(st.integers(-3, 3).map(float), st.floats(-8, 8, width=32))
vectors = st.lists(logit, min_size=1, max_size=9)
masked_vectors = st.builds(
    lambda values, holes: [
        *(-math.inf if hole else v for v, hole in zip(values, holes, strict=False)),
        1.0,
    ],
    vectors,
    st.lists(st.booleans(), min_size=9, max_size=9),
)
temperatures = st.one_of(st.just(0.0), st.floats(0.2, 3))
samplings = st.builds(
    Sampling,
    temperature=temperatures,
    top_k=st.integers(0, 10),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.95),
)
uniforms = st.one_of(st.just(0.0), st.just(LAST_UNIFORM), st.floats(0, LAST_UNIFORM, width=32))


def law_of(values: list[float], **settings: Any) -> Tensor:
    """Law of one position, shape V."""
    return law(torch.tensor([[values]]), Sampling(**settings))[0, 0]


@given(masked_vectors, samplings)
def test_a_law_sums_to_one_and_favours_larger_logits(
    values: list[float], sampling: Sampling
) -> None:
    logits = torch.tensor([[values]])
    probabilities = law(logits, sampling)
    assert probabilities.dtype == torch.float32
    assert probabilities.shape == logits.shape
    assert (probabilities >= 0).all()
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-6)
    assert (probabilities[logits == -torch.inf] == 0).all()
    in_order = probabilities[0, 0][logits[0, 0].argsort(stable=True)]
    if sampling.temperature > 0:  # greedy breaks ties by place
        assert (in_order.diff() >= 0).all()
    assert probabilities[0, 0, logits.argmax()] == probabilities.max()


@given(masked_vectors, st.integers(0, 10), st.floats(0.05, 1))
def test_temperature_zero_is_the_first_most_likely_id(
    values: list[float], top_k: int, top_p: float
) -> None:
    probabilities = law_of(values, temperature=0.0, top_k=top_k, top_p=top_p)
    expected = [0.0] * len(values)
    expected[values.index(max(values))] = 1.0
    assert probabilities.tolist() == expected


@given(vectors, st.floats(0.2, 3))
def test_log_ratios_are_logit_differences_over_temperature(
    values: list[float], temperature: float
) -> None:
    logs = law_of(values, temperature=temperature).log()
    wanted = (torch.tensor(values) - values[0]) / temperature
    torch.testing.assert_close(logs - logs[0], wanted, atol=1e-4, rtol=1e-5)


@given(vectors, st.floats(0.2, 3), st.integers(1, 10))
def test_top_k_keeps_the_k_likeliest_and_their_ties(
    values: list[float], temperature: float, top_k: int
) -> None:
    whole = law_of(values, temperature=temperature)
    cut = law_of(values, temperature=temperature, top_k=top_k)
    threshold = sorted(whole.tolist(), reverse=True)[min(top_k, len(values)) - 1]
    assert_restricted(cut, whole, whole >= threshold)


@given(vectors, st.floats(0.2, 3), st.floats(0, 0.99))
def test_min_p_keeps_ids_near_the_likeliest(
    values: list[float], temperature: float, min_p: float
) -> None:
    whole = law_of(values, temperature=temperature)
    cut = law_of(values, temperature=temperature, min_p=min_p)
    assert_restricted(cut, whole, whole >= min_p * whole.max())


@given(vectors, st.floats(0.2, 3), st.floats(0.05, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(
    values: list[float], temperature: float, top_p: float
) -> None:
    whole = law_of(values, temperature=temperature)
    cut = law_of(values, temperature=temperature, top_p=top_p)
    kept = cut > 0
    assert_restricted(cut, whole, kept)
    least = whole[kept].min()
    assert (whole[~kept] < least).all()  # the likeliest ids, all ties at the cut among them
    assert whole[kept].sum() >= top_p - 1e-6
    assert whole[whole > least].sum() < top_p + 1e-6  # and without the last ones p is not reached


def assert_restricted(cut: Tensor, whole: Tensor, kept: Tensor) -> None:
    """`cut` is `whole` on the kept ids alone, renormalised."""
    wanted = whole.where(kept, 0.0)
    assert ((cut > 0) == (wanted > 0)).all()
    torch.testing.assert_close(cut, wanted / wanted.sum(), atol=1e-6, rtol=1e-5)


def test_ties_at_a_cut_are_all_kept() -> None:
    tied = [1.0, 2.0, 2.0, 2.0, 0.0]
    third = [0, 1 / 3, 1 / 3, 1 / 3, 0]
    assert law_of(tied, top_k=1).tolist() == pytest.approx(third)
    assert law_of(tied, top_p=0.1).tolist() == pytest.approx(third)
    assert law_of(tied, min_p=0.9).tolist() == pytest.approx(third)


@given(st.permutations(range(6)), samplings.filter(lambda sampling: sampling.temperature > 0))
def test_a_law_does_not_depend_on_the_order_of_ids(order: list[int], sampling: Sampling) -> None:
    logits = torch.tensor([0.5, 0.5, 2.0, -1.0, 2.0, 1.0])
    permuted = law(logits[list(order)].view(1, 1, -1), sampling)
    torch.testing.assert_close(permuted, law(logits.view(1, 1, -1), sampling)[..., list(order)])


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.0},
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name}={settings[name]}"):
        Sampling(**settings)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_nan_logits_name_the_side_and_the_position(side: str, temperature: float) -> None:
    logits = torch.zeros(3, 5, 7)
    logits[1, 4, 6] = torch.nan
    with pytest.raises(NonFiniteLogits, match=f"{side}: logits are NaN at row 1, position 14"):
        law(logits, Sampling(temperature, top_k=3), side=side, at=10)
    with pytest.raises(NonFiniteLogits, match="row 0, position 4"):  # one text, no batch
        law(logits[1], Sampling(temperature))


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-6, 0.1, 0.5, 1.0]), min_size=1, max_size=9), uniforms
)
def test_an_id_without_mass_is_never_drawn(weights: list[float], uniform: float) -> None:
    weights = [*weights, 0.3, 0.0, 0.0]
    index = int(draw(torch.tensor([[weights]]), torch.tensor([[uniform]])))
    assert weights[index] > 0


def test_draws_have_the_frequencies_of_the_law() -> None:
    """Over an even grid of uniforms, frequencies are exact but for one point of it per id."""
    law_V = torch.tensor([0.0, 0.2, 0.05, 0.0, 0.6, 0.15, 0.0])
    grid = (torch.arange(10_000) + 0.5) / 10_000
    for scale in (1.0, 0.01):
        drawn = draw((scale * law_V).expand(1, 10_000, 7).contiguous(), grid.unsqueeze(0))
        counts = torch.bincount(drawn[0], minlength=7)
        assert (counts / 10_000 - law_V).abs().max() <= 2e-4


# ---------------------------------------------------------------- rows of different temperatures

NUM_UNIFORMS = 20_000


def mixed(logits_V: Tensor, temperature: float, uniform_N: Tensor, num_recorded: int) -> Tensor:
    logits_NV = logits_V.expand(len(uniform_N), -1)
    temperature_N = torch.full((len(uniform_N),), temperature)
    return mixed_rows(logits_NV, temperature_N, uniform_N, num_recorded)


def mixed_rows(
    logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor, num_recorded: int
) -> Tensor:
    recorded = largest(logits_BV, num_recorded, is_law=True)
    return draw_mixed(logits_BV, temperature_B, uniform_B, recorded)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 1.8])
@pytest.mark.parametrize("num_recorded", [1, 4, 12])
def test_mixed_draws_follow_the_law(temperature: float, num_recorded: int) -> None:
    """Frequencies over an even grid of uniforms, most of which fall beyond the one recorded id."""
    logits_V = 2 * torch.randn(12, generator=torch.Generator().manual_seed(4))
    grid = (torch.arange(NUM_UNIFORMS) + 0.5) / NUM_UNIFORMS
    tokens = mixed(logits_V, temperature, grid, num_recorded)
    frequency_V = torch.bincount(tokens, minlength=12) / NUM_UNIFORMS
    law_V = law(logits_V.view(1, 1, -1), Sampling(temperature))[0, 0]
    assert (frequency_V - law_V).abs().max() <= 2 / NUM_UNIFORMS


def test_every_row_has_its_own_temperature() -> None:
    rng = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(6, 20, generator=rng)
    temperature_B = torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 0.7])
    uniform_B = torch.rand(6, generator=rng)
    together = mixed_rows(logits_BV, temperature_B, uniform_B, 3)
    alone = [
        int(mixed(logits_BV[i], float(temperature_B[i]), uniform_B[i : i + 1], 3)) for i in range(6)
    ]
    assert together.tolist() == alone


@given(st.floats(0.01, 1), st.integers(1, 8), st.floats(1, 1000), uniforms)
def test_mixed_draws_never_give_an_id_without_mass(
    temperature: float, num_recorded: int, size: float, uniform: float
) -> None:
    """At low temperatures the recorded ids hold all mass, yet may sum to less than 1."""
    logits_V = size * torch.tensor([-1.0, 0.5, 1.0, 0.999, -2.0, 0.0, -0.5, -3.0])
    token = int(mixed(logits_V, temperature, torch.tensor([uniform]), num_recorded))
    assert law(logits_V.view(1, 1, -1), Sampling(temperature))[0, 0, token] > 0


def test_large_scaled_logits_keep_their_law() -> None:
    """Scaled to 60,000, float32 logits are 0.004 apart: only their differences may be scaled."""
    logits_V = torch.tensor([600.0, 600.01, 599.99, 590.0])
    grid = (torch.arange(NUM_UNIFORMS) + 0.5) / NUM_UNIFORMS
    frequency_V = torch.bincount(mixed(logits_V, 0.01, grid, 2), minlength=4) / NUM_UNIFORMS
    wanted_V = torch.softmax((logits_V - logits_V.max()).double() / 0.01, -1)
    assert (frequency_V - wanted_V).abs().max() <= 2 / NUM_UNIFORMS


@given(st.lists(st.integers(0, 2), min_size=4, max_size=12))
def test_greedy_rows_take_the_first_of_equal_logits(values: list[int]) -> None:
    logits_V = torch.tensor(values, dtype=torch.float32)
    token = int(mixed(logits_V, 0.0, torch.tensor([0.9]), len(values)))
    assert token == values.index(max(values))


def test_penalties_by_hand() -> None:
    """Prompt 0 0 1, then 1 2, then drafted 2: ids 0 to 4, id 4 ends an output."""
    logits = torch.tensor([2.0, -1.0, 4.0, 3.0, 5.0]).expand(1, 2, 5)
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, min_new_tokens=3
    )
    penalised = partial(
        penalise,
        sampling=sampling,
        text=[0, 0, 1, 1, 2],
        num_prompt=3,
        drafted_1G=torch.tensor([[2]]),
        vocab_size=5,
        stop_ids=[4],
    )
    found = penalised(logits)
    want = [
        # once generated: 1 and 2; then 2 twice
        [1.0, -2.0 - 0.75, 2.0 - 0.75, 3.0, -math.inf],
        [1.0, -2.0 - 0.75, 2.0 - 1.0, 3.0, 5.0],
    ]
    torch.testing.assert_close(found, torch.tensor([want]))
    ids_V = torch.tensor([4, 2])
    some = penalised(logits[..., ids_V], ids_V=ids_V)
    torch.testing.assert_close(some, found[..., ids_V])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
    ],
)
def test_impossible_penalties_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(**settings)
