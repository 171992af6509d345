"""What an exported draft's probabilities are worth, measured on recorded answers of its target."""

# N positions, V vocabulary of the target, H ids the draft proposes, K recorded ids, C candidates

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.batches import collate
from data.shards import Row
from models.decoding.by_cost import Calibration, Curve

NUM_CANDIDATES = 8  # of a law, that are looked at
NUM_SAMPLE = 512  # laws kept


Laws = Callable[[Row], Tensor]  # those of a draft along an answer, over the target's ids, NV


def laws_of(draft: PreTrainedModel, hot_ids_H: Tensor | None) -> Laws:
    """Of a draft that reads the target's tokens, at temperature 1, over what it proposes alone."""

    @torch.inference_mode()
    def laws(row: Row) -> Tensor:
        batch = collate([row]).to(draft.device)
        ids_1T, keep_N = batch.tokens_T.unsqueeze(0), batch.supervised_N
        logits_NV = draft(input_ids=ids_1T, logits_to_keep=keep_N, use_cache=False).logits[0]
        if hot_ids_H is None:
            return logits_NV.float().softmax(-1)
        hot_ids = hot_ids_H.to(logits_NV.device)
        q_NH = logits_NV[:, hot_ids].float().softmax(-1)
        return torch.zeros_like(logits_NV, dtype=torch.float32).index_copy_(1, hot_ids, q_NH)

    return laws


@dataclass(frozen=True)
class Observed:
    """A draft's laws along an answer beside those that were recorded of the target.

    Overlaps, sum min(p, q), count recorded ids only, so they are a little low.
    """

    largest_NC: Tensor
    hit_NC: Tensor
    draw_NC: Tensor
    overlap_N: Tensor


@torch.inference_mode()
def observe(laws: Laws, row: Row) -> Observed:
    """Along the answer of a row with recorded laws."""
    row = row.of_answer()
    q_NV = laws(row)
    batch = collate([row]).to(q_NV.device)
    best = q_NV.topk(min(NUM_CANDIDATES, q_NV.shape[-1]), -1)
    p_NK = batch.top_log_p_NK.exp()
    # added: places without an id have no probability, and may name an id that has some
    p_NV = torch.zeros_like(q_NV).scatter_add_(1, batch.top_ids_NK, p_NK)
    return Observed(
        best.values.cpu(),
        (best.indices == batch.top_ids_NK[:, :1]).cpu(),
        (p_NV.gather(1, best.indices) / best.values.clamp(min=1e-30)).clamp(max=1).cpu(),
        torch.minimum(q_NV.gather(1, batch.top_ids_NK), p_NK).sum(-1).cpu(),
    )


def calibrate(laws: Laws, rows: Sequence[Row]) -> Calibration | None:
    """Fit on the answers of `rows`; None where no laws of the target were recorded."""
    if not any(row.top_ids.numel() for row in rows):
        return None
    return fit([observe(laws, row) for row in rows])


def fit(found: Sequence[Observed]) -> Calibration:
    """What probabilities of a draft were worth in answers."""
    largest_NC, hit_NC, draw_NC, overlap_N = (
        torch.cat([getattr(one, name) for one in found]).float()
        for name in ("largest_NC", "hit_NC", "draw_NC", "overlap_N")
    )
    step = -(-len(largest_NC) // NUM_SAMPLE)
    return Calibration(
        hits=Curve.fit(largest_NC.flatten(), hit_NC.flatten()),
        overlaps=Curve.fit(largest_NC[:, 0], overlap_N),
        draws=Curve.fit(largest_NC.flatten(), draw_NC.flatten(), largest_NC.flatten()),
        sample=[[round(q, 5) for q in law] for law in largest_NC[::step].tolist()],
    )
