"""Who drafts. Each drafter gives tokens and the laws they were really drawn from."""

# B rows, N drafted tokens or candidates, V vocabulary of the target

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from models.decoding.sampling import Sampling
from models.decoding.tree import Tree
from models.decoding.verify import NOTHING

if TYPE_CHECKING:
    from models.decoding.draft_model import ModelDrafter


class Proposal(NamedTuple):
    """Drafted ids (BN, NOTHING behind those of a shorter row), the laws they were drawn from
    (None: one-hot, nothing was drawn), the draft model's steps behind them, and the shape of
    trees (None: chains).

    Laws are numbered as `models.decoding.verify` reads them: of chains BNV, of trees B N+1 V.
    """

    ids_BN: Tensor
    laws: Tensor | None
    num_steps: int
    trees: list[Tree] | None = None

    @classmethod
    def nothing(cls, num_rows: int, device: torch.device) -> Proposal:
        """No row drafts."""
        return cls(torch.empty(num_rows, 0, dtype=torch.long, device=device), None, 0)


class Drafter(Protocol):
    """Proposes tokens, of which each is verified: none may be drawn and dropped."""

    def reset(self, num_rows: int) -> None:
        """Forget all texts; room for so many."""

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] = (0,)) -> None:
        """Begin new texts in these rows."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; the kept ones are renumbered in the given order."""

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BN: Tensor,
    ) -> Proposal:
        """At most so many tokens after each text."""


