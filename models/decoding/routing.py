"""How the layers of transformers models come to our attention, caches and compiled code."""

# K key-value heads, G query heads per key-value head, S readable cache

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from conf.errors import UserError
from models.decoding.cache import RaggedCache
from models.decoding.kernels import can_attend

ATTENTION = "draftsmith_ragged"
# up to this many query positions a grouped product beats torch's fused attention on a CPU
FEW_QUERIES = 16
# of attention in some families, not computed here
UNKNOWN_TERMS = ("softcap", "s_aux", "position_bias")


class UnsupportedModel(UserError, ValueError):
    """A model whose attention this decoder would compute wrongly."""


def attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of few queries over many keys on a CPU without repeating the key-value heads, by
    our kernel where that takes them; torch's own otherwise.

    q has K*G heads and k, v have K: the G query heads that share a key-value head become further
    query rows. Raises UnsupportedModel for models whose attention has further terms.
    """
    for term in UNKNOWN_TERMS:
        if rest.get(term) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__}: its attention uses {term}, which this decoder does not"
                " compute. Pick a target or draft of another family."
            )
    num_rows, num_heads, num_queries, head_dim = q.shape
    if (
        mask is None
        or q.device.type != "cpu"
        or num_queries > FEW_QUERIES
        or torch.is_grad_enabled()
    ):
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **rest)
    scaling = head_dim**-0.5 if scaling is None else scaling
    if can_attend(q, mask):
        return torch.ops.draftsmith.attention(q, k, v, mask, scaling), None
    num_groups = num_heads // k.shape[1]
    q = q.reshape(num_rows, k.shape[1], num_groups * num_queries, head_dim)
    scores = (q @ k.transpose(-1, -2)).float() * scaling
    mask_BKQS = mask if num_queries == 1 else mask.repeat(1, 1, num_groups, 1)
    weights = scores.masked_fill(~mask_BKQS, torch.finfo(torch.float32).min).softmax(-1).to(v.dtype)
    out = (weights @ v).reshape(num_rows, num_heads, num_queries, head_dim)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class _Dispatch:
    """Forward of one decoder layer: gives it its own view of a ragged cache and compiled code."""

    def __init__(self, layer: nn.Module, index: int):
        self.layer, self.index, self.plain = layer, index, type(layer).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # families hand it over under different names (cache, layer_past), GPT-2 by its place
        given = [*args, *kwargs.values()]
        held = next((value for value in given if isinstance(value, RaggedCache)), None)
        if held is None:
            return self.plain(self.layer, *args, **kwargs)
        view = held.views[self.index]
        args = tuple(view if value is held else value for value in args)
        kwargs = {key: view if value is held else value for key, value in kwargs.items()}
        if held.compiled is None:
            return self.plain(self.layer, *args, **kwargs)
        return held.compiled.run(self.plain, self.layer, *args, **kwargs)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of any transformers model, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: transformers is renaming it, family by family."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def route(model: PreTrainedModel) -> None:
    """Route the model's layers through `_Dispatch`; calls with other caches work as before."""
    if getattr(model.config, "_attn_implementation", None) != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    for index, layer in enumerate(decoder_layers(model)):
        if not isinstance(layer.__dict__.get("forward"), _Dispatch):
            layer.forward = _Dispatch(layer, index)
