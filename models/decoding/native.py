"""Decoding steps of whole models in one call of our own code (cpu/decoder.cpp), on a CPU.

Run module by module, compiled or not, a step of few tokens spends as long on its hundreds of small
operations as on reading its weights. Prompts are read in the same way: float32 products of torch
would first need bfloat16 weights widened.
"""

# B rows, T new tokens, U of them with logits, S readable cache, V vocabulary, P positions

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.decoding.cache import RaggedCache
from models.decoding.kernels import HEAD_MULTIPLE, FewRowsLinear, PackedLinear, has_kernels
from models.decoding.pages import on_large_pages
from models.decoding.quantized import Int8Linear
from models.decoding.tree import Branches

# of transformers; they share one layout
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = (torch.float32, torch.bfloat16)
# whose angles do not depend on how long the text is
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# of one call; beyond, torch's products are faster, those of bfloat16 where our kernels have none of
# their own
MOST_TOKENS, MOST_UNPAIRED = 1024, 16
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
NETWORK = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class NativeSteps:
    """A model's steps over a ragged cache of up to `capacity` tokens. Its weights are moved to
    large pages; it must not be changed afterwards.

    Everything but weights and cache is float32, also of bfloat16 models; where the processor
    multiplies bfloat16, what a bfloat16 weight is multiplied with is rounded to it, as transformers
    does. A token's logits do not depend on the other tokens of its call.
    """

    def __init__(self, model: PreTrainedModel, capacity: int):
        on_large_pages([*_linears(model)])
        config = model.config
        body: Any = model.model
        embedding: Any = model.get_input_embeddings()
        is_slow = model.dtype == torch.bfloat16 and not torch.ops.draftsmith.has_pairs()
        self._most = MOST_UNPAIRED if is_slow else MOST_TOKENS
        head = model.get_output_embeddings()
        positions_1P = torch.arange(capacity, device="cpu").unsqueeze(0)
        cos_1PD, sin_1PD = body.rotary_emb(torch.zeros(1), positions_1P)
        whole = {
            "embedding": embedding.weight.detach(),
            "norm": body.norm.weight.detach().float(),
            "cos": cos_1PD[0].contiguous(),
            "sin": sin_1PD[0].contiguous(),
            **_linear("head", head),
        }
        self._decoder = torch.classes.draftsmith.Decoder(
            [_layer(layer) for layer in body.layers],
            whole,
            head.out_features,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
            body.layers[0].self_attn.scaling,
        )

    @classmethod
    def of(cls, model: PreTrainedModel, capacity: int) -> NativeSteps | None:
        """For a model that this code knows and that uses our kernels (`use_kernel`); None for
        others.
        """
        if type(model).__name__ not in FAMILIES or model.dtype not in (
            torch.float32,
            torch.bfloat16,
        ):
            return None
        if not type(model).__module__.startswith("transformers.") or not has_kernels():
            return None
        is_known = (
            model.config.hidden_act == "silu"
            and model.model.rotary_emb.rope_type in ROPE_TYPES
            and _sees_all(model)
            and model.model.layers[0].self_attn.head_dim % HEAD_MULTIPLE == 0
            and all(
                isinstance(m, FewRowsLinear | PackedLinear | Int8Linear) for m in _linears(model)
            )
            and all(_is_uniform(layer) for layer in model.model.layers)
        )
        return cls(model, capacity) if is_known else None

    def takes(self, tokens_BT: Tensor) -> bool:
        """Whether a call of so many tokens is one of these steps."""
        return tokens_BT.numel() <= self._most

    def run(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        branches: Branches | None,
        cache: RaggedCache,
        rows_B: Tensor | None,
        only_U: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Logits BUV after the tokens at places `only_U` among T, after all if None, and what the
        head read there; rows `rows_B` of the cache, all if None, get what the tokens leave there.
        `branches`: where they stand and what they see if they are not one after another.
        """
        found: tuple[Tensor, Tensor] = self._decoder.forward(
            tokens_BT,
            positions_BT,
            positions_BT if branches is None else branches.slots_BT,
            [layer.keys for layer in cache.ragged],
            [layer.values for layer in cache.ragged],
            None if branches is None else branches.lengths_B,
            None if branches is None else branches.sees_BTN,
            rows_B,
            only_U,
        )
        return found


def _layer(layer: Any) -> dict[str, Tensor]:
    """The parts of a layer by the names the code knows them by."""
    attention = layer.self_attn
    parts = {
        "norm": layer.input_layernorm.weight.detach().float(),
        "mlp_norm": layer.post_attention_layernorm.weight.detach().float(),
    }
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            parts[name] = getattr(attention, name).weight.detach().float()
    for owner, names in ((attention, ATTENTION), (layer.mlp, NETWORK)):
        for name, attribute in names.items():
            parts |= _linear(name, getattr(owner, attribute))
    return parts


def _linear(name: str, module: Any) -> dict[str, Tensor]:
    parts = {name: getattr(module, module.stored).detach()}
    if isinstance(module, Int8Linear):
        parts[f"{name}.scale"] = module.scale
    if module.bias is not None:
        parts[f"{name}.bias"] = module.bias.detach().float()
    return parts


def _linears(model: PreTrainedModel) -> Iterator[nn.Module]:
    """What stands where linear layers belong, in the order in which a step reads it."""
    for layer in model.model.layers:
        yield from (getattr(layer.self_attn, name) for name in ATTENTION.values())
        yield from (getattr(layer.mlp, name) for name in NETWORK.values())
    yield model.get_output_embeddings()


def _sees_all(model: PreTrainedModel) -> bool:
    """Whether no layer looks only so far back."""
    kinds = set(getattr(model.config, "layer_types", None) or [])
    return not getattr(model.config, "sliding_window", None) or kinds == {"full_attention"}


def _is_uniform(layer: Any) -> bool:
    """Whether the weights that read one input are of one type."""
    together = (
        [getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")],
        [getattr(layer.mlp, name) for name in ("gate_proj", "up_proj")],
    )
    return all(
        len({(type(m), getattr(m, m.stored).dtype) for m in modules}) == 1 for modules in together
    )
