"""What checkpoints are selected by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from conf.contracts import Acceptance
from data.batches import collate, num_positions
from data.shards import Row
from data.statistics import pooled
from models.draft import DraftModel
from train.head import Head, features_of

EVAL_TOKENS = 4096
CONFIDENCE = 0.9


def evaluate(
    model: DraftModel,
    head: Head,
    rows: Sequence[Row],
    dtype: torch.dtype,
    *,
    by_tokens: bool = False,
) -> Acceptance:
    """Expected acceptance on recorded answers, with a 90% bootstrap interval: a lower bound, see
    Head.acceptance, or with `by_tokens` the looser one of Head.agreement, on the answers' tokens.

    The interval resamples answers, because positions of one answer are not independent.
    """
    return pooled(*sums_of_answers(model, head, rows, dtype, by_tokens=by_tokens), CONFIDENCE)


@torch.no_grad()
def sums_of_answers(
    model: DraftModel,
    head: Head,
    rows: Sequence[Row],
    dtype: torch.dtype,
    *,
    by_tokens: bool = False,
) -> tuple[list[float], list[int]]:
    """Of each answer: expected acceptance summed over its positions, and their number."""
    model.eval()
    totals: list[float] = []
    counts: list[int] = []
    measure = head.agreement if by_tokens else head.acceptance
    if by_tokens:
        rows = [row.of_answer() for row in rows]
    for pack in packs(rows):
        batch = collate(pack).to(head.weight_HE.device)
        values = measure(features_of(model, batch, dtype), batch).cpu()
        for part in values.split([row.num_laws for row in pack]):
            totals.append(float(part.sum()))
            counts.append(len(part))
    return totals, counts


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
