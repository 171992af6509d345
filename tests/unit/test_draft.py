"""Drafts made from a target's layers or a small model: the right weights, the right ids."""

# N supervised positions, D hidden dimension, V vocabulary

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
)

from conf.choices import LayerRule
from conf.groups import DraftConfig
from data.batches import collate
from models.decoding.routing import decoder_layers
from models.draft import (
    DraftModel,
    choose_layers,
    fit_vocabulary,
    from_layers,
    rank_vocabulary,
)
from tests.drafts import (
    FAMILIES,
    NUM_LAYERS,
    build,
    logits_of,
    plain_logits,
    some_batch,
)
from tests.lessons import made_up_row
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

families = pytest.mark.parametrize("family", FAMILIES)


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
