"""Drafts made from a target's layers: the right weights, the closed-form start, the export."""

# N supervised positions, D hidden dimension, V vocabulary

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from conf.choices import LayerRule
from conf.errors import ConfigError
from conf.groups import DraftConfig
from data.batches import Batch, collate
from models.decoding.engine import decoder_layers
from models.draft import (
    DraftModel,
    choose_layers,
    final_norm,
    fit_vocabulary,
    from_layers,
    neutralise,
    rank_vocabulary,
    read_hot_ids,
    warm_start,
)
from models.packed import hidden_states, pack_attention
from tests.lessons import made_up_row
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

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
families = pytest.mark.parametrize("family", FAMILIES)


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


# ---------------------------------------------------------------- layers


@families
def test_a_draft_with_every_layer_is_the_target(family: str) -> None:
    target, batch = build(family), some_batch()
    whole = from_layers(target, range(NUM_LAYERS)).eval()
    expected = plain_logits(target, batch)
    torch.testing.assert_close(plain_logits(whole, batch), expected, rtol=0, atol=0)
    # and so is its packed form in training: windows, positions and all
    torch.testing.assert_close(logits_of(DraftModel(whole), batch), expected, rtol=1e-4, atol=1e-4)


@families
def test_the_chosen_layers_are_copied_and_only_they(family: str) -> None:
    """A target whose other layers are cut out by hand computes the same."""
    target, batch, kept = build(family), some_batch(), [0, 3]
    draft = from_layers(target, kept).eval()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    assert len(decoder_layers(draft)) == draft.config.num_hidden_layers == 2
    ours = plain_logits(draft, batch)
    for index, layer in enumerate(decoder_layers(target)):
        if index not in kept:
            layer.forward = lambda hidden, *_, **__: hidden  # type: ignore[method-assign]
    torch.testing.assert_close(ours, plain_logits(target, batch), rtol=1e-5, atol=1e-5)
    for parameter in draft.parameters():  # a copy: training the draft leaves the target alone
        parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


@families
def test_ties_and_special_ids_are_the_targets(family: str) -> None:
    target = build(family)
    target.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=2)
    draft = from_layers(target, [0])
    tied = draft.get_input_embeddings().weight is draft.get_output_embeddings().weight
    assert tied == (target.get_input_embeddings().weight is target.get_output_embeddings().weight)
    assert draft.generation_config.eos_token_id == [2, 0]
    assert draft.dtype is torch.float32
    assert from_layers(target.bfloat16(), [0]).dtype is torch.float32


def test_eager_attention_respects_the_mask_too() -> None:
    """Eager attention adds its mask to the scores, to which True and False are 1 and 0."""
    target, batch = build("llama"), some_batch()
    target.set_attn_implementation("eager")
    draft = DraftModel(from_layers(target, range(NUM_LAYERS)).eval())
    assert draft.config._attn_implementation == "eager"
    torch.testing.assert_close(
        logits_of(draft, batch), plain_logits(target, batch), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("rule", "count", "expected"),
    [
        (LayerRule.first, 3, [0, 1, 2]),
        (LayerRule.even, 1, [0]),
        (LayerRule.even, 2, [0, 29]),
        (LayerRule.even, 4, [0, 10, 19, 29]),
        (LayerRule.ends, 1, [0]),
        (LayerRule.ends, 2, [0, 29]),
        (LayerRule.ends, 5, [0, 1, 2, 28, 29]),
    ],
)
def test_layer_rules(rule: LayerRule, count: int, expected: list[int]) -> None:
    assert choose_layers(DraftConfig(layer_rule=rule, num_layers=count), 30) == expected


@pytest.mark.parametrize("rule", list(LayerRule))
@pytest.mark.parametrize("size", [2, 7, 30])
def test_every_rule_gives_as_many_layers_as_asked_for(rule: LayerRule, size: int) -> None:
    for count in range(1, size + 1):
        layers = choose_layers(DraftConfig(layer_rule=rule, num_layers=count), size)
        assert layers == sorted(set(layers))
        assert len(layers) == count
        assert 0 <= layers[0] <= layers[-1] < size


