"""Outputs under way: what was asked for, what is there, what a round added."""

# B rows, G drafted tokens (gamma)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.decoding.counts import Counts


@dataclass(frozen=True)
class Request:
    """A prompt to answer with at most so many tokens. Uniforms come from `rng`: equal seeds give
    equal outputs, whatever else is decoded beside.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    rng: torch.Generator


@dataclass(frozen=True)
class Round:
    """What one target call committed: the first `num_accepted` tokens were drafted, the one after
    is the target's, a correction where candidates for its place were rejected and else a bonus.
    """

    tokens: list[int]
    num_accepted: int
    num_drafted: int
    is_corrected: bool


@dataclass
class Row:
    """An output under way; `index` is the place of its request among all."""

    index: int
    request: Request
    tokens: list[int]  # the prompt's first
    counts: Counts = field(default_factory=Counts)
    is_over: bool = False

    @property
    def num_left(self) -> int:
        """Tokens until the limit."""
        return len(self.request.prompt) + self.request.max_new_tokens - len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        """The output so far."""
        return self.tokens[len(self.request.prompt) :]


@dataclass(frozen=True)
class Uniforms:
    """One round's random numbers. `most` tokens may be drafted in each row: as many of its numbers
    judge drafts, one draws the token after them, and as many are for drawing drafts.
    """

    most: list[int]
    accept_BG: Tensor
    last_B: Tensor
    draw_BG: Tensor
