"""What stage=plan says, beside what the stages then take, and for targets that are a configuration
alone.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from transformers import LlamaConfig, PreTrainedModel

from conf.console import Screen
from conf.contracts import Draft, Lessons, Provenance
from conf.devices import PlanConfig
from conf.errors import ConfigError
from conf.groups import DataConfig, EvalConfig, SourceConfig, TargetConfig
from conf.run import Run
from conf.schema import Config
from models.anatomy import Anatomy, anatomy_of
from tests.commands import Place, tiny_place
from tests.tiny import tiny_model
from train.plan import Plan, plan
from train.plan_stages import Place as Where
from train.plan_stages import too_busy
from train.rates import Draft as DraftSize
from train.rates import stated

WITHIN = 0.25
STAGES = {"prepare": "corpus", "generate": "lessons", "distill": "draft", "evaluate": "report"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Every stage as a command of its own; the plan was made when the corpus was there."""
    place = tiny_place(tmp_path_factory.mktemp("plan"))
    for stage in ("prepare", "plan", "generate", "distill", "evaluate"):
        place.run(f"stage={stage}", "name=main", "tracker=none")
    return place


@pytest.fixture(scope="module")
def planned(place: Place) -> dict[str, dict[str, Any]]:
    tree = json.loads((place.outputs / "main" / "plan.json").read_text(encoding="utf-8"))
    assert all("other work keeps" in line for line in tree["warnings"])
    assert "counted in the corpus" in tree["basis"][2]
    return {stage["stage"]: stage for stage in tree["stages"]}


def folder(place: Place, stage: str) -> Path:
    return (place.outputs / "main" / STAGES[stage]).resolve()


def test_tokens(place: Place, planned: dict[str, dict[str, Any]]) -> None:
    splits = Lessons.read(folder(place, "generate")).splits.values()
    read_and_written = sum(split.num_prompt_tokens + split.num_tokens for split in splits)
    assert planned["generate"]["tokens"] == pytest.approx(read_and_written, rel=WITHIN)
    # a target of random weights hardly ever ends an answer: the most it can be is what it is
    assert planned["generate"]["most_tokens"] == pytest.approx(read_and_written, rel=0.02)
    learned = Draft.read(folder(place, "distill")).num_tokens_seen
    assert planned["distill"]["tokens"] == pytest.approx(learned, rel=WITHIN)


@pytest.mark.parametrize("stage", ["generate", "distill", "evaluate"])
def test_disk(place: Place, planned: dict[str, dict[str, Any]], stage: str) -> None:
    found = sum(path.stat().st_size for path in folder(place, stage).rglob("*") if path.is_file())
    assert planned[stage]["disk"] == pytest.approx(found, rel=WITHIN)
    assert planned[stage]["most_disk"] >= planned[stage]["disk"]


@pytest.mark.parametrize("stage", STAGES)
def test_memory(place: Place, planned: dict[str, dict[str, Any]], stage: str) -> None:
    tree = json.loads((folder(place, stage) / "manifest.json").read_text(encoding="utf-8"))
    found = Provenance(**tree["provenance"]).peak_memory_gib
    assert planned[stage]["peak"] / 2**30 == pytest.approx(found, rel=WITHIN)


# ---------------------------------------------------------------- a configuration alone


