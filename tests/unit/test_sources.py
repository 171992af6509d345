"""Records from every kind of source, how they become prompts, and the sentence for each thing that
is wrong.
"""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from conf.choices import SourceKind, Turns
from conf.errors import ConfigError
from conf.groups import SourceConfig
from data.files import parse
from data.prompts import Source
from data.sources import count_known, digest, read_records

ROWS = [{"question": f"what is {n}", "passage": f"Title {n} -- about {n}"} for n in range(6)]


def jsonl(path: Path, rows: list[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return str(path)


def texts(config: SourceConfig, seed: int = 0) -> list[str]:
    """The user's turns in the order of the file."""
    found = list(Source("s", "data.sources.s", config, seed))
    found.sort(key=lambda c: int(c.prompt.id.rpartition("-")[2]))
    return [c.prompt.messages[-1]["content"] for c in found]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with a data file; importing it would fail."""
    site = tmp_path / "site"
    (site / "prompt_box").mkdir(parents=True)
    (site / "prompt_box" / "__init__.py").write_text("raise RuntimeError('imported')")
    jsonl(site / "prompt_box" / "rows.jsonl", ROWS)
    info = site / "prompt_box-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prompt-box\nVersion: 1.2\n")
    (info / "RECORD").write_text("prompt_box/__init__.py,,\nprompt_box/rows.jsonl,,\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    return site


def packaged(**more: Any) -> SourceConfig:
    kind, template = SourceKind.package, more.pop("template", "{question}?")
    values = {"package": "prompt-box", "path": "prompt_box/rows.jsonl", **more}
    return SourceConfig(kind=kind, template=template, **values)


# ---------------------------------------------------------------- what is read


@pytest.mark.usefixtures("package")
def test_a_package_is_read_and_never_imported() -> None:
    assert texts(packaged()) == [f"what is {n}?" for n in range(6)]
    assert digest("data.sources.s", packaged()) == "prompt-box 1.2"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_json_lines_plain_and_compressed(tmp_path: Path, name: str) -> None:
    path = jsonl(tmp_path / name, ROWS)
    assert list(parse("key", Path(path))) == ROWS


def test_json_text_and_csv(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"prompt": "x"}, "y"]')
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    (tmp_path / "a.csv").write_text("prompt,other\n'a b',1\n")
    assert list(parse("key", tmp_path / "a.json")) == [{"prompt": "x"}, {"prompt": "y"}]
    assert list(parse("key", tmp_path / "a.txt")) == [{"prompt": "one"}, {"prompt": "two"}]
    assert list(parse("key", tmp_path / "a.csv")) == [{"prompt": "'a b'", "other": "1"}]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch by batch, nested columns as lists and objects."""
    monkeypatch.setattr("data.files.BATCH_RECORDS", 2)
    rows = [{**row, "messages": [{"role": "user", "content": row["question"]}]} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(parse("key", tmp_path / "rows.parquet")) == rows
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ConfigError, match="key=broken.parquet: it cannot be read as Parquet"):
        list(parse("key", tmp_path / "broken.parquet"))


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    jsonl(tmp_path / "deeper" / "b.jsonl.gz", ROWS[2:4])
    jsonl(tmp_path / "a.jsonl", ROWS[:2])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[4:]), tmp_path / "e.parquet")
    (tmp_path / "README.md").write_text("not prompts")
    config = SourceConfig(path=str(tmp_path), template="{question}")
    assert texts(config) == [row["question"] for row in ROWS]
    before = digest("data.sources.s", config)
    jsonl(tmp_path / "deeper" / "b.jsonl.gz", ROWS[2:3])
    assert digest("data.sources.s", config) != before


def test_a_folder_without_a_readable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("not prompts")
    with pytest.raises(ConfigError, match="no file in this folder can be read. Use .jsonl"):
        texts(SourceConfig(path=str(tmp_path)))


def test_records_inside_a_json_document(tmp_path: Path) -> None:
    talks = {
        "t1": {"turns": [[{"text": "Hello"}, {"text": "who is it?"}], [{"text": "Me"}]]},
        "t2": {"turns": [[{"text": "Next"}]]},
    }
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    found = [r["prompt"] for r in parse("key", tmp_path / "talks.json", "*.turns.*")]
    assert found == ["Hello who is it?", "Me", "Next"]


def test_functions_of_the_standard_library_have_description_and_stub() -> None:
    config = SourceConfig(kind=SourceKind.stdlib, path="functions")
    records = {r["qualified_name"]: r for _, r in read_records("key", config, seed=0)}
    assert len(records) > 1500
    assert records["heapq.heappush"]["signature"] == "(heap, item)"
    namespace: dict[str, Any] = {}
    exec(records["statistics.median"]["stub"], namespace)  # a stub is a valid program
    assert "median" in namespace["median"].__doc__
    assert len({r["description"] for r in records.values()}) == len(records)


