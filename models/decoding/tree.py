"""Trees of candidates: several continuations of one text, verified in one call."""

# B rows, N candidates, T tokens fed, S readable cache

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOT = -1  # parent of the candidates that follow the text itself


@dataclass
class Tree:
    """Candidates after a text, numbered as they were drafted: parents before children, the
    children of one parent in the order they are to be tested in.
    """

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 0: follows the text
    survivals: list[float] = field(default_factory=list)  # chance that all up to it are accepted

    @classmethod
    def chain(cls, ids: Sequence[int]) -> Tree:
        """Each follows the one before, and all are certain."""
        found = cls()
        for node, token in enumerate(ids):
            found.add(token, node - 1, 1.0)
        return found

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, token: int, parent: int, survival: float) -> int:
        """Another candidate; its number."""
        self.ids.append(token)
        self.parents.append(parent)
        self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        self.survivals.append(survival)
        return len(self.ids) - 1

    @property
    def num_places(self) -> int:
        """Tokens of its longest path."""
        return 1 + max(self.depths, default=-1)

    def path(self, node: int) -> list[int]:
        """The candidates from the text to this one, itself included."""
        found = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]


@dataclass(frozen=True)
class Branches:
    """Where the tokens of a call stand that are no continuation of each other.

    Candidate n of a row lies in the cache n places behind its text, whatever its depth.
    """

    positions_BT: Tensor  # in the text each token belongs to
    slots_BT: Tensor  # in the cache
    lengths_B: Tensor  # tokens of the text
    sees_BTN: Tensor  # the candidates each token may look at, besides the text before it
    depths_BN: Tensor
    parents_BN: Tensor

    @classmethod
    def of(
        cls,
        trees: Sequence[Tree],
        lengths: Sequence[int],
        fed: Sequence[Sequence[int]],
        device: torch.device,
        width: int = 0,
    ) -> Branches:
        """`fed` names the candidates of each row that are fed (ROOT: the last token of the text).

        Rows that feed fewer than others, or than `width`, feed their text's last token again.
        """
        width = max(width, *map(len, fed))
        size = max(1, *map(len, trees))
        positions, slots, sees, depths, parents = [], [], [], [], []
        for tree, length, nodes in zip(trees, lengths, fed, strict=True):
            padded = [*nodes, *[ROOT] * (width - len(nodes))]
            positions.append([length + (tree.depths[n] if n >= 0 else n) for n in padded])
            slots.append([length + n for n in padded])
            paths = [set(tree.path(n)) for n in padded]
            sees.append([[n in path for n in range(size)] for path in paths])
            depths.append([*tree.depths, *[0] * (size - len(tree))])
            parents.append([*tree.parents, *[ROOT] * (size - len(tree))])
        found = (positions, slots, lengths, sees, depths, parents)
        return cls(*(torch.tensor(values, device=device) for values in found))

    def mask(self, read: int, span: int | None = None) -> Tensor:
        """True where a token may look, shape B1TS; with `span`, not further back than that."""
        size = self.depths_BN.shape[1]
        # candidates that a shorter tree lacks may have no place there: theirs are cut off again
        slots_S = torch.arange(read + size, device=self.slots_BT.device)
        before_BS = slots_S < self.lengths_B.unsqueeze(-1)
        mask_BTS = before_BS.unsqueeze(1) & (slots_S <= self.positions_BT.unsqueeze(-1))
        own_BN = self.lengths_B.unsqueeze(-1) + slots_S[:size]
        mask_BTS = mask_BTS.scatter(-1, own_BN.unsqueeze(1).expand_as(self.sees_BTN), self.sees_BTN)
        if span is not None:
            at_BN = self.lengths_B.unsqueeze(-1) + self.depths_BN
            at_BS = slots_S.expand_as(before_BS).scatter(-1, own_BN, at_BN)
            mask_BTS &= at_BS.unsqueeze(1) > self.positions_BT.unsqueeze(-1) - span
        # a copy: the strides of other masks of that size, which compiled code relies on
        return mask_BTS[..., :read].clone(memory_format=torch.contiguous_format).unsqueeze(1)