def large(folder: Path, **changes: Any) -> Config:
    """A run for a target of 70 billion weights of which nothing but config.json is there."""
    LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "target")
    (folder / "prompts.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    source = SourceConfig(path=str(folder / "prompts.jsonl"))
    return Config(
        name="large",
        outputs=str(folder),
        target=TargetConfig(path=str(folder / "target")),
        data=DataConfig(sources={"all": source}),
        eval=EvalConfig(suites={"all": source}),
        plan=PlanConfig(**changes),
    )


def planned_for(config: Config) -> tuple[Plan, str]:
    console = Console(record=True, width=120, file=io.StringIO())
    run = Run.open(config, Path(config.outputs) / config.name)
    return plan(config, run, Screen(console)), console.export_text()


def test_a_large_target_for_a_stated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    found, page = planned_for(large(tmp_path, device="b200", num_devices=4))
    assert len(page.splitlines()) < 30
    assert all(len(line) <= 120 for line in page.splitlines())
    assert "plan for 4 x b200" in page and "GPU hours" in page and "70.6B weights" in page
    by_name = {str(stage.stage): stage for stage in found.stages}
    weights, cache = (by_name["generate"].memory[name] for name in ("weights", "cache"))
    assert weights == pytest.approx(141.1e9, rel=0.01)  # two bytes each
    assert cache == pytest.approx(128 * 448 * 2 * 80 * 8 * 128 * 2)
    assert found.warnings == []
    alone, _ = planned_for(large(tmp_path, device="b200"))
    assert alone.stages[1].seconds > by_name["generate"].seconds
    crowded, _ = planned_for(large(tmp_path, device="h200"))
    assert "generate takes" in crowded.warnings[0] and "131.32 GiB" in crowded.warnings[0]


def test_a_larger_recording_takes_more_of_everything(tmp_path: Path) -> None:
    config = large(tmp_path, device="b200")
    config.generate.warm_start_tokens = 0  # whose bytes do not grow
    small, _ = planned_for(config)
    config.data.num_train *= 10
    many, _ = planned_for(config)
    for before, after in zip(small.stages[1:3], many.stages[1:3], strict=True):
        assert after.tokens > 9 * before.tokens
        assert after.seconds > before.seconds
    assert many.stages[1].disk > 9 * small.stages[1].disk


def test_of_a_depth_to_be_chosen_the_largest_is_reckoned(tmp_path: Path) -> None:
    config = large(tmp_path, device="b200")
    config.draft.num_layers = 6
    deepest, page = planned_for(config)
    assert "draft.num_layers=0" not in page
    config.draft.num_layers = 0
    to_choose, page = planned_for(config)
    assert to_choose.stages == deepest.stages
    assert "draft.num_layers=0: a draft of 6 layers is reckoned" in page


def test_what_is_not_known_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plan.device='h300': its rates are not known. Use one"):
        PlanConfig(device="h300")
    config = large(tmp_path, device="h200")
    config.draft.num_layers = 80
    with pytest.raises(ConfigError, match="the target has 80 layers"):
        planned_for(config)


def test_busy_cores_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Where(on_cpu=True, room=1e9, itemsize=4, program=0.0)
    monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds: 80.0)
    assert "other work keeps 80% of this machine busy" in too_busy(here)[0]
    assert too_busy(Where(on_cpu=False, room=1e9, itemsize=4, program=0.0)) == []
    monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds: 3.0)
    assert too_busy(here) == []


# ---------------------------------------------------------------- rates


@pytest.fixture
def anatomy() -> Anatomy:
    return anatomy_of(tiny_model(num_layers=4).config)


def test_a_stated_step_is_bound_by_reading_and_many_rows_by_products(anatomy: Anatomy) -> None:
    rates = stated("h200", anatomy)
    alone = rates.step_alone(0)
    assert alone == pytest.approx(2 * anatomy.used_weights / (0.6 * 4800e9))
    assert rates.step(2, 0, 64) == alone  # the weights are read once for both
    many = 100_000
    products = 2 * many * anatomy.used_weights / (0.4 * 989e12)
    assert rates.step(many, 0, 64) == pytest.approx(products)
    assert rates.reading(True) > rates.reading(False)


def test_stated_training_is_three_forward_passes_but_for_the_frozen_head(anatomy: Anatomy) -> None:
    body = sum(anatomy.used) + anatomy.hidden_size**2
    draft = DraftSize(anatomy, trained=body, head_columns=0, layers=(0, 1, 2, 3))
    found = stated("h200", anatomy).training(draft, [])
    assert found.per_position == pytest.approx(6 * body / (0.4 * 989e12))
    assert found.per_validated == pytest.approx(found.per_position / 3)
    assert found.per_update == pytest.approx(28 * body / (0.6 * 4800e9))
