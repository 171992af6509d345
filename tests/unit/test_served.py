"""What servers of several kinds say is read as exact ids and laws of the target, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conf.choices import Engine
from conf.errors import ConfigError
from conf.groups import GenerateConfig
from conf.schema import Config
from conf.server import ServerConfig
from data.chat import render_prompt
from data.shards import Row
from models.endpoints import Broken
from models.jobs import Job
from models.load import open_target
from models.remote import Remote
from models.served import Reader, until_stop
from tests.lessons import Kept
from tests.stand_in_api import Body, StandInApi, stand_in_api
from tests.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXT = "if the line"
IDS = TOKENIZER(TEXT, add_special_tokens=False).input_ids
PARTS = [TOKENIZER.decode([number]) for number in IDS]
END = 2
LAW = {IDS[0]: -0.5, 7: -1.5, 9: -2.5}


def chat_content(parts: list[str]) -> list[dict[str, Any]]:
    """As OpenAI's chats list tokens: texts and bytes, no ids."""
    tops = [{"token": "?", "bytes": [33 + n], "logprob": -1.0 - n} for n in range(3)]
    return [
        {"token": part, "bytes": list(part.encode()), "logprob": -1.0, "top_logprobs": tops}
        for part in parts
    ]


def llama_content(ids: list[int]) -> list[dict[str, Any]]:
    """As llama.cpp lists tokens."""
    return [
        {
            "id": number,
            "token": TOKENIZER.decode([number]),
            "bytes": [] if number == END else list(TOKENIZER.decode([number]).encode()),
            "logprob": -1.0,
            "top_logprobs": [{"id": n, "token": "", "logprob": p} for n, p in LAW.items()],
        }
        for number in ids
    ]


def vllm(ids: list[int]) -> dict[str, Any]:
    """As vLLM does when it is asked for ids."""
    return {
        "text": TEXT,
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {
            "tokens": [f"token_id:{number}" for number in ids],
            "top_logprobs": [{f"token_id:{n}": p for n, p in LAW.items()} for _ in ids],
        },
    }


def tree(choice: dict[str, Any], num_generated: int | None = None) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": num_generated}
    return {"choices": [choice], "usage": {k: v for k, v in usage.items() if v is not None}}


def test_ids_that_a_server_gives_are_taken() -> None:
    reader = Reader(TOKENIZER)
    whole = [*IDS, END]
    for said in (
        reader.read(tree(vllm(whole), len(whole))),
        reader.read(
            tree(
                {
                    "text": TEXT,
                    "finish_reason": "stop",
                    "logprobs": {"content": llama_content(whole)},
                },
                len(whole),
            )
        ),
    ):
        assert said.tokens == whole
        assert said.laws == [LAW] * len(whole)
        assert said.ended
        assert said.num_prompt == 5


def test_the_end_may_be_counted_and_not_listed() -> None:
    choice = vllm(IDS)
    del choice["token_ids"]  # as earlier versions
    said = Reader(TOKENIZER).read(tree(choice, len(IDS) + 1))
    assert said.tokens == IDS
    assert said.is_whole and said.ended


def test_ids_follow_from_bytes_where_they_are_the_whole_answer() -> None:
    message = {"role": "assistant", "content": TEXT}
    choice = {"message": message, "finish_reason": "stop"}
    said = Reader(TOKENIZER).read(tree({**choice, "logprobs": {"content": chat_content(PARTS)}}))
    assert said.tokens == IDS
    assert said.ended
    assert said.laws is not None
    (bang,) = TOKENIZER("!", add_special_tokens=False).input_ids
    assert said.laws[0][bang] == -1.0
    # OpenAI counts the token that ends an answer, and does not list it
    counted = tree({**choice, "logprobs": {"content": chat_content(PARTS)}}, len(IDS) + 1)
    assert Reader(TOKENIZER).read(counted).tokens == IDS
    ending = tree({**choice, "logprobs": {"content": chat_content([*PARTS, "<|im_end|>"])}})
    assert Reader(TOKENIZER).read(ending).tokens == [*IDS, END]
    for parts in (PARTS[:-1], PARTS[1:], [*PARTS, "more"]):
        other = Reader(TOKENIZER).read(
            tree({**choice, "logprobs": {"content": chat_content(parts)}})
        )
        assert (other.tokens, other.laws) == ([], None)


