"""Stage distill killed and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from conf.choices import Optimizer
from conf.contracts import Draft
from conf.errors import ConfigError
from conf.run import Run
from tests.lessons import made_up_row
from tests.training import (
    NUM_STEPS,
    ROOT,
    Killed,
    Recording,
    Watched,
    assert_identical,
    assert_same_draft,
    config_for,
    save_target,
    state_of,
    train,
)
from train.distill import distill

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "moment",
    [{"at_step": 1}, {"at_step": 8}, {"at_validation": 10}, {"at_step": NUM_STEPS}],
    ids=["first step", "between checkpoints", "before a checkpoint is written", "last step"],
)
def test_interrupted_and_resumed_is_uninterrupted(
    recording: Recording, uninterrupted: Path, tmp_path: Path, moment: dict[str, int]
) -> None:
    run = recording.open(tmp_path / "interrupted")
    with pytest.raises(Killed):
        distill(config_for(recording), run, Watched(run, **moment))
    assert not (run.draft / "manifest.json").exists()
    distill(config_for(recording), run, Watched(run))
    assert_same_draft(run.folder, uninterrupted)


def test_interrupted_twice_under_adamw_is_uninterrupted(
    recording: Recording, tmp_path: Path
) -> None:
    config = config_for(recording, name=Optimizer.adamw, lr=3e-3)
    train(recording, tmp_path / "whole", config)
    run = recording.open(tmp_path / "interrupted")
    for step in (7, 12):
        torch.rand(step)  # the state of the global generator is nobody's business
        with pytest.raises(Killed):
            distill(config, run, Watched(run, at_step=step))
    distill(config, run, Watched(run))
    assert_same_draft(run.folder, tmp_path / "whole")


def test_resume_is_exact_for_a_model_with_dropout(tmp_path: Path) -> None:
    """GPT-2 drops a tenth of everything when it trains as published; a draft does not."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    size = 1500  # more cold ids than are sampled in a step, so that the sample is one of many
    target = GPT2LMHeadModel(GPT2Config(vocab_size=size, **shape, bos_token_id=1, eos_token_id=2))
    rows = [made_up_row(index, 3, 12, vocab_size=size) for index in range(40)]
    made = Recording(save_target(target, tmp_path / "target"), rows[:30], rows[30:])
    config = config_for(made, warm_start=False)
    train(made, tmp_path / "whole", config)
    run = made.open(tmp_path / "interrupted")
    with pytest.raises(Killed):
        distill(config, run, Watched(run, at_step=8))
    distill(config, run, Watched(run))
    assert_same_draft(run.folder, tmp_path / "whole")


def end_by_sigkill(target: str, folder: str, step: int) -> None:
    """Body of the process that is killed: distils in a run that is there already."""
    torch.set_num_threads(1)
    run = Run(
        folder=Path(folder), store=Path(folder).parent / ".store", seed=0, name=Path(folder).name
    )
    config = config_for(Recording(Path(target), [], []))
    distill(config, run, Watched(run, at_step=step, kill=True))


def test_a_process_killed_with_sigkill_is_resumed_exactly(
    recording: Recording, uninterrupted: Path, tmp_path: Path
) -> None:
    run = recording.open(tmp_path / "killed")
    program = (
        "from tests.e2e.test_resume import end_by_sigkill; "
        f"end_by_sigkill({str(recording.target)!r}, {str(run.folder)!r}, 12)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert state_of(run.folder)["/progress/step"] == 10
    distill(config_for(recording), run, Watched(run))
    assert_same_draft(run.folder, uninterrupted)


def test_a_finished_draft_is_kept_as_it_is(recording: Recording, uninterrupted: Path) -> None:
    run = Run(folder=uninterrupted, store=uninterrupted.parent, seed=0, name="uninterrupted")
    before = {path: path.stat().st_mtime_ns for path in run.draft.rglob("*")}
    assert distill(config_for(recording), run, Watched(run)) == Draft.read(run.draft)
    assert {path: path.stat().st_mtime_ns for path in run.draft.rglob("*")} == before


def test_an_unfinished_draft_of_another_configuration_is_not_mixed_in(
    recording: Recording, tmp_path: Path
) -> None:
    run = recording.open(tmp_path / "changed")
    with pytest.raises(Killed):
        distill(config_for(recording), run, Watched(run, at_step=8))
    kept = state_of(run.folder)
    with pytest.raises(ConfigError) as refused:
        distill(config_for(recording, lr=0.02), run, Watched(run))
    assert "(optim.lr: was 0.01, is now 0.02)" in str(refused.value)
    assert "name=" in str(refused.value)
    assert_identical(state_of(run.folder), kept)
