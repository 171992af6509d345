"""One row of a draft model: what its cache holds, and the draft under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from models.decoding.length import Shape
from models.decoding.tree import ROOT, Tree


@dataclass
class Held:
    """What the draft's cache holds of one row: the text's first `num_sure` tokens, and behind them
    what was drafted. How much of that became text is seen when the row drafts again.
    """

    num_prompt: int
    num_sure: int
    drafted: Tensor | list[int] = field(default_factory=list)

    def settle(self, text: Sequence[int]) -> None:
        """Count what was drafted and is text now."""
        drafted = self.drafted.tolist() if isinstance(self.drafted, Tensor) else self.drafted
        # the last token is fed anyway: what follows it is wanted
        for token in drafted:
            if self.num_sure >= len(text) - 1 or text[self.num_sure] != token:
                break
            self.num_sure += 1
        self.num_sure = min(self.num_sure, len(text) - 1)
        self.drafted = []


@dataclass
class Growing:
    """The draft of one row under way."""

    length: int  # of the text
    room: int  # for candidates
    tree: Tree = field(default_factory=Tree)
    newest: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    laws: dict[int, Tensor] = field(default_factory=dict)  # of the candidates behind each token

    def survival(self, node: int) -> float:
        """Of a candidate, or of the text itself."""
        return 1.0 if node == ROOT else self.tree.survivals[node]

    def position(self, node: int) -> int:
        """Where a candidate, or the text's last token, stands."""
        return self.length + (ROOT if node == ROOT else self.tree.depths[node])

    def go_on(self, shape: Shape) -> list[int]:
        """The newest candidates that the draft model reads next."""
        if not self.newest or len(self.tree) >= self.room:
            self.newest = []
            return []
        chosen = [self.newest[i] for i in shape.continues([*map(self.survival, self.newest)])]
        self.fed += chosen
        return chosen

    def first_line(self) -> list[int]:
        """Ids of the candidates that were read and stand in the cache as they would in a text."""
        num = 0
        while num in self.fed and self.tree.parents[num] == num - 1:
            num += 1
        return self.tree.ids[:num]
