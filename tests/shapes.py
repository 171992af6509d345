"""Rules for drafts whose shape a test decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.decoding.length import Look, Shape


@dataclass(frozen=True)
class Bushy:
    """Trees: `widths[d]` candidates behind every token at depth d."""

    widths: tuple[int, ...]
    sees_entropy: bool = False

    @property
    def most_candidates(self) -> int:
        return max(self.widths)

    def shape(self, *, is_greedy: bool, is_chain: bool) -> Shape:
        del is_greedy
        return Bushy((1,) * len(self.widths)) if is_chain else self

    def confidences(self, look: Look) -> list[float]:
        return [0.5] * len(look.largest)

    def confidence(self, probability: float, before: float) -> float:
        del probability
        return before

    def num_candidates(self, confidences: Sequence[float], survival: float, drafted: int) -> int:
        del confidences, drafted
        return self.widths[self._depth(survival)]

    def continues(self, survivals: Sequence[float]) -> list[int]:
        return [i for i, one in enumerate(survivals) if self._depth(one) < len(self.widths)]

    def _depth(self, survival: float) -> int:
        return round(1 / survival).bit_length() - 1
