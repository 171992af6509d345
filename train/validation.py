"""What checkpoints are selected by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from conf.contracts import Acceptance
from data.batches import collate, num_positions
from data.shards import Row
from data.statistics import pooled
from models.draft import DraftModel
from train.head import Head, features_of

EVAL_TOKENS = 4096
CONFIDENCE = 0.9


@torch.no_grad()
def acceptances(
    model: DraftModel,
    head: Head,
    rows: Sequence[Row],
    dtype: torch.dtype,
    *,
    by_tokens: bool = False,
) -> list[Tensor]:
    """Of each answer: expected acceptance at its positions, on recorded laws a lower bound, see
    Head.acceptance, or with `by_tokens` the looser one of Head.agreement, on the answers' tokens.
    """
    model.eval()
    found: list[Tensor] = []
    measure = head.agreement if by_tokens else head.acceptance
    if by_tokens:
        rows = [row.of_answer() for row in rows]
    for pack in packs(rows):
        batch = collate(pack).to(head.weight_HE.device)
        values = measure(features_of(model, batch, dtype), batch).cpu()
        found += values.split([row.num_laws for row in pack])
    return found


def evaluate(
    model: DraftModel,
    head: Head,
    rows: Sequence[Row],
    dtype: torch.dtype,
    *,
    by_tokens: bool = False,
) -> Acceptance:
    """The mean of `acceptances`."""
    return mean_acceptance(acceptances(model, head, rows, dtype, by_tokens=by_tokens))


def mean_acceptance(found: Sequence[Tensor]) -> Acceptance:
    """Over the positions of all answers, with a 90% bootstrap interval.

    The interval resamples answers, because positions of one answer are not independent.
    """
    return pooled([float(each.sum()) for each in found], list(map(len, found)), CONFIDENCE)


def position_acceptance(found: Sequence[Tensor], gamma: int) -> list[float]:
    """Of drafted token i = 1..gamma: the probability that it is accepted once those before it were,
    on the target's own text.

    With a the acceptance at each position of an answer it is sum_t a_t ... a_{t+i-1} over
    sum_t a_t ... a_{t+i-2}, t over the starts with room for i tokens. A decoder's text goes on
    where the draft is accepted, so its own rate is somewhat higher. Ends where no answer has room.
    """
    rates = []
    survivals = [torch.ones(len(each), dtype=torch.float64) for each in found]
    for i in range(gamma):
        before = [each[: len(each) - 1] if i else each for each in survivals]
        survivals = [each * rates_N[i:] for each, rates_N in zip(before, found, strict=True)]
        tested = sum(float(each.sum()) for each in before)
        if not tested:
            break
        rates.append(sum(float(each.sum()) for each in survivals) / tested)
    return rates


def packs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Answers in their order, in lines of about EVAL_TOKENS positions."""
    pack: list[Row] = []
    for row in rows:
        pack.append(row)
        if sum(map(num_positions, pack)) >= EVAL_TOKENS:
            yield pack
            pack = []
    if pack:
        yield pack
