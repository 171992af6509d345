"""An exported draft is the trained one, for anybody."""

# N supervised positions, D hidden dimension, V vocabulary

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from models.draft import (
    DraftModel,
    from_layers,
    read_hot_ids,
)
from tests.drafts import (
    FAMILIES,
    build,
    logits_of,
    plain_logits,
    some_batch,
)
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

families = pytest.mark.parametrize("family", FAMILIES)


def trained(family: str) -> DraftModel:
    """A draft whose map and weights are nothing special."""
    draft = DraftModel(from_layers(build(family), [0, 2]).eval())
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        draft.map.weight.add_(torch.randn(draft.map.weight.shape, generator=rng) * 0.1)
        for parameter in draft.body.parameters():
            parameter.mul_(1.01)
    return draft


@families
def test_export_is_the_trained_draft_for_anybody(family: str, tmp_path: Path) -> None:
    draft, batch = trained(family), some_batch()
    draft.export(tmp_path, tiny_tokenizer(), torch.float32, None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(
        plain_logits(plain, batch), logits_of(draft, batch), rtol=1e-4, atol=1e-4
    )
    assert plain.config.tie_word_embeddings is False
    assert plain.get_input_embeddings().weight is not plain.get_output_embeddings().weight
    assert plain.config.vocab_size == len(plain.get_output_embeddings().weight) == VOCAB_SIZE
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tiny_tokenizer().get_vocab()
    assert read_hot_ids(tmp_path) is None


def test_export_in_bfloat16_says_so(tmp_path: Path) -> None:
    trained("llama").export(tmp_path, tiny_tokenizer(), torch.bfloat16, None)
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype is torch.bfloat16


def test_hot_ids_come_back(tmp_path: Path) -> None:
    hot = torch.tensor([0, 2, 77, VOCAB_SIZE - 1])
    trained("llama").export(tmp_path, tiny_tokenizer(), torch.float32, hot)
    found = read_hot_ids(tmp_path)
    assert found is not None and torch.equal(found, hot)
    written = json.loads((tmp_path / "hot_vocab.json").read_text("utf-8"))
    assert written["vocab_size"] == VOCAB_SIZE


def test_export_leaves_a_targets_sampling_settings_out(tmp_path: Path) -> None:
    """Published settings such as a temperature without do_sample do not even save."""
    target = tiny_model(2)
    target.generation_config = GenerationConfig(
        eos_token_id=[2, 0], bos_token_id=1, pad_token_id=2, temperature=0.6
    )
    draft = DraftModel(from_layers(target, [0]))
    draft.export(tmp_path, tiny_tokenizer(), torch.float32, None)
    written = GenerationConfig.from_pretrained(tmp_path)
    assert (written.eos_token_id, written.temperature) == ([2, 0], None)
