"""Every source of supervision through the whole stage: what it reads, resumes and shares out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from conf.choices import Divergence, Supervision
from conf.contracts import ContractError, Draft
from conf.errors import ConfigError
from conf.groups import ObjectiveConfig
from conf.run import Run
from conf.schema import Config
from data.batches import collate
from models.draft import DraftModel, from_layers
from tests.lessons import recorded_rows
from tests.tiny import VOCAB_SIZE, tiny_model
from tests.training import (
    Killed,
    Recording,
    Watched,
    assert_same_draft,
    config_for,
    recorded_target,
    state_of,
    train,
    train_alone_and_shared,
)
from train.distill import distill
from train.head import Head
from train.loop import Trainer
from train.supervision import Source, Sources, Teacher, source_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")
SOURCES = [source for source in Supervision if source is not Supervision.recorded]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return recorded_target(tmp_path_factory.mktemp("target"), 96, 16)


def config_of(recording: Recording, source: Supervision, **optim: Any) -> Config:
    config = config_for(recording, **optim)
    config.objective = ObjectiveConfig(source=source, rollout_tokens=4)
    if source is Supervision.hard:
        config.objective.divergence = Divergence.cross_entropy
    return config


# ---------------------------------------------------------------- the target beside the draft


def test_the_target_beside_the_draft_gives_the_laws_that_were_recorded(
    recording: Recording,
) -> None:
    batch = collate(recording.train[:9])
    log_p = Teacher(tiny_model(4)).laws(batch).log_p(slice(None))
    ours = log_p.gather(-1, batch.top_ids_NK).exp()
    torch.testing.assert_close(ours, batch.top_log_p_NK.exp(), rtol=2e-3, atol=2e-4)  # float16


def test_a_target_that_caps_its_logits_is_refused() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(
        vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **shape,
        final_logit_softcapping=0.05, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"objective\.source.*Gemma2ForCausalLM"):
        Teacher(Gemma2ForCausalLM(config))


def test_online_learns_what_recorded_laws_of_every_id_teach(recording: Recording) -> None:
    target = tiny_model(4)
    rows = recorded_rows(target, 40, top_k=VOCAB_SIZE)
    weights = []
    for source in (Supervision.recorded, Supervision.online):
        config = config_of(recording, source, lr=1e-3)
        model = DraftModel(from_layers(target, [0]))
        head = Head(model.head, None, num_cold=0, dtype=torch.float32, chunk=50)
        beside = tiny_model(4) if source is Supervision.online else None
        made = source_of(
            config.objective, source, seed=0, target=beside, model=model, head=head, stop_ids=()
        )
        trainer = Trainer(config, model, head, rows, rows[:2], Sources(made))
        before = model.map.weight.detach().clone()
        for step in range(6):
            trainer.step(step)
        weights.append(model.map.weight.detach() - before)
    assert float(weights[0].norm()) > 1e-3
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 0.02


# ---------------------------------------------------------------- the whole stage


@pytest.mark.parametrize("source", SOURCES)
def test_interrupted_and_resumed_is_uninterrupted(
    recording: Recording, tmp_path: Path, source: Supervision
) -> None:
    config = config_of(recording, source)
    train(recording, tmp_path / "whole", config)
    run = recording.open(tmp_path / "interrupted")
    with pytest.raises(Killed):
        distill(config, run, Watched(run, at_step=8))
    distill(config, run, Watched(run))
    assert_same_draft(run.folder, tmp_path / "whole")


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_teaches(recording: Recording, tmp_path: Path, source: Supervision) -> None:
    """Judged on answers it learns from: 96 of them say too little of others by their tokens."""
    taught = Recording(recording.target, recording.train, recording.train[:32])
    config = config_of(recording, source, max_steps=-1, num_epochs=4.0, evaluate_every=40)
    config.draft.warm_start = False
    found = train(taught, tmp_path / "run", config).expected_acceptance
    assert found.after.low > found.before.high


def test_hard_needs_no_recorded_law(recording: Recording, tmp_path: Path) -> None:
    """As of a target that shows its tokens only: no law is recorded, and the result is the same."""
    config = config_of(recording, Supervision.hard)
    train(recording, tmp_path / "with laws", config)
    blind = [
        dataclasses.replace(row, top_ids=row.top_ids[:, :0], top_log_p=row.top_log_p[:, :0])
        for row in recording.train
    ]
    judged = [
        dataclasses.replace(row, top_ids=row.top_ids[:, :0], top_log_p=row.top_log_p[:, :0])
        for row in recording.validation
    ]
    config.draft.hot_vocab = 0
    first = train(Recording(recording.target, blind, judged), tmp_path / "blind", config)
    second = train(recording, tmp_path / "seeing", config)
    assert first.expected_acceptance == second.expected_acceptance
    model = "draft/model/model.safetensors"
    assert (tmp_path / "blind" / model).read_bytes() == (tmp_path / "seeing" / model).read_bytes()


def test_two_processes_roll_out_and_learn_what_one_does(
    recording: Recording, tmp_path: Path
) -> None:
    run = train_alone_and_shared(
        recording,
        tmp_path,
        *("objective=forward_kl", "objective.source=on_policy", "objective.rollout_tokens=4"),
        *("optim=adamw", "optim.lr=3e-3", "optim.tokens_per_step=64", "optim.max_steps=8"),
        *("optim.num_epochs=1", "optim.evaluate_every=4"),
    )
    ours, theirs = Draft.read(run.draft), Draft.read(tmp_path / "alone" / "draft")
    # the same texts were written: a continued answer has another length
    assert ours.num_tokens_seen == theirs.num_tokens_seen
    mine, other = state_of(run.folder), state_of(tmp_path / "alone")
    for key, value in other.items():
        if key.startswith("/model/"):
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=2e-5)
    assert any(not torch.equal(mine[key], other[key]) for key in other if key.startswith("/model/"))


# ---------------------------------------------------------------- a last phase


def finished_by(recording: Recording, source: Supervision, share: float, **optim: Any) -> Config:
    """Recorded laws at first, then another teacher."""
    config = config_of(recording, Supervision.recorded, **optim)
    config.objective.finish_source, config.objective.finish_source_share = source, share
    return config


@pytest.mark.parametrize("at_step", [8, 12], ids=["before the last phase", "in it"])
def test_a_last_phase_is_interrupted_and_resumed_exactly(
    recording: Recording, tmp_path: Path, at_step: int
) -> None:
    config = finished_by(recording, Supervision.on_policy, 0.3)  # from step 10 of 14 on
    train(recording, tmp_path / "whole", config)
    run = recording.open(tmp_path / "interrupted")
    with pytest.raises(Killed):
        distill(config, run, Watched(run, at_step=at_step))
    distill(config, run, Watched(run))
    assert_same_draft(run.folder, tmp_path / "whole")


def test_the_target_is_loaded_when_the_last_phase_begins(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the run is that of its first source, to the last bit."""
    loaded: list[str] = []

    class Counted(Teacher):
        def __init__(self, model: PreTrainedModel) -> None:
            loaded.append("target")
            super().__init__(model)

    monkeypatch.setattr("train.supervision.Teacher", Counted)
    config = finished_by(recording, Supervision.on_policy, 0.3)
    plain = config_of(recording, Supervision.recorded)
    for name, each in (("finished", config), ("plain", plain)):
        run = recording.open(tmp_path / name)
        with pytest.raises(Killed):
            distill(each, run, Watched(run, at_validation=10))
        assert not loaded
        with pytest.raises(Killed):
            distill(each, run, Watched(run, at_step=10))
    assert loaded == []
    for name, each in (("finished", config), ("plain", plain)):
        run = Run(folder=tmp_path / name, store=tmp_path / ".store", seed=0, name=name)
        distill(each, run, Watched(run))
        loaded.append(name)
    assert loaded == ["target", "finished", "plain"]
    ours, theirs = (state_of(tmp_path / name) for name in ("finished", "plain"))
    points = [f"/progress/curve/{number}/expected_acceptance" for number in range(4)]
    # validations at steps 0, 5 and 10 are of the first phase, the one at 14 is not
    assert [ours[key] == theirs[key] for key in points] == [True, True, True, False]