class Nobody:
    """Drafts nothing: decoding is autoregressive."""

    def __init__(self, device: torch.device):
        self.device = device

    def reset(self, num_rows: int) -> None:
        """Nothing to forget."""

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] = (0,)) -> None:
        """Nothing to read."""

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing to keep."""

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BN: Tensor,
    ) -> Proposal:
        """No token."""
        del most, sampling, uniform_BN
        return Proposal.nothing(len(texts), self.device)


class LookupDrafter:
    """Prompt lookup: what followed the latest earlier occurrence of the text's last tokens.

    The longest match of `longest` down to `shortest` tokens counts. Drafts are certain, so q is
    one-hot and a draft x is accepted with probability p(x) at any sampling law. Costs no model
    step. (Prompt lookup decoding, apoorvumang/prompt-lookup-decoding.)
    """

    def __init__(self, *, device: torch.device, shortest: int = 2, longest: int = 8):
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"shortest={shortest}, longest={longest}: use 1 <= shortest <= longest."
            )
        self.device = device
        self.lengths = range(longest, shortest - 1, -1)
        # of each row, where its text went on after its latest such tokens
        self._after: list[dict[tuple[int, ...], int]] = []
        self._read: list[int] = []
        self.reset(1)

    def reset(self, num_rows: int) -> None:
        """Forget all texts; room for so many."""
        self._after = [{} for _ in range(num_rows)]
        self._read = [0] * num_rows

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] = (0,)) -> None:
        """Forget the texts before; the prompts are read with the first draft."""
        for _, row in zip(prompts, rows, strict=True):
            self._after[row], self._read[row] = {}, 0

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._after = [self._after[row] for row in rows]
        self._read = [self._read[row] for row in rows]

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BN: Tensor,
    ) -> Proposal:
        """At most so many tokens after each text; none where nothing matches."""
        del sampling, uniform_BN  # nothing is drawn
        found = [self._follow(row, text, most[row]) for row, text in enumerate(texts)]
        width = max(map(len, found))
        ids = [[*own, *[NOTHING] * (width - len(own))] for own in found]
        return Proposal(torch.tensor(ids, dtype=torch.long, device=self.device), None, 0)

    def _follow(self, row: int, tokens: Sequence[int], gamma: int) -> list[int]:
        after = self._after[row]
        for end in range(self._read[row], len(tokens)):  # `end` goes on after the tokens before it
            for length in self.lengths:
                if length <= end:
                    after[tuple(tokens[end - length : end])] = end
        self._read[row] = len(tokens)
        for length in self.lengths:
            place = after.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if place is not None:
                # past its end the text goes on as the draft does: a loop is drafted as a loop
                period = tokens[place:]
                return [period[i % len(period)] for i in range(gamma)]
        return []


class CombinedDrafter:
    """Lookup where the text repeats itself, the model elsewhere.

    A lookup costs nothing and may draft as many tokens as it is asked for; the model, whose steps
    cost time and whose guesses are less certain, drafts at most `model_gamma`. With a
    `lookup_gamma` a lookup drafts no more than that.
    """

    def __init__(
        self,
        model: ModelDrafter,
        lookup: LookupDrafter,
        *,
        model_gamma: int,
        lookup_gamma: int | None = None,
    ):
        for name, gamma in (("model_gamma", model_gamma), ("lookup_gamma", lookup_gamma)):
            if gamma is not None and gamma < 1:
                raise ValueError(f"{name}={gamma}: use 1 or more.")
        self.model, self.lookup = model, lookup
        self.model_gamma, self.lookup_gamma = model_gamma, lookup_gamma

    def reset(self, num_rows: int) -> None:
        """Both forget all texts."""
        self.model.reset(num_rows)
        self.lookup.reset(num_rows)

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] = (0,)) -> None:
        """Both read the prompts."""
        self.model.start(prompts, rows)
        self.lookup.start(prompts, rows)

    def keep(self, rows: Sequence[int]) -> None:
        """Both drop all other rows."""
        self.model.keep(rows)
        self.lookup.keep(rows)

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BN: Tensor,
    ) -> Proposal:
        """At most so many tokens after each text."""
        least = most
        if self.lookup_gamma is not None:
            least = [min(own, self.lookup_gamma) for own in most]
        found = self.lookup.draft(texts, least, sampling, uniform_BN)
        is_found = [False] * len(texts)
        if found.ids_BN.shape[1]:
            is_found = (found.ids_BN[:, 0] != NOTHING).tolist()
        rest = [
            0 if known else min(own, self.model_gamma)
            for known, own in zip(is_found, most, strict=True)
        ]
        drafted = Proposal.nothing(len(texts), self.lookup.device)
        if any(rest):
            drafted = self.model.draft(texts, rest, sampling, uniform_BN)
        if not any(is_found):
            return drafted
        if drafted.trees is None and self.model.draws_trees(sampling):
            # a row's output must not depend on what stands beside it, nor the rule it is judged by
            drafted = drafted._replace(trees=[Tree() for _ in texts])
        return beside(found, drafted, is_found) if any(rest) or drafted.trees else found


def beside(found: Proposal, drafted: Proposal, is_found: Sequence[bool]) -> Proposal:
    """Some rows of one proposal, certain chains, and the others of another."""
    width = max(found.ids_BN.shape[1], drafted.ids_BN.shape[1])

    def widened(ids_BN: Tensor) -> Tensor:
        return pad(ids_BN, (0, width - ids_BN.shape[1]), value=NOTHING)

    found_B = torch.tensor(is_found, device=found.ids_BN.device)
    ids_BN = widened(found.ids_BN).where(found_B.unsqueeze(-1), widened(drafted.ids_BN))
    trees = drafted.trees
    if trees is not None:
        trees = [
            Tree.chain([token for token in own if token != NOTHING]) if known else tree
            for known, own, tree in zip(is_found, found.ids_BN.tolist(), trees, strict=True)
        ]
    laws = drafted.laws
    if laws is not None:
        size = laws.shape[-1]
        certain = one_hot(ids_BN.clamp(min=0), size).to(laws.dtype)
        certain = certain.masked_fill((ids_BN == NOTHING).unsqueeze(-1), 0.0)
        num_laws = width if trees is None else width + 1
        certain, laws = (pad(x, (0, 0, 0, num_laws - x.shape[1])) for x in (certain, laws))
        laws = certain.where(found_B[:, None, None], laws)
    return Proposal(ids_BN, laws, drafted.num_steps, trees)
