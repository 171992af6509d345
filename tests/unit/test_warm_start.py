"""The closed-form start of a draft."""

# N supervised positions, D hidden dimension, V vocabulary

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
)

from conf.errors import ConfigError
from data.batches import Batch, collate
from models.draft import (
    DraftModel,
    final_norm,
    from_layers,
    neutralise,
    warm_start,
)
from models.packed import hidden_states, pack_attention
from tests.drafts import (
    FAMILIES,
    NUM_LAYERS,
    build,
    logits_of,
    plain_logits,
    some_batch,
)
from tests.lessons import made_up_row
from tests.tiny import tiny_model

families = pytest.mark.parametrize("family", FAMILIES)


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


def test_the_warm_start_reads_without_dropout() -> None:
    """GPT-2 as published drops a tenth of everything while it trains, which a new model does."""
    target = build("gpt2")
    train = collate([made_up_row(i, 3, 20) for i in range(20)])
    drafts = [DraftModel(from_layers(target, [0, 1])) for _ in range(2)]
    assert drafts[0].training
    for draft in drafts:
        warm_start(draft, [(train, read_by_head(target, train))], ridge=1e-3)
    assert torch.equal(drafts[0].map.weight, drafts[1].map.weight)


def test_warm_start_without_hidden_states_says_what_to_set() -> None:
    draft = DraftModel(tiny_model(1))
    with pytest.raises(ConfigError, match="generate.warm_start_tokens above 0"):
        warm_start(draft, [], ridge=1e-3)
