"""Weights shared out between two processes (FSDP2), by the documented command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.choices import Optimizer, Supervision
from conf.contracts import Draft
from conf.errors import ConfigError
from data.batches import num_positions, plan_batches
from tests.training import (
    Recording,
    config_for,
    launch,
    recorded_target,
    run_alone,
    settings_of,
    state_of,
)
from train.processes import require_shardable

SHARDED = ["--use_fsdp", "--fsdp_version=2", "--num_processes=2"]
OPTIM = (
    *("optim=adamw", "optim.lr=3e-3", "optim.tokens_per_step=40", "optim.max_steps=12"),
    *("optim.num_epochs=1", "optim.evaluate_every=4"),
)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return recorded_target(tmp_path_factory.mktemp("target"), 96, 16)


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Weights and moments agree to rounding, and what is judged by them."""
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert type(ours[key]) is torch.Tensor, key
            torch.testing.assert_close(
                ours[key], value, rtol=1e-4, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
            )
        if "expected_acceptance" in key:
            assert ours[key] == pytest.approx(value, abs=1e-5), key


@pytest.mark.parametrize("trained", [(), ("draft.train_embeddings=true",)], ids=["frozen", "all"])
def test_a_sharded_draft_is_saved_resumed_and_exported_as_a_whole_one(
    recording: Recording, tmp_path: Path, trained: tuple[str, ...]
) -> None:
    """Killed by SIGKILL in the middle. Some steps have an answer for one process only."""
    lengths = [num_positions(row) for row in recording.train]
    plan = plan_batches(lengths, tokens_per_step=40, seed=0, num_epochs=1.0, num_processes=2)
    assert any([] in step for step in list(plan)[:12])
    settings = settings_of(recording, tmp_path, *OPTIM, *trained)
    run = recording.open(tmp_path / "shared")
    killed = launch(SHARDED, "tests.killed", "6", *settings)
    assert killed.returncode != 0
    assert state_of(run.folder)["/progress/step"] == 4
    shutil.copytree(run.folder, tmp_path / "kept", symlinks=True)
    ended = launch(SHARDED, "train", *settings)
    assert ended.returncode == 0, ended.stderr[-4000:]

    alone = run_alone(recording, tmp_path, settings)
    ours, theirs = Draft.read(run.draft), Draft.read(alone.draft)
    assert ours.fingerprint == theirs.fingerprint
    assert (ours.num_steps, ours.best_step) == (12, theirs.best_step)
    assert ours.num_tokens_seen == theirs.num_tokens_seen
    for name in ("state.pt", "best.pt"):
        assert_close(state_of(run.folder, name), state_of(alone.folder, name))
    # two processes that each took themselves for the only one would agree to the last bit
    mine, other = state_of(run.folder), state_of(alone.folder)
    assert any(not torch.equal(mine[key], other[key]) for key in other if key.startswith("/model/"))
    mine, other = (
        AutoModelForCausalLM.from_pretrained(each.draft / "model", dtype=torch.float32).state_dict()
        for each in (run, alone)
    )
    assert_close(mine, other)
    assert any("lm_head" in key for key in mine)


def test_one_process_goes_on_from_a_sharded_checkpoint(
    recording: Recording, tmp_path: Path
) -> None:
    settings = settings_of(recording, tmp_path, *OPTIM)
    run = recording.open(tmp_path / "shared")
    assert launch(SHARDED, "tests.killed", "6", *settings).returncode != 0
    run_alone(recording, tmp_path, settings, folder=run.folder)
    alone = run_alone(recording, tmp_path, settings)
    assert_close(state_of(run.folder), state_of(alone.folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "1"}, "--fsdp_version=1.*Use 2"),
        ({"offload": "true"}, "--fsdp_offload_params=true.*Leave it out"),
        ({"optimizer": Optimizer.muon}, "optim.name=muon.*optim=adamw"),
        ({"source": Supervision.on_policy}, "objective.source=on_policy.*Use online"),
    ],
    ids=["version", "offload", "optimizer", "source"],
)
def test_what_cannot_be_sharded_is_said(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    config = config_for(recording, name=change.get("optimizer", Optimizer.adamw))
    config.objective.source = change.get("source", Supervision.recorded)
    require_shardable(config)  # one process that holds everything does it all
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", change.get("version", "2"))
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", change.get("offload", "false"))
    with pytest.raises(ConfigError, match=said):
        require_shardable(config)
