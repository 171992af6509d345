"""How large a model is, part by part, from its configuration alone: no weights are read or made."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conf.errors import ConfigError
from conf.groups import TargetConfig
from models.decoding.routing import decoder_layers
from models.load import gguf_file, why_not_loaded

# what families call their number of experts, and how many of them a token visits
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Numbers of weights, and what a token of context leaves in the cache.

    `used` are the weights that compute with one token: of experts only those it visits.
    """

    vocab_size: int
    hidden_size: int
    embedding: int
    head: int
    is_tied: bool  # embedding and head are one table
    layers: tuple[int, ...]
    used: tuple[int, ...]  # of each layer
    other: int  # normalisations outside the layers
    cache_per_layer: int  # keys and values of a token
    visited: float  # share of its experts that a token visits; 1 without experts

    @property
    def weights(self) -> int:
        """All of them, a shared table once."""
        return sum(self.layers) + self.other + self.embedding + (0 if self.is_tied else self.head)

    @property
    def used_weights(self) -> int:
        """That compute with one token, the head included."""
        return sum(self.used) + self.other + self.head

    @property
    def cache_per_token(self) -> int:
        """Keys and values of all layers."""
        return self.cache_per_layer * len(self.layers)

    def read_weights(self, num_tokens: int) -> float:
        """Weights that a call over so many tokens reads: of experts those that any token visits, if
        they choose independently.
        """
        if self.visited == 1:
            return float(self.used_weights)
        experts = (sum(self.layers) - sum(self.used)) / (1 - self.visited)
        always = self.used_weights - experts * self.visited
        return always + experts * (1 - (1 - self.visited) ** num_tokens)

    def of_layers(self, layers: Sequence[int]) -> Anatomy:
        """A model of some of the layers."""
        return replace(
            self,
            layers=tuple(self.layers[i] for i in layers),
            used=tuple(self.used[i] for i in layers),
        )


def read_config(target: TargetConfig) -> PretrainedConfig:
    """The configuration of a target of which nothing else need be there: a folder or file of its
    own, a Hub id, or a GGUF file.

    Raises ConfigError when there is none.
    """
    try:
        if target.gguf:
            path = gguf_file(target)
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoConfig.from_pretrained(
            target.path, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError) as failed:
        raise ConfigError(
            f"target.path={target.path}: its configuration cannot be loaded"
            f" ({why_not_loaded(failed)}). Give a Hub id, a folder with a config.json, or such a"
            " file."
        ) from None


def with_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The configuration of a model of some of the layers."""
    smaller: PretrainedConfig = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        # one entry per layer
        if "layer" in key and isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(smaller, key, [value[i] for i in layers])
    smaller.num_hidden_layers = len(layers)
    return smaller


def without_weights(
    config: PretrainedConfig, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model that a configuration describes, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code
        )
    return model


def anatomy_of(config: PretrainedConfig, *, trust_remote_code: bool = False) -> Anatomy:
    """Count the weights of the model that a configuration describes; raises ConfigError for one
    that describes no causal language model.
    """
    try:
        model: Any = without_weights(config, trust_remote_code=trust_remote_code)
    except ValueError as failed:
        raise ConfigError(
            f"target.path: {why_not_loaded(failed)}. Give a causal language model."
        ) from None
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    visited = _visited(config)
    layers = [list(layer.named_parameters()) for layer in decoder_layers(model)]
    sizes = tuple(sum(weight.numel() for _, weight in layer) for layer in layers)
    experts = [
        sum(weight.numel() for name, weight in layer if _is_expert(name)) for layer in layers
    ]
    is_tied = bool(config.tie_word_embeddings) or head is embedding
    counted = sum(sizes) + embedding.numel() + (0 if head is embedding else head.numel())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Anatomy(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        embedding=embedding.numel(),
        head=head.numel(),
        is_tied=is_tied,
        layers=sizes,
        used=tuple(
            round(all_of - part * (1 - visited))
            for all_of, part in zip(sizes, experts, strict=True)
        ),
        other=_num_weights(model) - counted,
        cache_per_layer=2 * heads * size,
        visited=visited if any(experts) else 1.0,
    )


def _num_weights(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _is_expert(name: str) -> bool:
    return ".experts." in f".{name}"


def _visited(config: PretrainedConfig) -> float:
    found = [
        next((getattr(config, name) for name in names if getattr(config, name, None)), None)
        for names in (EXPERTS_PER_TOKEN, NUM_EXPERTS)
    ]
    return min(1.0, found[0] / found[1]) if found[0] and found[1] else 1.0
