"""Stage distill on tiny models: killed and resumed, on two processes, broken, exported."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from conf.choices import Device, Dtype, Optimizer
from conf.console import Bar, Screen, Value
from conf.contracts import Draft
from conf.errors import ConfigError
from conf.groups import DraftConfig, OptimConfig, RuntimeConfig, TargetConfig
from conf.run import Run
from conf.schema import CONFIG_FOLDER, Config, register, typed
from conf.tracking import Tracker
from data.batches import num_positions, plan_batches
from data.shards import Row
from models.draft import DraftModel, from_layers, read_hot_ids
from tests.lessons import made_up_row, recorded_rows, write_recorded
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from train.distill import distill
from train.head import Head
from train.loop import NonFiniteLoss, Trainer
from train.optim import Optimizers
from train.validation import evaluate

ROOT = Path(__file__).parents[2]
TOKENS_PER_STEP = 64
NUM_STEPS = 14
EVERY = 5  # steps between checkpoints


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bit for bit holds for a given number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = save_target(tiny_model(4), tmp_path_factory.mktemp("target"))
    target = tiny_model(4)
    return Recording(folder, recorded_rows(target, 144), recorded_rows(target, 32, first=1000))


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


@pytest.fixture(scope="module")
def uninterrupted(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(recording, folder)
    torch.set_num_threads(before)
    return folder


# ---------------------------------------------------------------- killed and resumed


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
        "from tests.e2e.test_training import end_by_sigkill; "
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


# ---------------------------------------------------------------- two processes


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


def test_two_processes_learn_what_one_does(recording: Recording, tmp_path: Path) -> None:
    """By the documented command. Steps give the ranks unequal numbers of tokens, or one none."""
    lengths = [num_positions(row) for row in recording.train]
    plan = list(plan_batches(lengths, tokens_per_step=40, seed=0, num_epochs=1.0, num_processes=2))[
        :12
    ]
    counts = [[sum(recording.train[i].num_laws for i in part) for part in step] for step in plan]
    assert any(0 < min(pair) < max(pair) for pair in counts), counts
    assert any(0 in pair for pair in counts), counts

    run = train_alone_and_shared(
        recording,
        tmp_path,
        *("optim=adamw", "optim.lr=3e-3", "optim.tokens_per_step=40", "optim.max_steps=12"),
        *("optim.num_epochs=1", "optim.evaluate_every=4"),
    )
    ours, theirs = Draft.read(run.draft), Draft.read(tmp_path / "alone" / "draft")
    assert ours.fingerprint == theirs.fingerprint
    assert (ours.num_steps, ours.best_step) == (theirs.num_steps, theirs.best_step)
    assert ours.num_tokens_seen == theirs.num_tokens_seen == sum(map(sum, counts))
    mine, other = state_of(run.folder), state_of(tmp_path / "alone")
    for key, value in other.items():
        if key.startswith("/model/"):
            torch.testing.assert_close(
                mine[key], value, rtol=1e-4, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
            )
        if "expected_acceptance" in key:
            assert mine[key] == pytest.approx(value, abs=1e-5), key
    # two processes that each took themselves for the only one would agree to the last bit
    assert any(not torch.equal(mine[key], other[key]) for key in other if key.startswith("/model/"))
    # and they did learn: rounding is small beside what changed
    initial = load_file(tmp_path / "alone" / "draft" / "initial" / "model.safetensors")
    moved = other["/model/body.norm.weight"] - initial["model.norm.weight"]
    assert float(moved.abs().max()) > 0.01


@pytest.mark.parametrize("name", list(Optimizer))
def test_every_parameter_has_one_optimizer_and_embeddings_never_muon(name: Optimizer) -> None:
    """Muon is for matrices that multiply; tables of tokens and of positions are looked up."""
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **shape))
    draft = DraftModel(model)
    optimizers = Optimizers(draft, OptimConfig(name=name))
    taken = [
        (member, p)
        for member in optimizers.members
        for g in member.param_groups
        for p in g["params"]
    ]
    assert sorted(id(p) for _, p in taken) == sorted(id(p) for p in draft.parameters())
    by_muon = {id(p) for member, p in taken if isinstance(member, torch.optim.Muon)}
    tables = {id(model.transformer.wte.weight), id(model.transformer.wpe.weight)}
    matrices = {id(p) for p in draft.parameters() if p.ndim == 2} - tables
    assert by_muon == (matrices if name is Optimizer.muon else set())


def test_a_norm_that_overflows_updates_nothing(recording: Recording) -> None:
    trainer = trainer_of(recording, recording.train)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for parameter in trainer.optimizers.parameters:
        parameter.grad = torch.zeros_like(parameter)
    trainer.model.map.weight.grad[0, 0] = torch.inf
    assert not math.isfinite(trainer.optimizers.step(1.0))
    assert_identical(trainer.model.state_dict(), before)
    trainer.model.map.weight.grad = torch.ones_like(trainer.model.map.weight)
    assert math.isfinite(trainer.optimizers.step(1.0))
    assert not torch.equal(trainer.model.map.weight, before["map.weight"])


# ---------------------------------------------------------------- empty and broken steps


def trainer_of(recording: Recording, rows: Sequence[Row], **optim: Any) -> Trainer:
    config = config_for(recording, **optim)
    model = DraftModel(from_layers(tiny_model(4), [0]))
    model.freeze_embeddings()
    head = Head(model.head, None, num_cold=0, dtype=torch.float32, chunk=64)
    return Trainer(config, model, head, rows, recording.validation)


def test_a_step_without_answers_changes_nothing(recording: Recording, tmp_path: Path) -> None:
    run = recording.open(tmp_path / "empty")
    trainer = trainer_of(recording, recording.train)
    trainer.plan = [[[]], [[]]]
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    progress = trainer.fit(run.draft, Watched(run))
    assert (progress.step, progress.num_tokens) == (2, 0)
    assert_identical(trainer.model.state_dict(), before)
    assert all(0 < point["expected_acceptance"] < 1 for point in progress.curve)


def test_an_empty_step_between_others_is_as_if_it_were_not_there(
    recording: Recording, tmp_path: Path
) -> None:
    weights = []
    for number, plan in enumerate([[[[0, 1]], [[]]], [[[0, 1]]]]):
        run = recording.open(tmp_path / str(number))
        trainer = trainer_of(recording, recording.train, warmup_share=0.0, decay_share=0.0)
        trainer.plan = plan
        trainer.fit(run.draft, Watched(run))
        weights.append(trainer.model.state_dict())
    assert_identical(weights[0], weights[1])


def test_a_broken_answer_stops_the_run_and_is_named(recording: Recording, tmp_path: Path) -> None:
    """A step that is not finite changes no weight, and the checkpoint before it can be loaded."""
    reference = trainer_of(recording, recording.train)
    victim = reference.plan[6][0][0]
    rows = [dataclasses.replace(row) for row in recording.train]
    rows[victim].top_log_p = torch.full_like(rows[victim].top_log_p, float("nan"))
    run = recording.open(tmp_path / "broken")
    trainer = trainer_of(recording, rows)
    with pytest.raises(NonFiniteLoss) as stopped:
        trainer.fit(run.draft, Watched(run))
    message = str(stopped.value)
    named = sorted(rows[i].index for i in trainer.plan[6][0])
    assert message.startswith("step 6: ") and f"answers {named} of the training split" in message
    assert "The checkpoint of step 5 is kept" in message
    assert all(bool(torch.isfinite(value).all()) for value in trainer.model.state_dict().values())

    # rerun: it goes on from the last good step, stops at the same place and says the same
    again = trainer_of(recording, rows)
    assert again.restore(run.draft) and again.progress.step == 5
    with pytest.raises(NonFiniteLoss) as stopped_again:
        again.fit(run.draft, Watched(run))
    assert str(stopped_again.value) == message
    # and with that answer mended it ends where a clean run does
    mended = trainer_of(recording, recording.train)
    assert mended.restore(run.draft)
    mended.fit(run.draft, Watched(run))
    clean = recording.open(tmp_path / "clean")
    reference.fit(clean.draft, Watched(clean))
    assert_identical(mended.model.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("evaluate_every", [1, EVERY], ids=["at validation", "at the next step"])
def test_weights_that_overflow_do_not_replace_the_last_good_ones(
    recording: Recording, tmp_path: Path, evaluate_every: int
) -> None:
    run = recording.open(tmp_path / "overflow")
    config = config_for(
        recording, name=Optimizer.adamw, lr=1e30, warmup_share=0.0, evaluate_every=evaluate_every
    )
    with pytest.raises(NonFiniteLoss, match="The checkpoint of step 0 is kept"):
        distill(config, run, Watched(run))
    for name in ("state.pt", "best.pt"):
        kept = state_of(run.folder, name)
        assert kept.get("/progress/step", kept.get("/step")) == 0
        assert all(
            bool(torch.isfinite(x).all()) for x in kept.values() if isinstance(x, torch.Tensor)
        )
    assert not (run.draft / "manifest.json").exists()


def test_a_broken_target_is_said_before_anything_is_written(
    recording: Recording, tmp_path: Path
) -> None:
    run = recording.open(tmp_path / "nan")
    trainer = trainer_of(recording, recording.train)
    with torch.no_grad():
        trainer.model.map.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteLoss, match="No checkpoint was written"):
        trainer.fit(run.draft, Watched(run))
    assert not (run.draft / "state.pt").exists()


# ---------------------------------------------------------------- what comes out


def acceptance_of(folder: Path, rows: Sequence[Row]) -> float:
    """Expected acceptance of an exported draft, read from the disk."""
    model = DraftModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    head = Head(model.head, read_hot_ids(folder), num_cold=0, dtype=torch.float32, chunk=512)
    return evaluate(model, head, rows, torch.float32).value


@pytest.mark.parametrize(
    "optim",
    [{"name": Optimizer.adamw, "lr": 3e-3}, {"name": Optimizer.muon, "lr": 0.01}],
    ids=["adamw", "muon"],
)
def test_training_raises_expected_acceptance(
    recording: Recording, tmp_path: Path, optim: dict[str, Any]
) -> None:
    config = config_for(
        recording, warm_start=False, max_steps=-1, num_epochs=4.0, evaluate_every=40, **optim
    )
    draft = train(recording, tmp_path / "run", config)
    found = draft.expected_acceptance
    assert found.after.value > found.before.value + 0.03
    assert found.after.low > found.before.high
    exported = tmp_path / "run" / "draft"
    # on disk laws are rounded
    assert acceptance_of(exported / "model", recording.validation) == pytest.approx(
        found.after.value, abs=1e-4
    )
    assert acceptance_of(exported / "initial", recording.validation) == pytest.approx(
        found.before.value, abs=1e-4
    )
    events = [
        json.loads(line)
        for line in (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines()
    ]
    logged = [e for e in events if e.get("name") == "distill/validation"]
    curve = json.loads((exported / "curve.json").read_text("utf-8"))
    assert [e["step"] for e in logged] == [point["step"] for point in curve]
    assert [e["values"]["expected_acceptance"] for e in logged] == [
        point["expected_acceptance"] for point in curve
    ]


def test_the_warm_start_shows_before_the_first_step(
    recording: Recording, uninterrupted: Path, tmp_path: Path
) -> None:
    cold = train(recording, tmp_path / "cold", config_for(recording, warm_start=False, max_steps=0))
    warm = Draft.read(uninterrupted / "draft")
    assert warm.expected_acceptance.before.value > cold.expected_acceptance.before.value + 0.03
    assert cold.expected_acceptance.before == cold.expected_acceptance.after


def test_a_map_fitted_to_the_laws_starts_higher(
    recording: Recording, uninterrupted: Path, tmp_path: Path
) -> None:
    config = config_for(recording, max_steps=0)
    config.draft.fit_steps = 60
    fitted = train(recording, tmp_path / "fitted", config).expected_acceptance.before
    ridge = Draft.read(uninterrupted / "draft").expected_acceptance.before
    assert fitted.value > ridge.value + 0.003


def test_the_best_step_is_exported_not_the_last(recording: Recording, tmp_path: Path) -> None:
    """A rate far too high: acceptance rises at first, then the draft falls apart."""
    config = config_for(
        recording, warm_start=False, lr=0.1, decay_share=0.0, max_steps=48, evaluate_every=4
    )
    draft = train(recording, tmp_path / "run", config)
    curve = json.loads((tmp_path / "run" / "draft" / "curve.json").read_text("utf-8"))
    values = {point["step"]: point["expected_acceptance"] for point in curve}
    assert 0 < draft.best_step < draft.num_steps == 48
    assert values[draft.best_step] == max(values.values()) > values[48] + 0.01
    found = acceptance_of(tmp_path / "run" / "draft" / "model", recording.validation)
    assert found == pytest.approx(values[draft.best_step], abs=1e-5)
    assert draft.expected_acceptance.after.value == pytest.approx(found, abs=1e-5)
