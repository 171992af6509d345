"""The map of a warm start, fitted to recorded laws."""

# N supervised positions, D features

from __future__ import annotations

import dataclasses

import pytest
import torch

from data.batches import collate
from data.shards import Row
from models.draft import DraftModel, from_layers, warm_start
from tests.drafts import FAMILIES, build
from tests.lessons import recorded_rows
from tests.unit.test_warm_start import read_by_head
from train.head import Head
from train.start import _whitening, fit_map
from train.validation import evaluate


def begun(family: str) -> tuple[DraftModel, Head, list[Row], list[Row]]:
    """A draft of a family after the ridge regression, with answers to learn from and others."""
    target = build(family)
    train, held_out = recorded_rows(target, 120), recorded_rows(target, 24, first=1000)
    batch = collate([row.of_answer() for row in train])
    draft = DraftModel(from_layers(target, [0, 1]).eval())
    warm_start(draft, [(batch, read_by_head(target, batch))], ridge=1e-3)
    head = Head(draft.head, None, num_cold=0, dtype=torch.float32, chunk=100)
    return draft, head, train, held_out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fit_raises_acceptance_on_answers_it_has_not_seen(family: str) -> None:
    """And changes nothing but the map."""
    draft, head, train, held_out = begun(family)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    ridge = evaluate(draft, head, held_out, torch.float32).value
    assert fit_map(draft, head, train, num_steps=60, seed=0) == sum(
        len(row.generated) for row in train
    )
    assert evaluate(draft, head, held_out, torch.float32).value > ridge + 0.004
    changed = [
        name for name, value in draft.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert changed == ["map.weight"]


def test_the_fit_repeats_to_the_last_bit_and_follows_its_seed() -> None:
    weights = []
    for seed in (0, 0, 1):
        draft, head, train, _ = begun("llama")
        fit_map(draft, head, train, num_steps=5, seed=seed)
        weights.append(draft.map.weight.detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_size_of_the_head_does_not_matter() -> None:
    """A head of half the size behind a map of twice the size is the same draft and stays it."""
    found = []
    for size in (1.0, 0.5):
        draft, _, train, held_out = begun("llama")
        with torch.no_grad():
            draft.map.weight /= size
        draft.head = draft.head * size
        head = Head(draft.head, None, num_cold=0, dtype=torch.float32, chunk=100)
        fit_map(draft, head, train, num_steps=20, seed=0)
        found.append(evaluate(draft, head, held_out, torch.float32).value)
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_tokens_alone_serve_where_no_laws_were_recorded() -> None:
    draft, head, train, held_out = begun("llama")
    blind = [
        dataclasses.replace(row, top_ids=row.top_ids[:, :0], top_log_p=row.top_log_p[:, :0])
        for row in train
    ]
    ridge = draft.map.weight.detach().clone()
    fit_map(draft, head, blind, num_steps=150, seed=0)
    assert not torch.equal(draft.map.weight, ridge)
    fitted = evaluate(draft, head, train, torch.float32, by_tokens=True).value
    with torch.no_grad():
        draft.map.weight.copy_(ridge)
    assert fitted > evaluate(draft, head, train, torch.float32, by_tokens=True).value + 0.004


def test_without_steps_or_answers_nothing_changes() -> None:
    draft, head, train, _ = begun("llama")
    before = draft.map.weight.detach().clone()
    assert fit_map(draft, head, train, num_steps=0, seed=0) == 0
    assert fit_map(draft, head, [], num_steps=9, seed=0) == 0
    assert torch.equal(draft.map.weight, before)


def test_whitened_features_are_uncorrelated_and_of_variance_1() -> None:
    rng = torch.Generator().manual_seed(0)
    turned_DD = torch.linalg.qr(torch.randn(8, 8, generator=rng)).Q
    x_ND = torch.randn(4000, 8, generator=rng) * torch.linspace(1, 3, 8) @ turned_DD
    white_ND = x_ND @ _whitening(x_ND)
    moments_DD = white_ND.T @ white_ND / len(x_ND)
    # the damping is a hundredth of the mean variance, 4.3, beside variances of 1 and more
    torch.testing.assert_close(moments_DD, torch.eye(8), atol=0.05, rtol=0)
