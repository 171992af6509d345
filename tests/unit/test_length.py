"""What pays: calibrated confidence, and the shape of drafts that follows from it and from costs."""

# I laws, K candidates

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.shards import Row
from models.calibration import NUM_CANDIDATES, calibrate, laws_of
from models.decoding.by_cost import Calibration, CostAware, Curve, Walk
from models.decoding.length import Look, StopBelow, StopUncertain
from tests.tiny import VOCAB_SIZE, tiny_model

HONEST = Curve([0.001, 1.0], [0.001, 1.0])  # a probability is worth what it says
COSTS = {1: 1.0, 2: 1.08, 5: 1.25, 9: 1.45}


def laws(concentration: float, num: int = 300) -> Tensor:
    """The four largest probabilities of random laws over 12 ids."""
    torch.manual_seed(0)
    law_IV = torch.distributions.Dirichlet(torch.full((12,), concentration)).sample((num,))
    return law_IV.topk(4, -1).values


def rate_of_playing(walk: Walk, laws_IK: Tensor, num_rounds: int, c: float) -> float:
    """Tokens per target step of a decoder that asks the walk, and whose target's token is a
    candidate with just the probability that the draft gives it.
    """
    choose = random.Random(0)
    tokens = time = 0.0
    for _ in range(num_rounds):
        nodes = steps = accepted = 0
        survival, is_alive = 1.0, True
        while walk.continues([survival]):
            steps += 1
            law = choose.choice(laws_IK).tolist()
            confidences = walk.confidences(Look(law, 0.0))
            num = walk.num_candidates(confidences, survival, nodes)
            nodes += num
            if num == 0:
                break
            target = choose.random()
            rank = next((i for i in range(num) if target < sum(law[: i + 1])), None)
            accepted += is_alive and rank is not None
            is_alive = is_alive and rank == 0  # only behind the likeliest does it draft on
            survival *= confidences[0]
        tokens += 1 + accepted
        time += steps * c + 1 + max(0, nodes - 1) * walk._slope + (nodes > 0) * walk._first
    return tokens / time


@pytest.mark.parametrize("num_candidates", [1, 4])
@pytest.mark.parametrize(("concentration", "c"), [(0.1, 0.1), (0.1, 0.4), (0.5, 0.05)])
def test_the_rate_is_what_playing_by_the_walk_reaches(
    concentration: float, c: float, num_candidates: int
) -> None:
    laws_IK = laws(concentration)
    walk = Walk(laws_IK, [HONEST] * num_candidates, None, c, COSTS, 8)
    assert walk.rate == pytest.approx(rate_of_playing(walk, laws_IK, 20_000, c), rel=0.025)


def test_more_candidates_and_cheaper_steps_raise_the_rate() -> None:
    laws_IK = laws(0.3)
    rates = [
        [Walk(laws_IK, [HONEST] * num, None, c, COSTS, 8).rate for num in (1, 2, 4)]
        for c in (0.4, 0.1, 0.02)
    ]
    for one in rates:
        assert one == sorted(one)
    for column in zip(*rates, strict=True):
        assert list(column) == sorted(column)
    assert rates[2][2] > rates[0][0] + 0.1


def test_a_draft_that_cannot_pay_is_not_made() -> None:
    """Then a target call brings one token, and nothing is drafted at all."""
    walk = Walk(laws(3.0), [HONEST], None, 0.9, COSTS, 8)
    assert walk.rate == pytest.approx(1.0, abs=1e-6)
    assert walk.continues([1.0]) == []


def test_candidates_are_drafted_while_they_pay() -> None:
    walk = Walk(laws(0.3), [HONEST] * 4, None, 0.1, COSTS, 8)
    price = walk.rate * walk._slope
    assert walk.num_candidates([0.9, 1.1 * price, 0.9 * price, 0.01], 1.0, 0) == 2
    assert walk.num_candidates([0.9, 1.1 * price, 0.9 * price, 0.01], 0.5, 0) == 1
    assert walk.num_candidates([0.5 * price] * 4, 1.0, 3) == 0


