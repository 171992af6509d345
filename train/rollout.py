"""On-policy text: the draft goes on by itself inside the target's answers, as it does when it
drafts.
"""

# R answers, T positions of the longest beginning, E features, H hot ids

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache

from data.batches import collate
from data.shards import Row
from models.decoding.routing import cache_argument
from models.decoding.sampling import Sampling, law
from models.draft import DraftModel
from train.head import Head

AT_ONE = Sampling(1.0)


def choose_start(rejection_N: Tensor, uniform: float) -> int:
    """Where in an answer the draft takes over: position i with a probability proportional to that
    of its token being rejected there, 1 - sum min(p, q) (Draft-OPD, 2605.29343).

    `uniform`, in [0, 1), decides. Where nothing would be rejected every position is as likely.
    """
    weight_N = rejection_N.double().clamp(min=0)
    if not float(weight_N.sum()) > 0:
        weight_N = torch.ones_like(weight_N)
    reached_N = weight_N.cumsum(0)
    start = torch.searchsorted(reached_N, uniform * reached_N[-1], right=True)
    return min(int(start), len(weight_N) - 1)


@torch.no_grad()
def roll_out(
    model: DraftModel,
    head: Head,
    beginnings: Sequence[Tensor],
    uniforms_RG: Tensor,
    stop_ids: Collection[int],
) -> list[Tensor]:
    """At most G tokens of the draft at temperature 1 after each beginning, a stop id the last.

    The token of row r and step g is where uniforms_RG[r, g] falls in the cumulated law, so a row's
    text does not depend on what runs beside it.
    """
    device = head.weight_HE.device
    num_rows, num_tokens = uniforms_RG.shape
    longest = max(map(len, beginnings))
    tokens_RT = torch.zeros(num_rows, longest, dtype=torch.long)
    mask_RT = torch.zeros(num_rows, longest + num_tokens, dtype=torch.long)
    for row, beginning in enumerate(beginnings):  # padded on the left: all end together
        tokens_RT[row, longest - len(beginning) :] = beginning
        mask_RT[row, longest - len(beginning) :] = 1
    mask_RT = mask_RT.to(device)
    positions_RT = (mask_RT.cumsum(-1) - 1).clamp(min=0)
    given = {"use_cache": True, cache_argument(model.full[0]): DynamicCache(config=model.config)}
    fed_RT, first = tokens_RT.to(device), 0
    written = []
    for step in range(num_tokens):
        end = longest + step
        out = model.body(
            input_ids=fed_RT,
            position_ids=positions_RT[:, first:end],
            attention_mask=mask_RT[:, :end],
            **given,
        )
        logits_RH = head.logits(model.map(out.last_hidden_state[:, -1]))
        reached_RH = law(logits_RH, AT_ONE, "draft").double().cumsum(-1)
        drawn_R1 = uniforms_RG[:, step : step + 1].to(reached_RH) * reached_RH[:, -1:]
        slots_R1 = torch.searchsorted(reached_RH, drawn_R1, right=True)
        fed_RT = head.hot_ids_H[slots_R1.clamp(max=reached_RH.shape[-1] - 1)]
        written.append(fed_RT)
        first = end
    texts = torch.cat(written, 1).cpu()
    return [_until_stop(text, stop_ids) for text in texts]


def _until_stop(tokens: Tensor, stop_ids: Collection[int]) -> Tensor:
    ends = [place for place, token in enumerate(tokens.tolist()) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def continue_answers(
    model: DraftModel,
    head: Head,
    rows: Sequence[Row],
    features_NE: Tensor,
    *,
    share: float,
    num_tokens: int,
    stop_ids: Collection[int],
    seed: str,
) -> list[Row]:
    """The answers, some of them, each with probability `share`, cut where the draft is likely to be
    rejected and continued by it.

    A continued answer has no recorded laws: their places are empty, for the target to fill. What
    happens to an answer depends on `seed` and its number alone, not on the answers beside it.

    Args:
        features_NE: what the draft computes at the supervised positions of `rows`, packed.
    """
    if not rows:
        return []
    rejections = (1 - head.acceptance(features_NE, collate(rows).to(features_NE.device))).cpu()
    chosen: dict[int, tuple[int, list[float]]] = {}
    for place, (row, part) in enumerate(
        zip(rows, rejections.split([row.num_laws for row in rows]), strict=True)
    ):
        rng = random.Random(f"{seed}-{row.index}")
        if rng.random() < share:
            start = choose_start(part[-len(row.generated) :], rng.random())
            chosen[place] = (start, [rng.random() for _ in range(num_tokens)])
    if not chosen:
        return list(rows)
    beginnings = [
        torch.cat([rows[place].prompt, rows[place].generated[:start]])
        for place, (start, _) in chosen.items()
    ]
    uniforms_RG = torch.tensor([uniforms for _, uniforms in chosen.values()], dtype=torch.float64)
    texts = roll_out(model, head, beginnings, uniforms_RG, stop_ids)
    result = list(rows)
    for (place, (start, _)), text in zip(chosen.items(), texts, strict=True):
        result[place] = _continued(rows[place], start, text)
    return result


def _continued(row: Row, start: int, text: Tensor) -> Row:
    generated = torch.cat([row.generated[:start], text])
    num_laws = row.num_laws - len(row.generated) + len(generated)
    return replace(
        row,
        generated=generated,
        top_ids=row.top_ids.new_zeros(num_laws, row.top_ids.shape[1]),
        top_log_p=row.top_log_p.new_zeros(num_laws, row.top_log_p.shape[1]),
        hidden=None,
    )
