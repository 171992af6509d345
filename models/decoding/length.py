"""How many tokens to draft, and where: rules that look at the draft's laws while it drafts.

A rule sees laws before tokens are drawn from them, and may look at drawn tokens that are verified
whatever it decides. It never sees a token that is then dropped: that would change the output law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Look(NamedTuple):
    """What a rule sees of a draft's law at temperature 1: its largest probabilities, falling, and
    its entropy in nats.
    """

    largest: Sequence[float]
    entropy: float


class Shape(Protocol):
    """Decides the shape of a draft, law by law."""

    most_candidates: int  # after one token; 1: the draft is a chain
    sees_entropy: bool  # otherwise a look's is 0

    def confidences(self, look: Look) -> list[float]:
        """Chances of the candidates of a law to be accepted, likeliest first; where they are drawn,
        before that.
        """

    def confidence(self, probability: float, before: float) -> float:
        """Chance of a drawn token of such a probability, `before` being what it was taken for."""

    def num_candidates(self, confidences: Sequence[float], survival: float, drafted: int) -> int:
        """How many of them are drafted behind a token of that survival, `drafted` others being
        there.
        """

    def continues(self, survivals: Sequence[float]) -> list[int]:
        """Which of the newest tokens the draft model goes on from, in one step: none ends the
        draft.
        """


class Rule(Protocol):
    """What decides about drafts of greedy decoding, and about those of sampling. With `is_chain`
    they cannot be trees.
    """

    def shape(self, *, is_greedy: bool, is_chain: bool) -> Shape: ...


class _Threshold(Shape):
    """A chain that goes on while its survival, as the rule understands it, is large enough."""

    most_candidates = 1
    sees_entropy = False

    def shape(self, *, is_greedy: bool, is_chain: bool) -> Shape:
        """The same for every law."""
        del is_greedy, is_chain
        return self

    def confidence(self, probability: float, before: float) -> float:
        """No other than before."""
        del probability
        return before

    def num_candidates(self, confidences: Sequence[float], survival: float, drafted: int) -> int:
        """One."""
        del confidences, survival, drafted
        return 1


@dataclass(frozen=True)
class StopBelow(_Threshold):
    """A chain that ends once the product of its tokens' probabilities is below a threshold: what
    comes after a doubtful token is rarely reached.
    """

    threshold: float

    def confidences(self, look: Look) -> list[float]:
        """The probabilities themselves."""
        return list(look.largest)

    def confidence(self, probability: float, before: float) -> float:
        """That of the token itself."""
        del before
        return probability

    def continues(self, survivals: Sequence[float]) -> list[int]:
        """While the product is large enough."""
        return [0] if survivals[0] >= self.threshold else []


@dataclass(frozen=True)
class StopUncertain(_Threshold):
    """A chain that ends behind a law of large entropy: sqrt(scale H) > threshold (SVIP,
    2411.18462).
    """

    threshold: float = 0.3
    scale: float = 0.15
    sees_entropy = True

    def confidences(self, look: Look) -> list[float]:
        """1 while the law is certain enough, else 0."""
        certain = math.sqrt(self.scale * look.entropy) <= self.threshold
        return [float(certain)] * len(look.largest)

    def continues(self, survivals: Sequence[float]) -> list[int]:
        """While all laws were."""
        return [0] if survivals[0] > 0 else []
