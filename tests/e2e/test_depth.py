"""Stage distill with draft.num_layers=0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.contracts import Draft
from conf.schema import Config
from models.decoding import costs
from tests.training import (
    Killed,
    Recording,
    Watched,
    assert_same_draft,
    config_for,
    launch,
    settings_of,
    train,
)
from train.depth import DEPTHS
from train.distill import distill

pytestmark = pytest.mark.usefixtures("one_thread")

Seconds = tuple[list[float], list[float]]
Clock = Callable[..., Seconds]


def clock(*steps: float) -> Clock:
    """Measures these steps of drafts of 1, 2, ... layers, beside target calls of a second."""

    def measured(_target: Any, _drafters: Any, longest: int, _sampling: Any) -> Seconds:
        return [1.0] * (longest + 1), list(steps)

    return measured


def stopped(*_: Any) -> None:
    raise AssertionError("the depth is chosen anew")


FREE, COSTLY = clock(0.1, 0.1, 0.1), clock(0.1, 1.0, 2.0)


def config_of(recording: Recording, **optim: Any) -> Config:
    config = config_for(recording, **optim)
    config.draft = dataclasses.replace(config.draft, num_layers=0)
    config.runtime.compile = False
    return config


def test_drafts_of_each_depth_are_measured_and_recorded(
    recording: Recording, tmp_path: Path
) -> None:
    """By the real clock. The target has four layers."""
    draft = train(recording, tmp_path / "measured", config_of(recording, max_steps=2))
    assert draft == Draft.read(tmp_path / "measured" / "draft")
    assert [each.num_layers for each in draft.depths] == [1, 2, 3]
    assert all(each.step_ms > 0 and each.c > 0 for each in draft.depths)
    most = max(draft.depths, key=lambda each: each.predicted_speedup)
    assert draft.layers == list(range(most.num_layers))
    # what training starts from, but for the laws of prompts, which validation has in tests alone
    before = draft.expected_acceptance.before.value
    assert most.expected_acceptance == pytest.approx(before, abs=5e-3)
    assert draft.determined_by["draft"]["num_layers"] == 0
    assert draft.determined_by["draft"]["most_layers"] == 6


def test_a_manifest_of_before_reads(recording: Recording, tmp_path: Path) -> None:
    train(recording, tmp_path / "fixed", config_for(recording, max_steps=1))
    path = tmp_path / "fixed" / "draft" / "manifest.json"
    tree = json.loads(path.read_text("utf-8"))
    assert "most_layers" not in tree["determined_by"]["draft"]
    assert tree.pop("depths") == []
    path.write_text(json.dumps(tree), "utf-8")
    assert Draft.read(path.parent).depths == []


def test_cost_decides_and_the_number_of_layers_considered_is_limited(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(recording, max_steps=1)
    monkeypatch.setattr(costs, "step_seconds", FREE)
    free = train(recording, tmp_path / "free", config)
    accepted = [each.expected_acceptance for each in free.depths]
    assert len(set(accepted)) == 3
    assert free.num_layers == 1 + accepted.index(max(accepted)) > 1
    monkeypatch.setattr(costs, "step_seconds", COSTLY)
    costly = train(recording, tmp_path / "costly", config)
    assert costly.num_layers == 1
    assert [each.expected_acceptance for each in costly.depths] == accepted
    config.draft.most_layers = 2
    monkeypatch.setattr(costs, "step_seconds", clock(0.1, 0.1))
    assert len(train(recording, tmp_path / "limited", config).depths) == 2


def test_a_resumed_run_keeps_the_depth_that_was_chosen(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that ended before its first checkpoint, and a finished one."""
    config = config_of(recording)
    monkeypatch.setattr(costs, "step_seconds", FREE)
    whole = train(recording, tmp_path / "whole", config)
    run = recording.open(tmp_path / "interrupted")
    moments: list[dict[str, int]] = [{"at_validation": 0}, {"at_step": 8}]
    for moment in moments:
        with pytest.raises(Killed):
            distill(config, run, Watched(run, **moment))
        monkeypatch.setattr(costs, "step_seconds", stopped)
    draft = distill(config, run, Watched(run))
    assert draft.num_layers == whole.num_layers > 1
    assert draft.depths == whole.depths
    assert_same_draft(run.folder, tmp_path / "whole")
    assert distill(config, run, Watched(run)) == draft


def test_another_configuration_chooses_anew(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing is learned yet, so that it may begin in the same folder."""
    monkeypatch.setattr(costs, "step_seconds", FREE)
    run = recording.open(tmp_path / "changed")
    with pytest.raises(Killed):
        distill(config_of(recording), run, Watched(run, at_validation=0))
    monkeypatch.setattr(costs, "step_seconds", COSTLY)
    draft = distill(config_of(recording, lr=0.02, max_steps=1), run, Watched(run))
    assert draft.num_layers == 1


def test_processes_agree(recording: Recording, tmp_path: Path) -> None:
    """Each measures other times; a draft of another depth would have other gradients to sum."""
    settings = settings_of(
        recording,
        tmp_path,
        *("draft.num_layers=0", "draft.hot_vocab=200", "runtime.compile=false"),
        *("optim.tokens_per_step=64", "optim.max_steps=2", "optim.evaluate_every=2"),
    )
    run = recording.open(tmp_path / "shared")
    ended = launch(["--multi_gpu", "--num_processes=2"], "train", *settings)
    assert ended.returncode == 0, ended.stderr[-4000:]
    draft = Draft.read(run.draft)
    kept = json.loads((run.draft / DEPTHS).read_text("utf-8"))
    assert draft.num_layers == kept["num_layers"]
    assert [dataclasses.asdict(each) for each in draft.depths] == kept["depths"]
