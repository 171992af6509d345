"""What target calls came to: the sums behind every rate of the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class Counts:
    """Sums over target calls; every rate of the report is a quotient of these.

    Only committed tokens are counted: what follows EOS or the length limit is not committed. A
    drafted token is tested when all before it in its round were accepted and it lies before the end
    of the output. Several candidates for one place are one test, which one of them may pass.
    """

    num_tokens: int = 0
    num_target_calls: int = 0
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_draft_steps: int = 0  # of the draft model; a lookup needs none
    drafted_at: list[int] = field(default_factory=list)  # rounds that drafted position i
    tested_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    # target calls that committed i + 1 tokens
    calls_by_length: list[int] = field(default_factory=list)
    # target calls that read i + 1 tokens
    calls_by_width: list[int] = field(default_factory=list)

    def add_round(
        self,
        num_drafted: int,
        num_tested: int,
        num_accepted: int,
        num_committed: int,
        num_draft_steps: int = 0,
        num_places: int | None = None,
    ) -> None:
        """Count one target call. `num_places` is how far a tree of `num_drafted` candidates
        reaches.
        """
        reach = num_drafted if num_places is None else num_places
        assert num_accepted <= num_tested <= reach <= num_drafted
        assert 1 <= num_committed <= reach + 1
        for held in (self.drafted_at, self.tested_at, self.accepted_at):
            held.extend([0] * (reach - len(held)))
        for counts, place in (
            (self.calls_by_length, num_committed - 1),
            (self.calls_by_width, num_drafted),
        ):
            counts.extend([0] * (place + 1 - len(counts)))
            counts[place] += 1
        for held, reached in (
            (self.drafted_at, reach),
            (self.tested_at, num_tested),
            (self.accepted_at, num_accepted),
        ):
            for position in range(reached):
                held[position] += 1
        self.num_tokens += num_committed
        self.num_target_calls += 1
        self.num_drafted += num_drafted
        self.num_tested += num_tested
        self.num_accepted += num_accepted
        self.num_draft_steps += num_draft_steps

    def __add__(self, other: Counts) -> Counts:
        def summed(a: Any, b: Any) -> Any:
            if isinstance(a, int):
                return a + b
            return [sum(pair) for pair in zip_longest(a, b, fillvalue=0)]

        return Counts(**{key: summed(mine, vars(other)[key]) for key, mine in vars(self).items()})

    @property
    def acceptance_rate(self) -> float:
        """Accepted over tested."""
        return self.num_accepted / max(self.num_tested, 1)

    @property
    def acceptance_length(self) -> float:
        """Committed tokens over target calls."""
        return self.num_tokens / max(self.num_target_calls, 1)

    @property
    def draft_utilisation(self) -> float:
        """Accepted over drafted."""
        return self.num_accepted / max(self.num_drafted, 1)

    @property
    def position_acceptance(self) -> list[float]:
        """Rounds accepting at least i tokens over rounds drafting at least i, for i = 1, 2, ..."""
        return [
            accepted / max(drafted, 1)
            for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)
        ]

    @property
    def conditional_acceptance(self) -> list[float]:
        """The same given that position i was tested."""
        return [
            accepted / max(tested, 1)
            for accepted, tested in zip(self.accepted_at, self.tested_at, strict=True)
        ]
