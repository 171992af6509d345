"""Attention over answers packed into one line, on a CPU: each answer by itself.

A mask over the whole line would compute the products between answers and then hide them, which for
three answers a line is most of the work. Here the positions take the mask's place: each 0 starts an
answer.
"""

# B rows (one), T positions, H query heads, K key-value heads, D head dimension

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from data.batches import Batch

PACKED = "draftsmith_packed"
SHORT = 1024  # positions up to which scores are cheap to keep


def attend_packed(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each answer when `mask` holds integer positions (111T).

    With a mask proper, or none, it is torch's own attention.
    """
    if mask is None or mask.dtype is not torch.long:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **rest)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    starts = (mask.flatten() == 0).nonzero().flatten().tolist()
    parts = [
        _causal(q[0, :, start:end], k[0, :, start:end], v[0, :, start:end], scale)
        for start, end in zip(starts, [*starts[1:], q.shape[2]], strict=True)
    ]
    return torch.cat(parts, 1).transpose(0, 1).unsqueeze(0), None


def _causal(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scale: float) -> Tensor:
    """Attention of one answer, shape HTD. Short ones take three plain products, which the backward
    pass repays with half the time of torch's fused kernel.
    """
    num_heads, length, _ = q_HTD.shape
    num_groups = num_heads // k_KTD.shape[0]
    if length > SHORT:
        k_HTD, v_HTD = (x.repeat_interleave(num_groups, 0) for x in (k_KTD, v_KTD))
        return nn.functional.scaled_dot_product_attention(
            q_HTD.unsqueeze(0), k_HTD.unsqueeze(0), v_HTD.unsqueeze(0), is_causal=True, scale=scale
        ).squeeze(0)
    # the query heads that share a key-value head become further rows
    rows = (q_HTD * scale).reshape(k_KTD.shape[0], num_groups * length, -1)
    future_TT = torch.full((length, length), -torch.inf, dtype=q_HTD.dtype, device=q_HTD.device)
    future = future_TT.triu(1).repeat(num_groups, 1)
    weights = torch.baddbmm(future, rows, k_KTD.transpose(1, 2)).softmax(-1)
    return (weights @ v_KTD).reshape(num_heads, length, -1)


def pack_attention(model: PreTrainedModel) -> None:
    """On a CPU, let a model attend answer by answer; its calls without packed positions work as
    before.
    """
    if model.config._attn_implementation == "sdpa" and model.device.type == "cpu":
        model.set_attn_implementation(PACKED)


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """What a model's head would read at every packed position, shape 1TD; attention stays inside
    each answer.
    """
    states: Tensor = _read(model, batch).last_hidden_state
    return states


def states_of_layers(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """What each layer but the last leaves at every packed position, shape 1TD, and `hidden_states`
    of the last.
    """
    found = _read(model, batch, output_hidden_states=True)
    return [*found.hidden_states[1:-1], found.last_hidden_state]


def _read(model: PreTrainedModel, batch: Batch, **options: bool) -> Any:
    return model.base_model(
        input_ids=batch.tokens_T.unsqueeze(0),
        position_ids=batch.positions_T.unsqueeze(0),
        attention_mask=_mask(model, batch),
        use_cache=False,
        **options,
    )


def _mask(model: PreTrainedModel, batch: Batch) -> Tensor | dict[str, Tensor]:
    """Where attention may look, shape 11TT; one mask per layer type if the model mixes them."""
    config = model.config
    span: int = getattr(config, "sliding_window", None) or 0
    kinds = set(getattr(config, "layer_types", None) or [])
    slides = bool(span) and kinds != {"full_attention"}
    if config._attn_implementation == PACKED and not slides:
        return batch.positions_T.view(1, 1, 1, -1)
    full = batch.mask()
    masks = {"full_attention": full}
    if slides:
        age_TT = batch.positions_T.unsqueeze(1) - batch.positions_T.unsqueeze(0)
        masks["sliding_attention"] = full & (age_TT < span)
    # adds its mask to the scores, so booleans would hide nothing
    if config._attn_implementation == "eager":
        masks = {
            kind: torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -1e9)
            for kind, mask in masks.items()
        }
    if len(kinds) > 1:
        return masks
    return masks.get("sliding_attention", masks["full_attention"])


AttentionInterface.register(PACKED, attend_packed)
AttentionMaskInterface.register(PACKED, sdpa_mask)
