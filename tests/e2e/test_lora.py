"""Stage distill with adapters: what is trained, what a checkpoint and an exported draft hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.schema import Config
from tests.training import (
    Killed,
    Recording,
    Watched,
    assert_identical,
    config_for,
    state_of,
    train,
)
from train.distill import distill

pytestmark = pytest.mark.usefixtures("one_thread")

RANK = 2


def with_adapters(recording: Recording) -> Config:
    config = config_for(recording, warm_start=False, lr=0.03)
    return dataclasses.replace(config, draft=dataclasses.replace(config.draft, lora_rank=RANK))


def test_adapters_learn_are_resumed_and_merged(recording: Recording, tmp_path: Path) -> None:
    config = with_adapters(recording)
    draft = train(recording, tmp_path / "whole", config)
    found = draft.expected_acceptance
    assert found.after.value > found.before.value + 0.01

    run = recording.open(tmp_path / "killed")
    with pytest.raises(Killed):
        distill(config, run, Watched(run, at_step=9))
    distill(config, run, Watched(run))
    ours, theirs = state_of(tmp_path / "whole"), state_of(tmp_path / "killed")
    assert_identical(theirs, ours)
    names = {key for key in ours if key.startswith("/model/")}
    assert all(".lora_" in key or "map" in key for key in names) and len(names) == 2 * 7 + 1

    weights = [
        load_file(tmp_path / "whole" / "draft" / name / "model.safetensors")
        for name in ("initial", "model")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert not any("lora" in key for key in weights[1])
    for key, before in weights[0].items():
        change = weights[1][key].float() - before.float()
        if "proj" in key:
            assert torch.linalg.matrix_rank(change, atol=1e-4) <= RANK and change.any()
        elif "lm_head" not in key:
            assert not change.any(), key
    plain = train(recording, tmp_path / "plain")
    assert draft.parameters == plain.parameters
