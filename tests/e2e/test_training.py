"""Stage distill on tiny models: on two processes, broken, exported."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from conf.choices import Divergence, Optimizer
from conf.contracts import Draft
from conf.errors import ConfigError
from conf.groups import ObjectiveConfig, OptimConfig
from data.batches import num_positions, plan_batches
from data.shards import Row
from models.draft import DraftModel, read_hot_ids
from tests.tiny import VOCAB_SIZE
from tests.training import (
    EVERY,
    Recording,
    Watched,
    assert_identical,
    config_for,
    state_of,
    train,
    train_alone_and_shared,
    trainer_of,
)
from train.distill import distill
from train.head import Head
from train.loop import NonFiniteLoss
from train.optim import Optimizers
from train.validation import evaluate, position_acceptance

pytestmark = pytest.mark.usefixtures("one_thread")


def test_two_processes_learn_what_one_does(recording: Recording, tmp_path: Path) -> None:
    """By the documented command. Steps give the ranks unequal numbers of tokens, or one none. What
    the log says is the same too, of the loss and of each of its parts.
    """
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
        *("optim.num_epochs=1", "optim.evaluate_every=4", "objective=lk"),
        "+objective.mixture={forward_kl:0.7,reverse_kl:0.3}",
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
    said, by_one = logged(run.folder), logged(tmp_path / "alone")
    assert len(said) == len(by_one) == 1  # where the finishing phase begins
    for key in ("loss", "loss_forward_kl", "loss_reverse_kl", "expected_acceptance"):
        assert said[0][key] == pytest.approx(by_one[0][key], rel=1e-5), key
    # two processes that each took themselves for the only one would agree to the last bit
    assert any(not torch.equal(mine[key], other[key]) for key in other if key.startswith("/model/"))
    # and they did learn: rounding is small beside what changed
    initial = load_file(tmp_path / "alone" / "draft" / "initial" / "model.safetensors")
    moved = other["/model/body.norm.weight"] - initial["model.norm.weight"]
    assert float(moved.abs().max()) > 0.01


def logged(folder: Path, name: str = "distill/train") -> list[dict[str, Any]]:
    """Values and steps of a run's events."""
    lines = (folder / "events.jsonl").read_text("utf-8").splitlines()
    events = [tree for tree in map(json.loads, lines) if tree.get("name") == name]
    return [{"step": tree["step"], **tree["values"]} for tree in events]


def test_the_log_shows_parts_of_the_loss_memory_and_time_for_data(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mean is taken over two phases, which minimise different things."""
    monkeypatch.setattr("train.loop.LOG_SECONDS", 0.0)
    config = config_for(recording, max_steps=10)
    config.objective = ObjectiveConfig(
        mixture={"forward_kl": 0.7, "tv": 0.3}, finish=Divergence.lk_alpha, finish_share=0.4
    )
    train(recording, tmp_path / "run", config)
    lines = logged(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 11))
    for line in lines[:6]:
        by_parts = 0.7 * line["loss_forward_kl"] + 0.3 * line["loss_tv"]
        assert line["loss"] == pytest.approx(by_parts, rel=1e-5)
        # recorded laws leave out what both have elsewhere
        assert line["expected_acceptance"] <= 1 - line["loss_tv"] + 1e-6
    assert not any("loss_tv" in line for line in lines[6:])
    assert all(0 < line["data_share"] < 0.9 and line["peak_memory_gib"] > 0.1 for line in lines)

    monkeypatch.setattr("train.loop.LOG_SECONDS", math.inf)
    train(recording, tmp_path / "quiet", config)
    (line,) = logged(tmp_path / "quiet")
    assert line["step"] == 6
    assert line["loss"] == pytest.approx(0.7 * line["loss_forward_kl"] + 0.3 * line["loss_tv"])


def test_a_validation_shows_the_acceptance_of_token_after_token(
    recording: Recording, tmp_path: Path
) -> None:
    train(recording, tmp_path / "run", config_for(recording, max_steps=4))
    for line in logged(tmp_path / "run", "distill/validation"):
        rates = [line[f"position_acceptance_{i}"] for i in (1, 2, 3, 4)]
        assert rates[0] == pytest.approx(line["expected_acceptance"])
        assert all(0 < rate < 1 for rate in rates)


def test_the_acceptance_of_a_later_token_is_that_behind_accepted_ones() -> None:
    """Against every start by itself; an answer of one token has no room for two."""
    answers = [torch.rand(length) for length in (1, 2, 5, 9)]
    found = position_acceptance(answers, 12)
    assert len(found) == 9  # the longest answer has no room for more
    for i, rate in enumerate(found, start=1):
        starts = [(a, t) for a in answers for t in range(len(a) - i + 1)]
        reached = sum(float(a[t : t + i - 1].prod()) for a, t in starts)
        kept = sum(float(a[t : t + i].prod()) for a, t in starts)
        assert rate == pytest.approx(kept / reached, rel=1e-5)


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


def test_ligers_kernels_replace_the_layers_but_not_the_head(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need a GPU: here what transformers is asked for takes their place."""
    asked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        "transformers.integrations.liger.apply_liger_kernel",
        lambda model, kernels: asked.append((model, kernels)),
    )
    config = config_for(recording, max_steps=2)
    config.runtime.liger = True
    with pytest.raises(ConfigError, match="runtime.liger=True: its kernels run on a GPU"):
        train(recording, tmp_path / "refused", config)
    assert not asked
    monkeypatch.setattr("train.start.require", lambda *_: None)
    train(recording, tmp_path / "run", config)
    ((model, kernels),) = asked
    assert model.config.num_hidden_layers == config.draft.num_layers
    assert not any(kernels.values()) and "fused_linear_cross_entropy" in kernels
    train(recording, tmp_path / "without", config_for(recording, max_steps=2))
    assert len(asked) == 1


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
