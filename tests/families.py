"""Tiny random models of the architecture families that the decoder supports."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

WINDOW = 5  # of the families with sliding attention: far shorter than the texts of the tests
HEAD_DIM = 8

FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-mixed": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 2 * HEAD_DIM}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": WINDOW + 2}),
    "gpt2": (GPT2Config, {}),
    "gpt-neox": (GPTNeoXConfig, {"num_key_value_heads": None}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "head_dim": HEAD_DIM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
}


def tiny_family(
    name: str, *, vocab_size: int = 64, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random float32 model of two layers, hidden 32; `changes` go to its configuration."""
    config_class, own = FAMILIES[name]
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.5,  # laws far from uniform, hence no near-ties under greedy
    }
    settings = {key: value for key, value in {**settings, **own, **changes}.items()}
    if settings["num_key_value_heads"] is None or name == "gpt2":
        del settings["num_key_value_heads"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_class(**settings)).float()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()
