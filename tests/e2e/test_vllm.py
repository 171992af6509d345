"""The command where vLLM is installed, by a stand-in for it: answers are recorded, killed, gone on
with, and learned from.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from conf.contracts import Draft, Lessons
from data.shards import Row, read_split
from tests.commands import Place, tiny_place
from tests.tiny import tiny_model

NUM_ANSWERS = 36 + 8
KILLED = -9
SETTINGS = ["tracker=none", "generate=vllm", "generate.vllm.answers_per_call=10"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = tiny_place(tmp_path_factory.mktemp("vllm"))
    place.run(*SETTINGS, "stage=prepare")
    return place


def with_vllm(place: Place, *overrides: str, killed_at: int = 0, code: int = 0) -> str:
    """What the command says where vLLM is installed."""
    _, _, *arguments = place.command(*SETTINGS, *overrides)
    module = ["-m", "tests.stand_in_vllm", str(killed_at)]
    return place.execute([sys.executable, *module, *arguments], code).stderr


def shards(lessons: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in lessons.glob("*.safetensors")}


def rows_of(lessons: Path) -> dict[int, Row]:
    manifest = Lessons.read(lessons)
    rows = [row for split in manifest.splits.values() for row in read_split(lessons, split)]
    assert sorted(row.index for row in rows) == list(range(NUM_ANSWERS)), "an answer twice, or none"
    return {row.index: row for row in rows}


def assert_laws_are_the_targets(row: Row, target: torch.nn.Module) -> None:
    """As far as the codec does not round, which has a test of its own."""
    with torch.no_grad():
        logits = target(torch.cat([row.prompt, row.generated]).unsqueeze(0)).logits[0]
    own = logits.softmax(-1)[-1 - row.num_laws : -1]
    recorded = row.top_log_p.exp()
    assert float((recorded - own.gather(1, row.top_ids) * (recorded > 0)).abs().max()) < 0.05
    assert row.top_ids[:, 0].tolist() == own.argmax(-1).tolist()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="it is installed here")
def test_without_vllm_the_first_sentence_says_so(place: Place) -> None:
    said = place.run(*SETTINGS, "stage=generate", code=2).stderr.splitlines()
    assert said == [
        "error: generate.engine=vllm: vLLM is not installed. Run pip install vllm, or use"
        " generate.engine=builtin."
    ]


def test_a_killed_recording_goes_on_and_is_as_if_it_had_not_been_killed(place: Place) -> None:
    """Killed in the third call for answers, the one for the trial before them: what filled a shard
    of the two before is on disk.
    """
    lessons = place.outputs / "main" / "lessons"
    with_vllm(place, "stage=generate", killed_at=4, code=KILLED)
    kept = shards(lessons)
    assert sorted(kept) == ["train-000-00000.safetensors", "validation-000-00000.safetensors"]
    said = with_vllm(place, "stage=generate", "generate.vllm.answers_per_call=7")
    assert "16 answers are on disk already, going on from there" in said
    assert {name: shards(lessons)[name] for name in kept} == kept
    manifest = Lessons.read(lessons)
    assert manifest.engine == {"kind": "vllm", "version": "0.32.0"}
    assert "recorded training tokens are there already" in with_vllm(place, "stage=generate")

    whole = [f"outputs={place.folder / 'whole'}", "name=whole"]
    place.run(*SETTINGS, *whole, "stage=prepare")
    with_vllm(place, *whole, "stage=generate")
    rows, target = rows_of(lessons), tiny_model(num_layers=4)
    for index, row in rows_of(place.folder / "whole" / "whole" / "lessons").items():
        assert rows[index].generated.tolist() == row.generated.tolist()
        assert_laws_are_the_targets(rows[index], target)
    splits = {name: split.num_laws > split.num_tokens for name, split in manifest.splits.items()}
    assert splits == {"train": True, "validation": False}  # prompts' laws


def test_a_draft_is_distilled_from_what_vllm_recorded(place: Place) -> None:
    """Its warm start is fitted to hidden states that the target here computes."""
    before = {}
    for name, how in (("warm", "true"), ("cold", "false")):
        mine = (f"name={name}", f"draft.warm_start={how}")
        place.run(*SETTINGS, *mine, "stage=prepare")
        with_vllm(place, *mine, "stage=generate")
        said = place.run(*SETTINGS, *mine, "stage=distill").stderr  # which needs no vLLM
        before[name] = Draft.read(place.outputs / name / "draft").expected_acceptance.before
        if name == "warm":
            lessons = Lessons.read(place.outputs / name / "lessons")
            found = re.search(r"warm start from (\d+) hidden states", said)
            assert found and int(found[1]) == lessons.splits["train"].num_tokens
    assert before["warm"].low > before["cold"].high
