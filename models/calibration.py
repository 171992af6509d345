"""What an exported draft's probabilities are worth, measured on recorded answers of its target."""

# N positions, V vocabulary, H ids the draft proposes, K recorded ids, C candidates

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.batches import collate
from data.shards import Row
from models.decoding.by_cost import Calibration, Curve

NUM_CANDIDATES = 8  # of a law, that are looked at
NUM_SAMPLE = 512  # laws kept


@torch.inference_mode()
def calibrate(
    draft: PreTrainedModel, hot_ids_H: Tensor | None, rows: Sequence[Row]
) -> Calibration | None:
    """Fit on the answers of `rows`, at temperature 1; the draft's law is that over `hot_ids`
    alone. None where no laws of the target were recorded.

    Overlaps count recorded ids only, so they are a little low.
    """
    if not any(row.top_ids.numel() for row in rows):
        return None
    largest, hits, overlaps, draws = [], [], [], []
    for row in rows:
        batch = collate([row.of_answer()]).to(draft.device)
        ids_1T, keep_N = batch.tokens_T.unsqueeze(0), batch.supervised_N
        logits_NV = draft(input_ids=ids_1T, logits_to_keep=keep_N, use_cache=False).logits[0]
        hot_ids = torch.arange(logits_NV.shape[-1]) if hot_ids_H is None else hot_ids_H
        hot_ids = hot_ids.to(logits_NV.device)
        q_NH = logits_NV[:, hot_ids].float().softmax(-1)
        best = q_NH.topk(min(NUM_CANDIDATES, q_NH.shape[-1]), -1)
        largest.append(best.values.cpu())
        hits.append((hot_ids[best.indices] == batch.top_ids_NK[:, :1]).cpu())
        q_NV = torch.zeros_like(logits_NV, dtype=torch.float32).index_copy_(1, hot_ids, q_NH)
        p_NK = batch.top_log_p_NK.exp()
        overlaps.append(torch.minimum(q_NV.gather(1, batch.top_ids_NK), p_NK).sum(-1).cpu())
        p_NV = torch.zeros_like(q_NV).scatter_(1, batch.top_ids_NK, p_NK)
        p_NC = p_NV.gather(1, hot_ids[best.indices])
        draws.append((p_NC / best.values).clamp(max=1).cpu())
    found = (largest, hits, overlaps, draws)
    largest_NC, hit_NC, overlap_N, draw_NC = (torch.cat(x).float() for x in found)
    step = -(-len(largest_NC) // NUM_SAMPLE)
    return Calibration(
        hits=Curve.fit(largest_NC.flatten(), hit_NC.flatten()),
        overlaps=Curve.fit(largest_NC[:, 0], overlap_N),
        draws=Curve.fit(largest_NC.flatten(), draw_NC.flatten(), largest_NC.flatten()),
        sample=[[round(q, 5) for q in law] for law in largest_NC[::step].tolist()],
    )
