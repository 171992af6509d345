"""Where a greedy output with a draft leaves the one without, and how nearly the target's two tokens
were tied there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from models.decoding.engine import Engine


class Tie(NamedTuple):
    """The place of the first other token in two outputs, and by how much the target's logits of
    the two tokens differ there.

    `spacing` is that of neighbouring numbers of the logits' kind at the larger of them: rounding
    moves a logit by a few of it.
    """

    position: int
    gap: float
    spacing: float


def tie(
    target: Engine, prompt: Sequence[int], plain: Sequence[int], fast: Sequence[int]
) -> Tie | None:
    """Of a greedy output without a draft and one with; None where they are the same.

    Both logits come from one call, over the last common token alone. Takes the first row of the
    target's cache.
    """
    pairs = enumerate(zip(plain, fast, strict=False))
    place = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
    if place is None:
        assert len(plain) == len(fast), "a stop or a limit ended one output and not the other"
        return None
    *before, last = [*prompt, *plain[:place]]
    if before:
        target.prefill(before)
    fed_11, position_11 = (
        torch.tensor([[value]], device=target.device) for value in (last, len(before))
    )
    logits_V = target.forward(fed_11, position_11, longest=len(before) + 1)[0, -1]
    ours, theirs = (float(logits_V[output[place]]) for output in (plain, fast))
    exponent = math.frexp(max(abs(ours), abs(theirs)))[1] - 1
    spacing = torch.finfo(logits_V.dtype).eps * 2.0**exponent
    return Tie(place, abs(ours - theirs), spacing)
