"""Runs of stage distill on a tiny target: whole, ended early, on several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from transformers import PreTrainedModel

from conf.choices import Device, Dtype, Optimizer
from conf.console import Bar, Screen, Value
from conf.contracts import Draft
from conf.groups import DraftConfig, OptimConfig, RuntimeConfig, TargetConfig
from conf.run import Run
from conf.schema import CONFIG_FOLDER, Config, register, typed
from conf.tracking import Tracker
from data.shards import Row
from models.draft import DraftModel, from_layers
from tests.lessons import recorded_rows, write_recorded
from tests.tiny import tiny_model, tiny_tokenizer
from train.distill import distill
from train.head import Head
from train.loop import Trainer

ROOT = Path(__file__).parents[1]
TOKENS_PER_STEP = 64
NUM_STEPS = 14
EVERY = 5  # steps between checkpoints


@dataclasses.dataclass
class Recording:
    """A target on disk and its recorded answers."""

    target: Path
    train: list[Row]
    validation: list[Row]

    def open(self, folder: Path) -> Run:
        """A run whose generate stage is finished."""
        run = Run(folder=folder, store=folder.parent / ".store", seed=0, name=folder.name)
        folder.mkdir(parents=True)
        write_recorded(run.lessons, self.train, self.validation)
        return run


def save_target(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def recorded_target(folder: Path, num_train: int, num_validation: int) -> Recording:
    """A target of four layers and so many answers of it."""
    target = tiny_model(4)
    save_target(target, folder)
    validation = recorded_rows(target, num_validation, first=1000)
    return Recording(folder, recorded_rows(target, num_train), validation)


def config_for(recording: Recording, *, warm_start: bool = True, **optim: Any) -> Config:
    settings: dict[str, Any] = {
        "name": Optimizer.muon,
        "lr": 0.01,
        "tokens_per_step": TOKENS_PER_STEP,
        "evaluate_every": EVERY,
        "max_steps": NUM_STEPS,
        "num_epochs": 4.0,
    }
    return Config(
        target=TargetConfig(path=str(recording.target), dtype=Dtype.float32),
        draft=DraftConfig(num_layers=1, hot_vocab=200, warm_start=warm_start),
        optim=OptimConfig(**{**settings, **optim}),
        runtime=RuntimeConfig(
            device=Device.cpu, num_threads=1, train_dtype=Dtype.float32, head_chunk=37
        ),
    )


class Killed(BaseException):
    """The process ends here."""


class Watched(Tracker):
    """A tracker that ends the run before its n-th optimizer step is shown, or at a validation."""

    def __init__(self, run: Run, *, at_step: int = -1, at_validation: int = -1, kill: bool = False):
        super().__init__(run, Screen(Console(file=io.StringIO())))
        self.at_step, self.at_validation, self.kill = at_step, at_validation, kill

    def event(self, name: str, values: Mapping[str, Value], step: int | None = None) -> None:
        super().event(name, values, step)
        if name == "distill/validation" and step == self.at_validation:
            raise Killed

    @contextlib.contextmanager
    def progress(self, title: str, total: int, unit: str) -> Iterator[Bar]:
        with super().progress(title, total, unit):
            yield _EndingBar(self.at_step, self.kill)


class _EndingBar(Bar):
    def __init__(self, at_step: int, kill: bool) -> None:
        self.step, self.at_step, self.kill = 0, at_step, kill

    def advance(self, n: int = 1) -> None:
        self.step += n
        if n == 1 and self.step == self.at_step:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed


def train(recording: Recording, folder: Path, config: Config | None = None) -> Draft:
    """The whole stage, uninterrupted."""
    run = recording.open(folder)
    return distill(config or config_for(recording), run, Watched(run))


def flattened(tree: Any, key: str = "") -> dict[str, Any]:
    """Every leaf of nested containers by its path."""
    if isinstance(tree, Mapping):
        pairs: Sequence[tuple[Any, Any]] = list(tree.items())
    elif isinstance(tree, list | tuple):
        pairs = list(enumerate(tree))
    else:
        return {key: tree}
    leaves: dict[str, Any] = {}
    for name, value in pairs:
        leaves.update(flattened(value, f"{key}/{name}"))
    return leaves


def state_of(run_folder: Path, name: str = "state.pt") -> dict[str, Any]:
    """A checkpoint's leaves, without the seconds it took."""
    leaves = flattened(torch.load(run_folder / "draft" / name, weights_only=True))
    return {key: value for key, value in leaves.items() if not key.endswith("/seconds")}


def assert_identical(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        same = (
            torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
        )
        assert same, key


def assert_same_draft(ours: Path, theirs: Path) -> None:
    """Weights, optimizer, progress, curve and export agree to the last bit."""
    for name in ("state.pt", "best.pt"):
        assert_identical(state_of(ours, name), state_of(theirs, name))
    for name in ("model/model.safetensors", "initial/model.safetensors", "curve.json"):
        assert (ours / "draft" / name).read_bytes() == (theirs / "draft" / name).read_bytes(), name
    one, other = Draft.read(ours / "draft"), Draft.read(theirs / "draft")
    for field in (
        "fingerprint",
        "expected_acceptance",
        "best_step",
        "num_steps",
        "num_tokens_seen",
    ):
        assert getattr(one, field) == getattr(other, field), field


def settings_of(recording: Recording, folder: Path, *overrides: str) -> list[str]:
    """Of a distillation in run `shared` below the folder, as a command line gives them."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "nothing reads this"}) + "\n", "utf-8")
    return [
        *("stage=distill", "name=shared", f"outputs={folder}", "tracker=none"),
        *("data=file", f"data.sources.prompts.path={prompts}"),
        *("eval=file", f"eval.suites.prompts.path={prompts}"),
        *("target=hub", f"target.path={recording.target}", "target.dtype=float32"),
        *("draft.num_layers=1", "draft.hot_vocab=200"),
        *("runtime.device=cpu", "runtime.num_threads=1", "runtime.train_dtype=float32"),
        *overrides,
    ]


def run_alone(
    recording: Recording, outputs: Path, settings: Sequence[str], folder: Path | None = None
) -> Run:
    """Train by these settings in this process, in a run of its own or in one that was begun."""
    register()
    with initialize_config_dir(CONFIG_FOLDER, version_base="1.3"):
        config = typed(compose("config", list(settings)))
    if folder is None:
        run = recording.open(outputs / "alone")
    else:
        run = Run(folder=folder, store=outputs / ".store", seed=0, name=folder.name)
    distill(config, run, Watched(run))
    return run


def launch(flags: Sequence[str], *module: str) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments by `accelerate launch`."""
    command = ["accelerate.commands.launch", *flags, "--main_process_port=0", "-m", *module]
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def train_alone_and_shared(recording: Recording, folder: Path, *overrides: str) -> Run:
    """Train in this process, as run `alone`, and by the documented command in two processes, as the
    run that is returned.
    """
    settings = settings_of(recording, folder, *overrides)
    run = recording.open(folder / "shared")
    run_alone(recording, folder, settings)
    # --cpu, or neither, would start one process whatever --num_processes says
    ended = launch(["--multi_gpu", "--num_processes=2"], "train", *settings)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return run


def trainer_of(recording: Recording, rows: Sequence[Row], **optim: Any) -> Trainer:
    config = config_for(recording, **optim)
    model = DraftModel(from_layers(tiny_model(4), [0]))
    model.freeze_embeddings()
    head = Head(model.head, None, num_cold=0, dtype=torch.float32, chunk=64)
    return Trainer(config, model, head, rows, recording.validation)