@pytest.mark.parametrize("num_steps", [1, 9, 10, 64])
def test_the_last_phase_takes_its_share_of_the_steps(num_steps: int) -> None:
    opened: list[int] = []

    def open_last() -> Source:
        opened.append(1)
        return last

    first, last = Source(), Source(answers_only=True)
    sources = Sources(first, open_last, 0.3)
    taught = [sources.at(step, num_steps) is last for step in range(num_steps)]
    assert taught == sorted(taught) and not taught[0]
    assert sum(taught) == math.floor(0.3 * num_steps + 1e-9)
    assert len(opened) == min(1, sum(taught))


# ---------------------------------------------------------------- a reference selects


def test_a_reference_selects_through_the_whole_stage(recording: Recording, tmp_path: Path) -> None:
    """Trained, interrupted and resumed; every step learns from its share of each answer."""
    train(recording, tmp_path / "reference", config_of(recording, Supervision.recorded))
    config = config_of(recording, Supervision.recorded)
    config.outputs = str(tmp_path)
    config.objective = ObjectiveConfig(reference="reference", select_share=0.4)
    whole = train(recording, tmp_path / "whole", config)
    everything = Draft.read(tmp_path / "reference" / "draft").num_tokens_seen
    assert 0.4 * everything < whole.num_tokens_seen < 0.48 * everything
    run = recording.open(tmp_path / "interrupted")
    with pytest.raises(Killed):
        distill(config, run, Watched(run, at_step=8))
    distill(config, run, Watched(run))
    assert_same_draft(run.folder, tmp_path / "whole")


def test_a_reference_that_is_not_there_is_said(recording: Recording, tmp_path: Path) -> None:
    config = config_of(recording, Supervision.recorded)
    config.outputs = str(tmp_path)
    config.objective = ObjectiveConfig(reference="nobody", select_share=0.4)
    with pytest.raises(ContractError, match=r"nobody/draft/manifest\.json: not there"):
        train(recording, tmp_path / "run", config)