def test_greedy_drafts_are_trees_and_sampled_ones_chains() -> None:
    rule = CostAware(
        Calibration(HONEST, HONEST, Curve([0.001, 1.0], [0.5, 0.5]), laws(0.3).tolist()),
        0.1,
        COSTS,
        most_steps=8,
    )
    assert rule.shape(is_greedy=True).most_candidates == 4
    assert rule.shape(is_greedy=True, is_chain=True).most_candidates == 1
    sampled = rule.shape(is_greedy=False)
    assert sampled.most_candidates == 1
    assert sampled.confidence(0.9, 0.7) == pytest.approx(0.5)  # of a token that was drawn
    assert rule.shape(is_greedy=True).confidence(0.9, 0.7) == 0.7
    assert rule.shape(is_greedy=True) is rule.shape(is_greedy=True)  # solved once


def test_thresholds() -> None:
    below = StopBelow(0.4).shape(is_greedy=False, is_chain=False)
    assert below.confidences(Look([0.7, 0.2], 1.0)) == [0.7, 0.2]
    assert below.confidence(0.3, 0.7) == 0.3
    assert (below.continues([0.41]), below.continues([0.39])) == ([0], [])
    uncertain = StopUncertain().shape(is_greedy=True, is_chain=False)
    assert uncertain.confidences(Look([0.7], 0.5)) == [1.0]  # sqrt(0.075) = 0.27
    assert uncertain.confidences(Look([0.7], 0.7)) == [0.0]  # sqrt(0.105) = 0.32
    assert (uncertain.continues([1.0]), uncertain.continues([0.0])) == ([0], [])


def test_a_curve_is_the_mean_outcome_of_alike_probabilities() -> None:
    rng = torch.Generator().manual_seed(0)
    probabilities = torch.rand(50_000, generator=rng)
    outcomes = (torch.rand(50_000, generator=rng) < probabilities**2).float()
    curve = Curve.fit(probabilities, outcomes)
    for q in (0.15, 0.35, 0.62, 0.9):
        assert curve(q) == pytest.approx(q**2, abs=0.02)
    assert curve(0.0) == 0
    # a group with little in it stays near its own probability
    few = Curve.fit(torch.tensor([0.5]), torch.tensor([0.0]))
    assert few(0.5) == pytest.approx(1 / 3, abs=1e-5)


def row(tokens: list[int], target: torch.nn.Module) -> Row:
    """An answer of three prompt tokens with the target's eight likeliest ids."""
    with torch.inference_mode():
        law_NV = target(torch.tensor([tokens])).logits[0, 2:-1].log_softmax(-1)
    top = law_NV.topk(8, -1)
    return Row(
        index=0,
        category="chat",
        temperature=1.0,
        prompt=torch.tensor(tokens[:3]),
        generated=torch.tensor(tokens[3:]),
        top_ids=top.indices,
        top_log_p=top.values,
    )


def test_a_model_that_drafts_for_itself_is_always_right(tmp_path: Path) -> None:
    model = tiny_model()
    choose = random.Random(1)
    rows = [row([choose.randrange(VOCAB_SIZE) for _ in range(40)], model) for _ in range(20)]
    found = calibrate(laws_of(model, None), rows)
    assert found is not None
    assert found.draws(0.5) == pytest.approx(1.0, abs=0.05)
    assert len(found.sample[0]) == NUM_CANDIDATES
    assert found.overlaps(0.9) > 0.9 > found.overlaps(0.2)  # of which eight ids are recorded
    found.write(tmp_path)
    assert Calibration.read(tmp_path) == found
    assert Calibration.read(tmp_path / "elsewhere") is None
    other = calibrate(laws_of(tiny_model(seed=5), torch.arange(0, VOCAB_SIZE, 2)), rows)
    assert other is not None
    assert other.hits(0.9) < 0.3
    assert calibrate(laws_of(model, None), [row_without_laws(rows[0])]) is None


def row_without_laws(known: Row) -> Row:
    none = torch.empty(len(known.generated), 0)
    return Row(0, "chat", 1.0, known.prompt, known.generated, top_ids=none.long(), top_log_p=none)
