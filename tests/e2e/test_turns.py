"""Conversations are answered turn by turn, each turn behind the target's own answers before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.contracts import Lessons, Prompt
from data.chat import render_prompt
from data.prompts import read_prompts
from data.shards import Row, read_split
from tests.commands import Place, tiny_place
from tests.llama_server import llama_server
from tests.tiny import tiny_tokenizer
from tests.tiny_gguf import write_gguf

NUM_TALKS = 24 + 6
RECORDS = """
defaults:
  - /schema/data/base@_here_
  - _self_
num_train: 24
num_validation: 6
sources:
  talks: {messages_column: talk, path: PATH}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Talks of one to three user turns; every second one has answers of somebody else's."""
    place = tiny_place(tmp_path_factory.mktemp("talks"))
    tiny_tokenizer(ascii_only=True).save_pretrained(place.folder / "target")
    words = (place.folder / "chat.jsonl").read_text().splitlines()
    words += (place.folder / "code.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"][8:38] for line in words]
    lines = []
    for number in range(NUM_TALKS):
        said = texts[number:] + texts[:number]
        talk = [{"role": "system", "content": f"short {number} and {said[7]}"}]
        for turn in range(1 + number % 3):
            if turn and number % 2:
                talk.append({"role": "assistant", "content": "what somebody else said"})
            talk.append({"role": "user", "content": said[11 * turn]})
        lines.append(json.dumps({"talk": talk}))
    path = place.folder / "talks.jsonl"
    path.write_text("\n".join(lines) + "\n")
    (place.folder / "conf" / "data" / "talks.yaml").write_text(RECORDS.replace("PATH", str(path)))
    return place


def settings(name: str) -> list[str]:
    return ["data=talks", "tracker=none", f"name={name}", "generate.max_new_tokens=12"]


def planned(folder: Path) -> list[tuple[Prompt, int]]:
    """Every prompt with the number of its first answer."""
    found, index = [], 0
    for split in ("validation", "train"):
        for prompt in read_prompts(folder / "corpus", split):
            found.append((prompt, index))
            index += 1 + len(prompt.follow_ups)
    return found


def rows_of(lessons: Path) -> dict[int, Row]:
    manifest = Lessons.read(lessons)
    rows = [row for split in manifest.splits.values() for row in read_split(lessons, split)]
    assert len({row.index for row in rows}) == len(rows)
    return {row.index: row for row in rows}


def assert_each_turn_follows_the_answers_before(place: Place, name: str) -> int:
    """And the laws recorded of it are those of exactly that text. Returns the later turns."""
    folder = place.outputs / name
    tokenizer = AutoTokenizer.from_pretrained(place.folder / "target")
    target = AutoModelForCausalLM.from_pretrained(place.folder / "target", dtype=torch.float32)
    rows, num_later, num_planned = rows_of(folder / "lessons"), 0, 0
    for prompt, first in planned(folder):
        messages = list(prompt.messages)
        num_planned += 1 + len(prompt.follow_ups)
        for turn in range(1 + len(prompt.follow_ups)):
            ids = render_prompt(tokenizer, messages)
            if len(ids) > 224:
                assert not any(first + later in rows for later in range(turn, 3))
                break
            row = rows[first + turn]
            assert row.prompt.tolist() == ids
            assert_own_law(target, row)
            num_later += turn > 0
            if turn < len(prompt.follow_ups):
                text = tokenizer.decode(row.generated, skip_special_tokens=True)
                messages += [{"role": "assistant", "content": text}, *prompt.follow_ups[turn]]
    assert Lessons.read(folder / "lessons").num_unanswered == num_planned - len(rows)
    return num_later


def assert_own_law(target: torch.nn.Module, row: Row) -> None:
    with torch.no_grad():
        logits = target(torch.cat([row.prompt, row.generated]).unsqueeze(0)).logits[0]
    own = logits[len(row.prompt) - 1 : -1].softmax(-1)
    answer = row.of_answer()
    assert len(answer.top_ids) == len(row.generated)
    recorded = answer.top_log_p.exp()
    assert float((recorded - own.gather(1, answer.top_ids) * (recorded > 0)).abs().max()) < 0.05
    assert answer.top_ids[:, 0].tolist() == own.argmax(-1).tolist()


def test_our_engine_answers_every_turn(place: Place) -> None:
    for stage in ("prepare", "generate"):
        place.run(*settings("ours"), f"stage={stage}")
    prompts = [prompt for prompt, _ in planned(place.outputs / "ours")]
    assert sorted(len(prompt.follow_ups) for prompt in prompts) == [0] * 10 + [1] * 10 + [2] * 10
    assert all(message["role"] != "assistant" for p in prompts for message in p.all_messages)
    assert assert_each_turn_follows_the_answers_before(place, "ours") >= 25


def test_a_lost_turn_is_answered_again_and_no_other(place: Place) -> None:
    for stage in ("prepare", "generate"):
        place.run(*settings("lost"), "seed=1", f"stage={stage}")
    lessons = place.outputs / "lost" / "lessons"
    before = rows_of(lessons)
    files = sorted(lessons.glob("train-*.safetensors"))
    victims = (files[0], files[-1])  # of first and of last turns
    for path in victims:
        path.unlink()
    kept = {path: path.read_bytes() for path in files if path not in victims}
    place.run(*settings("lost"), "seed=1", "stage=generate")
    assert {path: path.read_bytes() for path in kept} == kept
    after = rows_of(lessons)
    assert {n: row.generated.tolist() for n, row in after.items()} == {
        n: row.generated.tolist() for n, row in before.items()
    }
    assert_each_turn_follows_the_answers_before(place, "lost")


def test_a_server_answers_every_turn(place: Place) -> None:
    target = AutoModelForCausalLM.from_pretrained(place.folder / "target", dtype=torch.float32)
    write_gguf(place.folder / "target.gguf", target, tiny_tokenizer(ascii_only=True))
    with llama_server(place.folder / "target.gguf") as server:
        for api in ("completions", "chat"):
            served = ("generate=server", f"generate.server.urls=[{server.url}]")
            mine = [*settings(api), *served, f"generate.server.api={api}"]
            for stage in ("prepare", "generate"):
                place.run(*mine, f"stage={stage}")
            assert assert_each_turn_follows_the_answers_before(place, api) >= 25


def test_vllm_answers_every_turn(place: Place) -> None:
    for stage in ("prepare", "generate"):
        mine = place.command(*settings("vllm"), "generate=vllm", f"stage={stage}")
        module = [sys.executable, "-m", "tests.stand_in_vllm", "0"]
        place.execute([*module, *mine[2:]], 0)
    assert assert_each_turn_follows_the_answers_before(place, "vllm") >= 25


def test_the_last_turn_alone_is_answered_where_that_is_asked_for(place: Place) -> None:
    last = [*settings("last"), "data.sources.talks.turns=last"]
    for stage in ("prepare", "generate"):
        place.run(*last, f"stage={stage}")
    prompts = [prompt for prompt, _ in planned(place.outputs / "last")]
    assert all(not prompt.follow_ups for prompt in prompts)
    assert any(m["role"] == "assistant" for prompt in prompts for m in prompt.messages)
    assert len(rows_of(place.outputs / "last" / "lessons")) == NUM_TALKS
