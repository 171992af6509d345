"""Random targets of several families to make drafts of, and what these compute."""

# N supervised positions, D hidden dimension, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from data.batches import Batch, collate
from models.draft import (
    DraftModel,
)
from tests.lessons import made_up_row
from tests.tiny import VOCAB_SIZE, tiny_model

NUM_LAYERS = 5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def gemma3() -> PreTrainedModel:
    """Windows of 4 tokens in three of five layers, norms that multiply by 1 + w, tied."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"] * 2
    config = Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        sliding_window=4,
        layer_types=kinds[:NUM_LAYERS],
        query_pre_attn_scalar=8,
    )
    return Gemma3ForCausalLM(config)


def gpt2() -> PreTrainedModel:
    """Learned positions, layer norms with biases, tied; it has dropout in training."""
    names = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    shape = {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **shape, **names))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_model(NUM_LAYERS, initializer_range=0.3),
    "llama tied": lambda: tiny_model(NUM_LAYERS, initializer_range=0.3, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layers=[1, 1, 0, 0, 1])),
    "gemma3": gemma3,
    "gpt2": gpt2,
}


def build(family: str) -> PreTrainedModel:
    """A random model with no weight at a special value: a copy that was forgotten must show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def some_batch(num_rows: int = 3) -> Batch:
    return collate([made_up_row(i, 3 + i % 5, 12 + i % 7) for i in range(num_rows)])


def logits_of(draft: DraftModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return draft(batch)[0] @ draft.head.T


def plain_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Each answer by itself through the plain model."""
    with torch.no_grad():
        return torch.cat(
            [
                model(input_ids=batch.tokens_T[batch.segments_T == number].unsqueeze(0)).logits[0]
                for number in range(len(batch.rows))
            ]
        )
