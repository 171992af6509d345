"""Drafts of the shape that pays, by measured step costs and a draft's calibrated confidence."""

# P survival: the chance that a token and all before it in its round are accepted
# I laws of a sample, K candidates of a law, S survivals of a grid

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from models.decoding.length import Look

FILE = "calibration.json"
GRID = torch.logspace(-2, 0, 41, dtype=torch.float64)  # survivals; below 1% nothing pays
# a further token in a draft step that is made anyway costs this share of the step
WIDER_STEP = 0.1


@dataclass(frozen=True)
class Curve:
    """A piecewise linear function of a probability."""

    at: list[float]
    value: list[float]

    def __call__(self, probability: float) -> float:
        place = bisect(self.at, probability)
        if place == 0:
            return self.value[0] * probability / self.at[0]  # it falls to 0 at 0
        if place == len(self.at):
            return self.value[-1]
        low, high = self.at[place - 1], self.at[place]
        share = (probability - low) / (high - low)
        return self.value[place - 1] + share * (self.value[place] - self.value[place - 1])

    @classmethod
    def fit(cls, probabilities: Tensor, outcomes: Tensor, weights: Tensor | None = None) -> Curve:
        """Mean outcome of alike probabilities. Each group starts from two observations of its own
        probability, so that a small one says little.
        """
        if weights is None:
            weights = torch.ones_like(probabilities)
        edges = torch.cat([torch.logspace(-3, -1, 9), torch.linspace(0.2, 0.9, 8)])
        probabilities = probabilities.contiguous()
        group = torch.bucketize(probabilities, edges)
        num = torch.zeros(len(edges) + 1).index_add_(0, group, weights)
        at = torch.zeros_like(num).index_add_(0, group, weights * probabilities)
        value = torch.zeros_like(num).index_add_(0, group, weights * outcomes)
        found = num > 0
        at, value, num = at[found] / num[found], value[found], num[found]
        value = (value + 2 * at) / (num + 2)
        return cls([round(x, 6) for x in at.tolist()], [round(x, 5) for x in value.tolist()])