def test_texts_of_tokens_that_are_no_characters_are_not_guessed() -> None:
    logprobs = {"tokens": [*PARTS, "\ufffd"], "top_logprobs": [{"a": -1.0}] * (len(PARTS) + 1)}
    said = Reader(TOKENIZER).read(
        tree({"text": TEXT + "\ufffd", "finish_reason": "length", "logprobs": logprobs})
    )
    assert said.tokens == []
    assert said.text == TEXT + "\ufffd"


def test_an_answer_ends_before_the_first_token_that_is_missing() -> None:
    """llama.cpp lists no token that ends inside a character."""
    listed = llama_content([*IDS, END])
    del listed[2]
    choice = {"text": TEXT, "finish_reason": "stop", "logprobs": {"content": listed}}
    said = Reader(TOKENIZER).read(tree(choice, len(IDS) + 1))
    assert said.tokens == IDS[:2]
    assert not said.is_whole
    assert said.laws is not None
    assert len(said.laws) == 2


def test_nothing_is_learned_behind_a_stop_id() -> None:
    said = until_stop(Reader(TOKENIZER).read(tree(vllm([IDS[0], END, IDS[1]]), 3)), {END})
    assert said.tokens == [IDS[0], END]
    assert said.laws == [LAW, LAW]


@pytest.mark.parametrize(
    "broken",
    [
        {},
        [],
        None,
        {"choices": []},
        {"choices": [{"text": "a"}]},
        tree({"finish_reason": "stop"}),
        tree({"text": "a", "finish_reason": "stop", "logprobs": {"content": [{}]}}),
        tree(
            {
                "text": "a",
                "finish_reason": "stop",
                "logprobs": {"tokens": ["a"], "top_logprobs": [None, None]},
            }
        ),
        tree({**vllm(IDS), "token_ids": ["x"]}),
        tree({**vllm([1]), "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": 0.0, "b": 0.0}]}}),
    ],
    ids=repr,
)
def test_what_is_no_answer_is_said_to_be_none(broken: Any) -> None:
    with pytest.raises(Broken):
        Reader(TOKENIZER).read(broken)


# ---------------------------------------------------------------- what a server can


class Api:
    """vLLM's completions over one fixed law; `changes` make it another server."""

    def __init__(self, **changes: Any) -> None:
        self.most_ids, self.plain, self.scaled = 32, False, False
        self.laws, self.ids, self.extra_prompt, self.models = True, True, 0, ["target"]
        self.left_out = -1  # the place of a token that is not listed
        for name, value in changes.items():
            assert hasattr(self, name)
            setattr(self, name, value)

    def __call__(self, path: str, body: Body) -> Body:
        if path == "/models":
            return {"data": [{"id": name} for name in self.models]}
        count = body.get("logprobs") or 0
        if count > self.most_ids or (self.plain and "top_k" in body):
            raise ValueError("too much")
        temperature = body["temperature"] or 1.0
        logits = torch.linspace(0, -6, 40) / (temperature if self.scaled else 1)
        law = dict(enumerate(logits.log_softmax(-1).tolist()[:count], start=10))
        ids = [*IDS, END][: body["max_tokens"]]
        choice = vllm(ids)
        tops = [{f"token_id:{n}": p for n, p in law.items()} for _ in ids]
        choice["logprobs"]["top_logprobs"] = tops
        if not self.laws or not count:
            choice["logprobs"] = None
        if not self.ids:
            del choice["token_ids"]
        usage = {"prompt_tokens": len(body["prompt"]) + self.extra_prompt}
        if self.left_out >= 0:
            listed = llama_content([*IDS, END])
            del listed[self.left_out]
            choice = {"text": TEXT, "finish_reason": "stop", "logprobs": {"content": listed}}
            usage["completion_tokens"] = len(IDS) + 1
        return {"choices": [choice], "usage": usage}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model().config.save_pretrained(folder)  # no weights: it is served
    TOKENIZER.save_pretrained(folder)
    return folder


