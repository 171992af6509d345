"""Sizes of models that are there only as a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from conf.errors import ConfigError
from conf.groups import TargetConfig
from models.anatomy import anatomy_of, read_config, with_layers
from models.draft import from_layers
from tests.families import FAMILIES, tiny_family
from tests.tiny import tiny_model

LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "billions", "used"),
    [
        # as their makers state them; what is used leaves out the input embedding
        (LlamaConfig(**LLAMA_70B, tie_word_embeddings=False), 70.6, 69.5),
        (MixtralConfig(), 46.7, 12.7),
        (Qwen3MoeConfig(**QWEN3_30B, tie_word_embeddings=False), 30.5, 3.04),
        (GptOssConfig(), 116.8, 5.13),
    ],
    ids=["llama", "mixtral", "qwen3_moe", "gpt_oss"],
)
def test_known_models(config: PretrainedConfig, billions: float, used: float) -> None:
    found = anatomy_of(config)
    assert found.weights / 1e9 == pytest.approx(billions, rel=0.005)
    assert found.used_weights / 1e9 == pytest.approx(used, rel=0.01)
    # one token reads what it uses, many tokens all but the input embedding
    assert found.read_weights(1) == pytest.approx(found.used_weights)
    assert found.read_weights(10_000) == pytest.approx(found.weights - found.embedding)


def test_keys_and_values_of_a_token() -> None:
    assert anatomy_of(LlamaConfig(**LLAMA_70B)).cache_per_token == 2 * 80 * 8 * 128


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_are_those_of_the_model(is_tied: bool) -> None:
    model = tiny_model(num_layers=3, tie_word_embeddings=is_tied)
    found = anatomy_of(model.config)
    assert found.weights == sum(weight.numel() for weight in model.parameters())
    assert found.is_tied == is_tied
    draft = from_layers(model, [0, 2])
    assert found.of_layers([0, 2]).weights == sum(w.numel() for w in draft.parameters())
    assert anatomy_of(with_layers(model.config, [0, 2])) == found.of_layers([0, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_counted(family: str) -> None:
    model = tiny_family(family)
    found = anatomy_of(model.config)
    assert found.weights == sum(weight.numel() for weight in model.parameters())
    assert (found.visited == 0.5) == ("mixtral" in family or "moe" in family)


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    LlamaConfig(**LLAMA_70B, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert read_config(TargetConfig(path=str(path))).hidden_size == 8192
    with pytest.raises(ConfigError, match=r"target.path=.*no: its configuration cannot be loaded"):
        read_config(TargetConfig(path=str(tmp_path / "no")))