@dataclass(frozen=True)
class Calibration:
    """What a draft's probabilities are worth, measured on the target's own answers.

    hits: chance that an id of probability q is the target's most likely one, which is what greedy
        decoding accepts.
    overlaps: sum min(p, q) of laws whose largest probability is q: the chance at temperature 1 of
        a token that will be drawn.
    draws: mean min(1, p / q) of drawn tokens of probability q: the chance of one that was.
    sample: the largest probabilities of some laws.
    """

    hits: Curve
    overlaps: Curve
    draws: Curve
    sample: list[list[float]]

    def write(self, folder: Path) -> None:
        """Beside the weights of an exported draft."""
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> Calibration | None:
        """Of an exported draft; None where it has none."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        tree = json.loads(path.read_text(encoding="utf-8"))
        curves = {name: Curve(**tree[name]) for name in ("hits", "overlaps", "draws")}
        return cls(**curves, sample=tree["sample"])


class Walk:
    """Drafts what raises expected tokens per expected time, by calibrated chances of acceptance.

    With costs in target steps, a round is a walk that earns every drafted token's chance of being
    accepted and pays c for a draft step and about `slope` for one more token to verify. `rate` is
    the most tokens per target step that any such walk reaches, over laws like those of a sample:
    the solution of rate = 1 + W(1), where

        W(P) = max(0, E[max over k of sum_{i<=k} (P conf_i - rate slope) + W(P conf_1)] - rate c)

    is what a draft step behind a token of survival P brings. A step is made while that is positive,
    and as many candidates are drafted as earn more than they cost.
    """

    sees_entropy = False

    def __init__(
        self,
        laws_IK: Tensor,
        curves: Sequence[Curve],
        drawn: Curve | None,
        c: float,
        v: Mapping[int, float],
        most_steps: int,
    ):
        self.most_candidates = len(curves)
        self._curves, self._drawn, self._c = curves, drawn, c
        # times of neighbouring widths differ by noise more than by what they cost, and a kernel may
        # jump at a width that few calls have
        secants = [(time - 1) / (width - 1) for width, time in v.items() if width > 1]
        self._slope = max(1e-3, median(secants))
        self._first = max(self._slope, v.get(2, 1.0) - 1)  # the first one often costs more
        self._chances_IK = torch.tensor(
            [self.confidences(Look(law, 0.0)) for law in laws_IK.tolist()], dtype=torch.float64
        )
        low, high = 1.0, 2.0 + most_steps
        for _ in range(30):
            self.rate = (low + high) / 2
            worth_S, more_S = self._values(most_steps)
            low, high = (self.rate, high) if 1 + worth_S[-1] > self.rate else (low, self.rate)
        self._worth = Curve(GRID.tolist(), worth_S.tolist())
        self._more = Curve(GRID.tolist(), more_S.tolist())

    def _values(self, most_steps: int) -> tuple[Tensor, Tensor]:
        """W on the grid of survivals, and what the candidates of a further token earn there."""
        reached_SI = GRID.unsqueeze(-1) * self._chances_IK[:, 0]
        costs_K = torch.full((self.most_candidates,), self._slope, dtype=torch.float64).cumsum(0)
        gains_SIK = GRID.view(-1, 1, 1) * self._chances_IK.cumsum(-1) - self.rate * costs_K
        gain_SI = gains_SIK.amax(-1).clamp(min=0)
        # the first token of a round makes the call wider than one
        gain_SI[-1] = (gain_SI[-1] - self.rate * (self._first - self._slope)).clamp(min=0)
        above = torch.bucketize(reached_SI, GRID).clamp(1, len(GRID) - 1)
        share_SI = (reached_SI - GRID[above - 1]) / (GRID[above] - GRID[above - 1])
        worth_S = torch.zeros_like(GRID)
        for _ in range(most_steps):
            after_SI = torch.lerp(worth_S[above - 1], worth_S[above], share_SI.clamp(0, 1))
            # without a candidate there is nothing to go on from
            after_SI = after_SI.where(gain_SI > 0, 0.0)
            worth_S = ((gain_SI + after_SI).mean(-1) - self.rate * self._c).clamp(min=0)
        return worth_S, gain_SI.mean(-1)

    def confidences(self, look: Look) -> list[float]:
        """Calibrated."""
        return [curve(q) for curve, q in zip(self._curves, look.largest, strict=False)]

    def confidence(self, probability: float, before: float) -> float:
        """Calibrated for drawn tokens."""
        return before if self._drawn is None else self._drawn(probability)

    def num_candidates(self, confidences: Sequence[float], survival: float, drafted: int) -> int:
        """As many as earn the most."""
        best = earned = 0.0
        kept = 0
        for number, confidence in enumerate(confidences, 1):
            cost = self._slope if drafted + number > 1 else self._first
            earned += survival * confidence - self.rate * cost
            if earned > best:
                best, kept = earned, number
        return kept

    def continues(self, survivals: Sequence[float]) -> list[int]:
        """The likeliest if a step behind it pays, and with it those that pay for a wider step."""
        first = max(range(len(survivals)), key=survivals.__getitem__)
        if self._worth(survivals[first]) <= 0:
            return []
        return [
            place
            for place, survival in enumerate(survivals)
            if place == first or self._more(survival) > self.rate * self._c * WIDER_STEP
        ]


class CostAware:
    """A `Walk` for greedy decoding, whose drafts are trees, and one for sampling, whose drafts are
    chains: these are drawn, and the likeliest id stands for the one that will be.
    """

    def __init__(
        self,
        calibration: Calibration,
        c: float,
        v: Mapping[int, float],
        *,
        most_steps: int,
        most_candidates: int = 4,
    ):
        """c: time of a draft step, v: of a target call over so many tokens, both over that of a
        target call over one.
        """
        self._calibration, self._c, self._v = calibration, c, v
        self.most_steps, self.most_candidates = most_steps, most_candidates
        self._walks: dict[tuple[bool, int], Walk] = {}

    def shape(self, *, is_greedy: bool, is_chain: bool = False) -> Walk:
        """Costs are the same, chances are not."""
        known = self._calibration
        curves = [known.hits if is_greedy else known.overlaps]
        if is_greedy and not is_chain:
            curves *= self.most_candidates
        key = is_greedy, len(curves)
        if key not in self._walks:
            laws_IK = torch.tensor(self._calibration.sample)
            drawn = None if is_greedy else known.draws
            self._walks[key] = Walk(laws_IK, curves, drawn, self._c, self._v, self.most_steps)
        return self._walks[key]