def test_the_manual_has_paragraphs() -> None:
    config = SourceConfig(kind=SourceKind.stdlib, path="manual", template="{text}")
    assert len(texts(config)) > 100


def test_generators_take_turns_and_do_not_end() -> None:
    pytest.importorskip("reasoning_gym")
    config = SourceConfig(
        kind=SourceKind.reasoning, path="gcd, lcm", package="reasoning-gym", template="{problem}"
    )
    first = [r["generator"] for _, r in itertools.islice(read_records("key", config, seed=1), 4)]
    assert first == ["gcd", "lcm", "gcd", "lcm"]
    assert not count_known(config)
    drawn = [
        [c.content for c in itertools.islice(Source("s", "key", config, seed), 5)]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_hub_dataset_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = {}

    def load(path: str, name: str | None, **options: Any) -> Any:
        asked.update(path=path, name=name, **options)
        return datasets.IterableDataset.from_generator(lambda: iter(ROWS))

    monkeypatch.setattr(datasets, "load_dataset", load)
    config = SourceConfig(
        kind=SourceKind.hub, path="o/d", split="test", revision="v1", template="{question}"
    )
    assert sorted(texts(config)) == [f"what is {n}" for n in range(6)]
    expected = {"path": "o/d", "name": None, "split": "test", "revision": "v1", "streaming": True}
    assert asked == expected
    config.start, config.stop = 2, 4
    assert texts(config) == ["what is 2", "what is 3"]


# ---------------------------------------------------------------- records to prompts


def test_start_stop_and_the_seed(tmp_path: Path) -> None:
    config = SourceConfig(path=jsonl(tmp_path / "r.jsonl", ROWS), template="{question}")
    config.start, config.stop = 1, 3
    assert texts(config) == ["what is 1", "what is 2"]
    config.start, config.stop = 0, -1
    orders = [[c.prompt.id for c in Source("s", "key", config, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_held_out_records_are_left_out(tmp_path: Path) -> None:
    held_out = jsonl(tmp_path / "test.jsonl", ROWS[:2])
    config = SourceConfig(
        path=jsonl(tmp_path / "all.jsonl", ROWS),
        template="{question}",
        exclude={held_out: "question"},
    )
    assert texts(config) == [f"what is {n}" for n in range(2, 6)]
    before = digest("data.sources.s", config)
    jsonl(tmp_path / "test.jsonl", ROWS[:3])
    assert digest("data.sources.s", config) != before


def test_match_filters_and_names_columns(tmp_path: Path) -> None:
    config = SourceConfig(
        path=jsonl(tmp_path / "r.jsonl", ROWS),
        template="Tell me of {title}: {text}",
        match={"passage": r"^(?P<title>Title [024]) -- (?P<text>.*)"},
    )
    assert texts(config) == [f"Tell me of Title {n}: about {n}" for n in (0, 2, 4)]


def test_several_records_make_one_prompt_and_a_rest_is_dropped(tmp_path: Path) -> None:
    config = SourceConfig(
        path=jsonl(tmp_path / "r.jsonl", ROWS[:5]), template="Translate:\n{question}", group=2
    )
    found = texts(config)
    assert len(found) == 2
    assert all(len(text.split("\n")) == 3 for text in found)


def test_each_record_takes_one_of_the_templates_and_keeps_it(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {n}"} for n in range(40)]
    config = SourceConfig(
        path=jsonl(tmp_path / "r.jsonl", rows), templates=["A {prompt}", "B {prompt}"]
    )
    assert texts(config, seed=0) == texts(config, seed=5)
    assert {text[0] for text in texts(config)} == {"A", "B"}


def test_conversations_end_with_the_user(tmp_path: Path) -> None:
    rows = [
        {"m": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"m": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}] * 2},
        {"m": ["first turn", "second turn"]},
    ]
    config = SourceConfig(
        path=jsonl(tmp_path / "r.jsonl", rows), messages_column="m", turns=Turns.last
    )
    found = {c.prompt.id: c.prompt.messages for c in Source("s", "key", config, 0)}
    assert found["s-0"] == [{"role": "user", "content": "a"}]
    assert [m["role"] for m in found["s-1"]] == ["user", "assistant", "user"]
    assert found["s-2"] == [{"role": "user", "content": "first turn"}]


def test_every_turn_of_a_conversation_waits_for_the_answer_before(tmp_path: Path) -> None:
    """What assistants say in it is left out; what system turns say belongs to the next user's."""
    rows = [
        {"m": [{"role": r, "content": f"{r}{n}"} for n, r in enumerate(roles)]}
        for roles in (
            ["system", "user", "assistant", "system", "user", "user", "assistant", "system"],
            ["user", "assistant"],
            ["assistant", "system"],
        )
    ]
    rows.append({"m": ["first turn", "second turn"]})
    config = SourceConfig(path=jsonl(tmp_path / "r.jsonl", rows), messages_column="m")
    found = {
        c.prompt.id: [
            [m["content"] for m in turn] for turn in (c.prompt.messages, *c.prompt.follow_ups)
        ]
        for c in Source("s", "key", config, 0)
    }
    assert found["s-0"] == [["system0", "user1"], ["system3", "user4"], ["user5"]]
    assert found["s-1"] == [["user0"]]
    assert found["s-2"] == [[]]  # dropped as empty
    assert found["s-3"] == [["first turn"], ["second turn"]]
    config.turns = Turns.last
    asked = {c.prompt.id: c.prompt.follow_ups for c in Source("s", "key", config, 0)}
    assert set(map(len, asked.values())) == {0}


# ---------------------------------------------------------------- what is wrong

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing column": ({"template": "{answer}"}, "answer: the records have no .*passage, question"),
    "missing messages": ({"messages_column": "chat"}, "chat: the records have .*passage, question"),
    "not turns": ({"messages_column": "question"}, "holds str, not a list of turns"),
    "missing matched column": ({"match": {"title": "x"}}, "title: the records have no such"),
    "broken template": ({"template": "{question"}, "not a format string"),
    "template of no column": ({"template": "{}"}, "names no column"),
    "missing file": ({"path": "prompt_box/other.jsonl"}, "prompt-box ships no such file"),
    "missing package": ({"package": "no-such-package"}, "it is not installed.*pip install no-such"),
    "empty range": ({"start": 10}, "records 10 to -1 holds no record"),
    "missing held-out column": (
        {"exclude": {"prompt_box/rows.jsonl": "idx"}},
        "idx: the records have no such column",
    ),
    "no such generator": (
        {"kind": SourceKind.reasoning, "package": "reasoning-gym", "path": "gcd,gdc"},
        "reasoning-gym has no generator gdc",
    ),
    "no such documentation": ({"kind": SourceKind.stdlib}, "Use one of functions, manual"),
}  # fmt: skip


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("what", BAD)
def test_a_bad_source_is_one_sentence(what: str) -> None:
    values, sentence = BAD[what]
    if values.get("kind") is SourceKind.reasoning:
        pytest.importorskip("reasoning_gym")
    config = packaged()
    for key, value in values.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError, match=sentence) as raised:
        list(Source("s", "data.sources.s", config, 0))
    assert str(raised.value).startswith("data.sources.s")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', r"a.jsonl: line 2 is no JSON"),
        ("a.json", b'[\n{"prompt": "x"},\n]', r"a.json: line 3 is no JSON"),
        (
            "a.jsonl",
            b"3\n",
            "a record is int '3', where an object with columns or a text is needed",
        ),
        ("a.txt", b"\xff\xfe\x00", "cannot be read as UTF-8 text"),
        ("a.txt.gz", b"plain", "cannot be read as UTF-8 text"),
        ("a.txt", b"\n", "holds no record"),
        ("a.parquet", b"x", "it cannot be read as Parquet"),
        ("a.md", b"x", "the format is unknown. Use a .jsonl"),
    ],
)
def test_a_broken_file_is_one_sentence(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    config = SourceConfig(path=str(tmp_path / name))
    with pytest.raises(ConfigError, match=sentence):
        list(Source("s", "data.sources.s", config, 0))


def test_a_missing_path_inside_a_document_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rows": [], "info": 1}')
    config = SourceConfig(path=str(tmp_path / "a.json"), records="data.*")
    with pytest.raises(ConfigError, match=r"records=data: .*info, rows"):
        list(Source("s", "data.sources.s", config, 0))


def test_a_hub_dataset_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("Dataset 'o/d' doesn't exist on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    config = SourceConfig(kind=SourceKind.hub, path="o/d")
    with pytest.raises(ConfigError, match="'o/d': the Hub dataset cannot be read .*doesn't exist"):
        list(Source("s", "data.sources.s", config, 0))


def test_impossible_values_are_refused_with_the_type() -> None:
    for values in ({"group": 0}, {"max_words": -1}, {"start": -5}, {"match": {"x": "("}}):
        with pytest.raises(ConfigError):
            SourceConfig(**values)  # type: ignore[arg-type]
