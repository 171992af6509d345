"""Attention over answers packed into one line, on a CPU: each answer by itself.

A mask over the whole line would compute the products between answers and then hide them, which for
three answers a line is most of the work. Here the positions take the mask's place: each 0 starts an
answer.
"""

# B rows (one), T packed positions

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "draftsmith_packed"


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
    num_groups = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, num_groups), repeat_kv(v, num_groups)
    starts = (mask.flatten() == 0).nonzero().flatten().tolist()
    parts = [
        nn.functional.scaled_dot_product_attention(
            q[:, :, start:end],
            k[:, :, start:end],
            v[:, :, start:end],
            is_causal=True,
            scale=scaling,
        )
        for start, end in zip(starts, [*starts[1:], q.shape[2]], strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, attend_packed)
AttentionMaskInterface.register(PACKED, sdpa_mask)
