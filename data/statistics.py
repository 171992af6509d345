"""Means of sums and counts, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conf.contracts import Acceptance

RESAMPLES = 2000


def pooled(totals: Sequence[float], counts: Sequence[int], confidence: float) -> Acceptance:
    """sum(totals) / sum(counts), and its bootstrap interval over the entries (seeded).

    An entry is an answer: its positions are not independent, so answers are what is resampled.
    """
    total = torch.tensor(totals, dtype=torch.float64)
    count = torch.tensor(counts, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    pick = torch.randint(len(total), (RESAMPLES, len(total)), generator=rng)
    means = total[pick].sum(1) / count[pick].sum(1)
    edges = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = means.quantile(edges).tolist()
    return Acceptance(
        value=float(total.sum() / count.sum()), low=low, high=high, count=int(count.sum())
    )
