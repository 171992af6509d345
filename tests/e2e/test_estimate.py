"""The estimate before the first step, against what the run really took in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.choices import Dtype, Optimizer
from conf.console import settle_libraries
from conf.run import peak_memory_gib
from data.batches import collate, num_positions
from tests.lessons import made_up_row
from tests.tiny import tiny_model
from tests.training import (
    Killed,
    Recording,
    Watched,
    config_for,
    flattened,
    save_target,
    trainer_of,
)
from train.distill import distill
from train.estimate import (
    Estimate,
    Memory,
    activation_bytes,
    estimate,
    kept_by_autograd,
    moment_bytes,
    positions_of_steps,
)
from train.head import features_of

ROOT = Path(__file__).parents[2]
SHAPE = {"hidden_size": 576, "intermediate_size": 2304}
WITHIN = 0.25
ATTEMPTS = 3  # of a measurement of time: other programs may take the processor


def answers(count: int, first: int = 0) -> list[Any]:
    """Of 34 to 183 positions."""
    return [made_up_row(first + i, 5, 30 + (first + i) * 37 % 150) for i in range(count)]


def learn_from(folder: str, optimizer: str, num_steps: int, tokens_per_step: int) -> None:
    """Body of the measured process, which prints what so many steps took, in the machine's own
    numbers, bfloat16 where it multiplies them.
    """
    settle_libraries()
    recording = Recording(Path(folder) / "target", answers(160), answers(12, 1000))
    run = recording.open(Path(folder) / "run")
    config = config_for(
        recording,
        name=Optimizer(optimizer),
        tokens_per_step=tokens_per_step,
        max_steps=num_steps,
        num_epochs=4.0,
        warm_start=False,
    )
    config.draft.num_layers = 2
    config.runtime.train_dtype = Dtype.auto
    draft = distill(config, run, Watched(run))
    sys.stdout.write(json.dumps({"peak_gib": peak_memory_gib(), "minutes": draft.seconds / 60}))


@pytest.mark.parametrize(
    ("optimizer", "num_steps", "tokens_per_step"),
    # libraries keep something for every length they see: many steps see many
    [*((name, 16, 1500) for name in Optimizer), (Optimizer.adamw, 60, 600)],
)
def test_memory_and_time_are_within_a_quarter(
    tmp_path: Path, optimizer: Optimizer, num_steps: int, tokens_per_step: int
) -> None:
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        save_target(tiny_model(4, **SHAPE), folder / "target")
        program = (
            "from tests.e2e.test_estimate import learn_from; "
            f"learn_from({str(folder)!r}, {str(optimizer)!r}, {num_steps}, {tokens_per_step})"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        truth = json.loads(ended.stdout.splitlines()[-1])
        lines = (folder / "run" / "events.jsonl").read_text("utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        (said,) = (e["values"] for e in events if e.get("name") == "distill/estimate")
        # what training adds to libraries and lessons is most of it, so the figure is no constant
        added = said["peak_gib"] - said["program_gib"] - said["lessons_gib"]
        assert added > said["peak_gib"] / 3
        assert said["peak_gib"] == pytest.approx(truth["peak_gib"], rel=WITHIN), said
        if said["minutes"] == pytest.approx(truth["minutes"], rel=WITHIN):
            return
    assert said["minutes"] == pytest.approx(truth["minutes"], rel=WITHIN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_a_packed_line_are_what_autograd_keeps(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Lines that were not probed: many answers, and one of medium length."""
    recording = Recording(tmp_path, answers(40), answers(2, 1000))
    trainer = trainer_of(recording, recording.train)
    trainer.dtype = dtype
    expected = activation_bytes(trainer, recording.train)
    lengths = sorted(recording.train, key=num_positions)
    for line in (lengths[3:9], [lengths[20]], lengths):
        with kept_by_autograd(trainer.model) as kept:
            features = features_of(trainer.model, collate(line), dtype)
            assert expected(line) == pytest.approx(kept(), rel=0.02)
            del features


@pytest.mark.parametrize("name", list(Optimizer))
def test_moments_are_what_the_optimizer_keeps(tmp_path: Path, name: Optimizer) -> None:
    recording = Recording(tmp_path, answers(4), answers(2, 1000))
    optimizers = trainer_of(recording, recording.train, name=name).optimizers
    expected = sum(map(moment_bytes, optimizers.members))
    for parameter in optimizers.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizers.step(1.0)
    moments = [
        value
        for value in flattened(optimizers.state_dict()).values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    assert expected == sum(value.nbytes for value in moments)


@pytest.mark.parametrize("name", list(Optimizer))
def test_an_estimate_leaves_no_trace(tmp_path: Path, name: Optimizer) -> None:
    recording = Recording(tmp_path, answers(40), answers(2, 1000))
    trainers = [trainer_of(recording, recording.train, name=name) for _ in range(2)]
    estimate(trainers[0])
    for trainer in trainers:
        run = recording.open(tmp_path / str(id(trainer)))
        trainer.fit(run.draft, Watched(run))
    rehearsed, plain = (flattened(t.model.state_dict()) for t in trainers)
    assert all(torch.equal(rehearsed[key], value) for key, value in plain.items())


def test_a_resumed_run_estimates_what_is_left(tmp_path: Path) -> None:
    recording = Recording(tmp_path, answers(40), answers(2, 1000))
    whole = estimate(trainer_of(recording, recording.train, max_steps=10))
    assert 0 < whole.seconds(9) < whole.seconds(5) < whole.seconds()
    assert whole.seconds(10) == 0


# ---------------------------------------------------------------- a limit of time


def test_steps_within_a_time_are_those_whose_time_it_holds() -> None:
    memory = Memory(**dict.fromkeys((each.name for each in fields(Memory)), 0))
    expected = Estimate(
        memory=memory,
        seconds_per_position=0.1,
        seconds_per_update=1.0,
        seconds_per_validation=100.0,
        positions_of_steps=[10, 20, 10, 10],
        evaluate_every=1,
    )
    assert [expected.steps_within(s) for s in (0.5, 2, 4.9, 5, 7, 8.9, 9, 99)] == [
        *(1, 1, 1, 2, 3, 3, 4, 4)
    ]
    assert expected.limited(2).positions_of_steps == [10, 20]


def test_steps_are_counted_with_the_positions_of_every_epoch(tmp_path: Path) -> None:
    """By which the benchmark beside trl gets its time: those of one epoch gave it the double."""
    recording = Recording(tmp_path, answers(40), answers(2, 1000))
    trainer = trainer_of(recording, recording.train, num_epochs=3.0, max_steps=-1)
    every = sum(map(num_positions, recording.train))
    assert sum(positions_of_steps(trainer)) == 3 * every
    assert len(trainer.plan) == len(positions_of_steps(trainer))


def test_a_run_limited_in_time_is_resumed_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the machine measures when it goes on."""
    save_target(tiny_model(4), tmp_path / "target")
    recording = Recording(tmp_path / "target", answers(60), answers(4, 1000))
    config = config_for(recording, warm_start=False, max_seconds=2.0)
    asked: list[float] = []
    fits = iter([9, 3])

    def steps_within(_: Estimate, seconds: float) -> int:
        asked.append(seconds)
        return next(fits)

    monkeypatch.setattr(Estimate, "steps_within", steps_within)
    run = recording.open(tmp_path / "run")
    with pytest.raises(Killed):
        distill(config, run, Watched(run, at_step=7))
    draft = distill(config, run, Watched(run))
    assert (draft.num_steps, asked) == (9, [2.0, 2.0])
