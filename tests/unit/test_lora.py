"""Adapters change nothing until they are trained, and leave nothing behind but their sum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.errors import ConfigError
from conf.groups import DraftConfig
from models.lora import SCALE, adapt, merged
from tests.families import FAMILIES, tiny_family

IDS = torch.arange(3, 19).unsqueeze(0)
# linear layers of one decoder layer
ADAPTED = {"llama": 7, "gpt2": 4, "phi3": 4}


def output(body: PreTrainedModel) -> Tensor:
    hidden: Tensor = body(IDS).last_hidden_state
    return hidden


def products(body: PreTrainedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Adapted layers and their two matrices."""
    found = dict(body.named_parameters())
    for name, a in found.items():
        if ".lora_A." in name:
            yield name.partition(".lora_A.")[0], a, found[name.replace(".lora_A.", ".lora_B.")]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_merged_into_the_weights_they_adapt(family: str) -> None:
    plain, body = (tiny_family(family).base_model for _ in range(2))
    adapt(body, 3, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(output(body), output(plain), rtol=0, atol=0)
    found = [*products(body)]
    if family in ADAPTED:
        assert len(found) == ADAPTED[family] * plain.config.num_hidden_layers
    assert {name for name, each in body.named_parameters() if each.requires_grad} == {
        f"{name}.lora_{part}.default.weight" for name, _, _ in found for part in "AB"
    }
    with torch.no_grad():
        for _, a, b in found:
            assert a.shape[0] == b.shape[1] == 3 and a.any() and not b.any()
            b.normal_(std=0.1)
        weights = merged(body)
        assert weights.keys() == plain.state_dict().keys()
        name, a, b = found[0]
        change = weights[f"{name}.weight"] - plain.state_dict()[f"{name}.weight"]
        change = change if family != "gpt2" else change.T  # whose weights lie the other way round
        torch.testing.assert_close(change, SCALE * (b @ a), rtol=1e-5, atol=1e-5)
        plain.load_state_dict(weights)
        torch.testing.assert_close(output(plain), output(body), rtol=1e-4, atol=1e-4)


def test_a_seed_draws_the_same_adapters_and_leaves_other_numbers_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    bodies = [tiny_family("llama").base_model for _ in range(3)]
    for body, seed in zip(bodies, (1, 1, 2), strict=True):
        adapt(body, 2, seed)
    first, again, other = (next(products(body))[1] for body in bodies)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lora_rank": -1}, "draft.lora_rank"),
        ({"lora_rank": 4, "train_embeddings": True}, "draft.train_embeddings"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        DraftConfig(**settings)