def recorded(
    folder: Path, api: StandInApi, said: list[str], *, laws: bool = True, **changes: Any
) -> tuple[list[Row], dict[str, Any]]:
    config = Config()
    config.target.path = str(folder)
    config.generate = GenerateConfig(
        engine=Engine.server,
        server=ServerConfig(urls=[api.url], laws=laws, patience_s=5.0),
        **{"temperatures": [0.0, 0.7, 1.0], "max_new_tokens": 24, "mass": 1.0, **changes},
    )
    target = open_target(config)
    messages = [{"role": "user", "content": "Hello"}]
    prompt = render_prompt(target.tokenizer, messages)
    temperatures = config.generate.temperatures
    jobs = [
        Job(n, "train", "chat", prompt, temperatures[n % len(temperatures)], False, messages)
        for n in range(9)
    ]
    writer = Kept(folder, target.config.vocab_size, 99, 0)
    remote = Remote(config, target, said.append)
    list(remote.record(jobs, writer))
    return sorted(writer.rows, key=lambda row: row.index), remote.manifest()


def test_each_answer_is_asked_for_once_with_the_whole_law(folder: Path) -> None:
    said: list[str] = []
    with stand_in_api(Api()) as api:
        rows, manifest = recorded(folder, api, said)
    assert [row.index for row in rows] == list(range(9))
    assert all(row.generated.tolist() == [*IDS, END] for row in rows)
    assert all(row.top_ids.shape == (len(IDS) + 1, 32) for row in rows)
    assert manifest["ids"] == "given by the server"
    bodies = [body for path, body in api.requests if path == "/completions"]
    assert all(body["top_p"] == 1 and body["top_k"] == -1 and body["min_p"] == 0 for body in bodies)
    assert len({body["seed"] for body in bodies[-9:]}) == 9
    assert len(bodies) == 1 + 2 + 9  # one to see what there is, one for each other temperature
    assert any("prompts' own laws are not recorded" in sentence for sentence in said)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("most", [20, 5])
def test_a_server_of_fewer_ids_or_words_is_asked_for_what_it_has(
    folder: Path, plain: bool, most: int
) -> None:
    said: list[str] = []
    with stand_in_api(Api(most_ids=most, plain=plain)) as api:
        rows, manifest = recorded(folder, api, said)
    assert manifest["ids_per_law"] == most
    assert all(row.top_ids.shape[1] == most for row in rows)
    assert any(f"gives {most} ids of a position, fewer than" in sentence for sentence in said)
    assert ("top_k" in api.requests[-1][1]) != plain


def test_laws_that_change_with_the_temperature_are_not_recorded(folder: Path) -> None:
    with stand_in_api(Api(scaled=True)) as api:
        with pytest.raises(ConfigError, match=r"at 0\.7 are not those at 1.*temperatures=\[1\.0\]"):
            recorded(folder, api, [])
        rows, _ = recorded(folder, api, [], temperatures=[0.0, 1.0])
    first = torch.linspace(0, -6, 40).log_softmax(-1)[:32]
    for row in rows:
        torch.testing.assert_close(row.top_log_p, first.expand_as(row.top_log_p))


def test_a_server_without_laws_is_refused_unless_none_are_wanted(folder: Path) -> None:
    with stand_in_api(Api(laws=False, ids=False)) as api:
        with pytest.raises(ConfigError, match=r"no log-probabilities.*laws=false and objective"):
            recorded(folder, api, [])
        rows, manifest = recorded(folder, api, [], laws=False)
    assert manifest["ids"] == "of the text, by the tokenizer"
    assert all(row.generated.tolist() == [*IDS, END] for row in rows)
    assert all(row.top_ids.shape == (len(IDS) + 1, 0) for row in rows)


def test_what_is_left_out_is_read_from_the_text_where_no_laws_are_wanted(folder: Path) -> None:
    """With laws an answer ends before it."""
    with stand_in_api(Api(left_out=2)) as api:
        rows, _ = recorded(folder, api, [])
        assert [row.generated.tolist() for row in rows] == [IDS[:2]] * 9
        blind, _ = recorded(folder, api, [], laws=False)
        assert [row.generated.tolist() for row in blind] == [[*IDS, END]] * 9


def test_a_server_that_reads_another_prompt_is_refused(folder: Path) -> None:
    with stand_in_api(Api(extra_prompt=1)) as api:
        with pytest.raises(ConfigError, match="the server reads .* laws are those of another"):
            recorded(folder, api, [])
        said: list[str] = []
        recorded(folder, api, said, laws=False)
        assert any("its answers are recorded behind the latter" in sentence for sentence in said)


def test_a_server_of_several_models_asks_for_a_name(folder: Path) -> None:
    with (
        stand_in_api(Api(models=["a", "b"])) as api,
        pytest.raises(ConfigError, match=r"generate\.server\.model=''.*2 models \(a, b\)"),
    ):
        recorded(folder, api, [])