def test_named_layers_win_over_the_rule() -> None:
    config = DraftConfig(layer_rule=LayerRule.ends, num_layers=9, layers=[7, 2, 4])
    assert choose_layers(config, 30) == [2, 4, 7]


# ---------------------------------------------------------------- warm start


@families
def test_the_final_normalisation_is_found_and_neutralised(family: str) -> None:
    target = build(family)
    norm = final_norm(target.base_model)
    assert norm is (target.transformer.ln_f if family == "gpt2" else target.model.norm)
    neutralise(norm)
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)) * 7
    if family == "gpt2":
        x = x - x.mean(-1, keepdim=True)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), x / x.square().mean(-1, keepdim=True).sqrt())


def test_a_model_without_a_final_normalisation_says_how_to_go_on() -> None:
    with pytest.raises(ConfigError, match="draft.warm_start=false"):
        final_norm(torch.nn.Sequential(torch.nn.Embedding(3, 3), torch.nn.Linear(3, 3)))


def read_by_head(target: PreTrainedModel, batch: Batch) -> Tensor:
    """What the target's head reads at the supervised positions, ND."""
    with torch.no_grad():
        pack_attention(target)
        return hidden_states(target, batch)[0, batch.supervised_N]


@pytest.mark.parametrize("ridge", [1e-3, 0.5])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_warm_start_is_the_ridge_regression(family: str, ridge: float) -> None:
    """Against numpy's least squares on the design with sqrt(lambda) I stacked below it."""
    target = build(family)
    batches = [some_batch(4), collate([made_up_row(100 + i, 4, 15) for i in range(5)])]
    draft = DraftModel(from_layers(target, [0, 1]).eval())
    count = warm_start(draft, [(b, read_by_head(target, b)) for b in batches], ridge)
    assert count == sum(b.num_supervised for b in batches)

    plain = DraftModel(from_layers(target, [0, 1]).eval())
    neutralise(final_norm(plain.body))
    x = torch.cat([read_by_head(plain.full[0], b) for b in batches]).double().numpy()
    y = torch.cat([read_by_head(target, b) for b in batches]).double().numpy()
    penalty = ridge * np.mean(np.sum(x * x, axis=0))
    stacked = np.vstack([x, np.sqrt(penalty) * np.eye(32)])
    expected = np.linalg.lstsq(stacked, np.vstack([y, np.zeros((32, 32))]), rcond=None)[0]
    found = draft.map.weight.detach().double().numpy()
    np.testing.assert_allclose(found, expected.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama tied", "qwen2", "smollm3", "gemma3"])
def test_warm_start_of_the_whole_target_is_the_target(family: str) -> None:
    target = build(family)
    train = collate([made_up_row(i, 3, 20) for i in range(20)])
    draft = DraftModel(from_layers(target, range(NUM_LAYERS)).eval())
    warm_start(draft, [(train, read_by_head(target, train))], ridge=1e-8)
    # the map only puts back the norm's own scale
    scale = draft.map.weight.detach()
    own = final_norm(target.base_model).weight.detach() + (1.0 if family == "gemma3" else 0.0)
    torch.testing.assert_close(scale, torch.diag(own), rtol=1e-3, atol=1e-3)
    held_out = some_batch()
    overlap = torch.minimum(
        logits_of(draft, held_out).softmax(-1), plain_logits(target, held_out).softmax(-1)
    ).sum(-1)
    assert float(overlap.min()) > 0.999


def test_warm_start_beats_copied_layers() -> None:
    target = build("llama tied")
    train, held_out = collate([made_up_row(i, 3, 20) for i in range(30)]), some_batch(8)
    law = plain_logits(target, held_out).softmax(-1)
    draft = DraftModel(from_layers(target, [0, 1]).eval())
    overlaps = []
    for _ in range(2):
        mine = logits_of(draft, held_out).softmax(-1)
        overlaps.append(float(torch.minimum(law, mine).sum(-1).mean()))
        warm_start(draft, [(train, read_by_head(target, train))], ridge=1e-3)
    assert overlaps[1] > overlaps[0] + 0.05


def test_warm_start_without_hidden_states_says_what_to_set() -> None:
    draft = DraftModel(tiny_model(1))
    with pytest.raises(ConfigError, match="generate.warm_start_tokens above 0"):
        warm_start(draft, [], ridge=1e-3)


# ---------------------------------------------------------------- export


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


# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [VOCAB_SIZE - 8, VOCAB_SIZE, VOCAB_SIZE + 20])
def test_a_pretrained_draft_takes_the_targets_padded_vocabulary(
    size: int, tied: bool, tmp_path: Path
) -> None:
    small = tiny_model(1, vocab_size=size, tie_word_embeddings=tied)
    shared = min(size, VOCAB_SIZE)
    batch = collate([made_up_row(i, 3, 9, vocab_size=shared) for i in range(3)])
    before = plain_logits(small, batch)
    draft = DraftModel(fit_vocabulary(small, VOCAB_SIZE))
    after = logits_of(draft, batch)
    assert after.shape[-1] == draft.config.vocab_size == VOCAB_SIZE
    torch.testing.assert_close(after[:, :shared], before[:, :shared], rtol=1e-5, atol=5e-5)
    if size < VOCAB_SIZE:  # the new ids are as unlikely as its last one
        last = before[:, -1:].expand(-1, VOCAB_SIZE - size)
        torch.testing.assert_close(after[:, size:], last, rtol=1e-5, atol=1e-5)
    draft.export(tmp_path, tiny_tokenizer(), torch.float32, None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config.vocab_size == plain.get_input_embeddings().num_embeddings == VOCAB_SIZE
    torch.testing.assert_close(plain_logits(plain, batch), after, rtol=1e-4, atol=1e-4)


def test_ids_are_ranked_by_mass_then_by_number() -> None:
    rows = [made_up_row(i, 2, 6, vocab_size=40, top_k=4) for i in range(5)]
    mass = dict.fromkeys(range(60), 0.0)
    for row in rows:
        for place, token in enumerate(row.generated.tolist()):
            mass[token] += 1.0
            ids, log_p = row.top_ids[place].tolist(), row.top_log_p[place].tolist()
            for number, value in zip(ids, log_p, strict=True):
                mass[number] += np.exp(value)
    expected = sorted(mass, key=lambda number: (-mass[number], number))
    found = rank_vocabulary(rows, 60).tolist()
    unseen = [number for number in range(60) if mass[number] == 0]
    assert found[-len(unseen) :] == unseen and len(unseen) >= 20
    assert [round(mass[i], 5) for i in found] == [round(mass[i], 5) for i in expected]


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_kept_once_unless_its_tied_embeddings_are_trained(tied: bool) -> None:
    model = DraftModel(tiny_model(NUM_LAYERS, tie_word_embeddings=tied))
    plain = model.full[0]
    before = model.head.clone()
    with torch.no_grad():
        plain.get_input_embeddings().weight.add_(1.0)  # as training would
        assert torch.equal(model.head, before)
        plain.get_input_embeddings().weight.sub_(1.0)
    model.freeze_embeddings()
    assert model.head.data_ptr() == plain.get_output_embeddings().weight.data_ptr()
    torch.testing.assert_close(model.head, before)


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_tables_in_bfloat16_change_nothing(tied: bool) -> None:
    """Weights that were rounded to bfloat16 once, as the default target's are."""
    target = tiny_model(NUM_LAYERS, tie_word_embeddings=tied).bfloat16().float()
    plain, frozen = (DraftModel(from_layers(target, [0, 1])) for _ in range(2))
    frozen.freeze_embeddings()
    tables = (frozen.full[0].get_input_embeddings().weight, frozen.head)
    assert {table.dtype for table in tables} == {torch.bfloat16}
    batch = collate([made_up_row(i, 4, 6) for i in range(3)])
    assert torch.equal(frozen(batch), plain(batch))
    assert torch.equal(frozen.head.float(), plain.head)
    frozen(batch).sum().backward()
    gradients = [p.grad for p in frozen.parameters() if p.requires_grad]
    assert all(grad is not None and grad.dtype is torch.float32 for grad in gradients)


def test_a_table_that_bfloat16_cannot_hold_stays_as_it_is() -> None:
    model = DraftModel(tiny_model(NUM_LAYERS))
    model.freeze_embeddings()
    assert model.head.dtype is torch.float32
    assert model.full[0].get_input_embeddings().weight.dtype is torch.float32
