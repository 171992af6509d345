"""`python -m eval`: the chat's text is the target's, its pieces are whole characters, and every way
out of it is a clean one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from conf.choices import Dtype
from conf.groups import TargetConfig
from conf.schema import as_tree
from data.chat import render_prompt
from eval import chat as chat_module
from eval.__main__ import main
from eval.chat import STYLES, Chat, ChatSettings, converse, load_pair, run_chat
from eval.pair import Pieces
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import CombinedDrafter
from models.decoding.rows import Round
from tests.reports import example_report
from tests.tiny import tiny_lessons, tiny_model, tiny_report, tiny_tokenizer, write_tiny_run

QUESTION = "Why is the house red?"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: main, whose report recommends gamma 2."""
    folder = tmp_path_factory.mktemp("outputs")
    tiny_model(num_layers=3, seed=1).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    run = write_tiny_run(folder / "main")
    target = TargetConfig(path=str(folder / "target"), dtype=Dtype.float32)
    tiny_lessons(determined_by={"target": as_tree(target)}).write(run.lessons)
    return folder


def settings(**changes: Any) -> ChatSettings:
    values = {"gamma": 2, "temperature": 0.0, "max_new_tokens": 24, "context": 256, **changes}
    return ChatSettings(**values, compiled=False)  # type: ignore[arg-type]


def opened(outputs: Path, **changes: Any) -> tuple[Chat, io.StringIO, io.StringIO]:
    out, notes = io.StringIO(), io.StringIO()
    wide = {"force_terminal": True, "width": 300, "highlight": False, "color_system": "standard"}
    pair, system_prompt = load_pair(outputs / "main", settings(**changes))
    consoles = Console(file=out, **wide), Console(file=notes, **wide)  # type: ignore[arg-type]
    return Chat(pair, settings(**changes), system_prompt, *consoles), out, notes


def alone(question: str) -> str:
    """What the target answers without a draft, by transformers."""
    tokenizer, target = tiny_tokenizer(), tiny_model(num_layers=3, seed=1)
    prompt = render_prompt(tokenizer, [{"role": "user", "content": question}])
    ids = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0]
    return str(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Lines that a person types; an exception is raised as the keyboard would."""
    waiting: Iterator[str | type[BaseException]] = iter(lines)

    def read_line() -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(chat_module, "read_line", read_line)


# ---------------------------------------------------------------- pieces


def pieces_of(rounds: Sequence[Round], **options: bool) -> list[tuple[str, str]]:
    pieces = Pieces(tiny_tokenizer(), **options)
    found = [piece for step in rounds for piece in pieces.of_round(step)]
    return [(piece.text, piece.kind) for piece in [*found, *pieces.rest()]]


@given(st.lists(st.integers(0, 299), min_size=1, max_size=40), st.integers(0, 3))
def test_pieces_joined_are_the_text(tokens: list[int], gamma: int) -> None:
    width = gamma + 1
    parts = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    rounds = [Round(part, len(part) - 1, gamma, len(part) <= gamma) for part in parts]
    assert "".join(text for text, _ in pieces_of(rounds)) == tiny_tokenizer().decode(tokens)


@given(st.text(max_size=12))
def test_no_piece_cuts_a_character(text: str) -> None:
    tokens = tiny_tokenizer()(text, add_special_tokens=False).input_ids
    pieces = pieces_of([Round([token], 0, 1, True) for token in tokens])
    assert "".join(piece for piece, _ in pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece, _ in pieces)


def test_a_piece_has_the_kind_of_the_token_that_completed_it() -> None:
    ids = tiny_tokenizer()("a東b", add_special_tokens=False).input_ids
    assert len(ids) == 5  # a character of three bytes, one token each
    rounds = [
        Round(ids[:3], 2, 2, False),
        Round(ids[3:4], 0, 2, True),
        Round(ids[4:], 1, 2, True),
    ]
    assert pieces_of(rounds) == [("a", "draft"), ("東", "correction"), ("b", "draft")]
    assert pieces_of([Round(ids[:3], 2, 2, False)]) == [("a", "draft"), ("\ufffd", "bonus")]


# ---------------------------------------------------------------- chat


def test_the_answer_is_the_targets(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_chat(outputs / "main", settings(), once=QUESTION)
    shown = capsys.readouterr()
    assert shown.out == alone(QUESTION).translate(chat_module.HARMLESS) + "\n"
    assert "acceptance_rate 0." in shown.err
    assert "acceptance_length " in shown.err
    assert " tokens/s" in shown.err
    assert "drafting 2, temperature 0" in shown.err


def test_kinds_of_tokens_have_the_colours_of_the_legend(outputs: Path) -> None:
    chat, out, notes = opened(outputs, temperature=1.5, max_new_tokens=60)
    chat.legend()
    chat.ask(QUESTION)
    for style in STYLES.values():
        begins = Style.parse(style).render("x", color_system=ColorSystem.STANDARD).partition("x")[0]
        assert begins in notes.getvalue()
        assert begins in out.getvalue()


def test_a_conversation_goes_on_until_reset(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _, notes = opened(outputs)
    typed(monkeypatch, QUESTION, "", "And why?", "/nonsense", "/reset", QUESTION, "/quit", "never")
    converse(chat)
    assert [turn["role"] for turn in chat.history] == ["user", "assistant"]
    assert chat.history[1]["content"] == alone(QUESTION)
    assert "no command /nonsense" in notes.getvalue()
    assert notes.getvalue().count("so far: ") == 2
    assert chat.counts.num_tokens > 24


def test_the_history_is_part_of_the_prompt(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _, _ = opened(outputs)
    seen: list[int] = []
    stream = chat._stream
    monkeypatch.setattr(chat, "_stream", lambda p, c: seen.append(len(p)) or stream(p, c))
    chat.ask(QUESTION)
    chat.ask(QUESTION)
    assert seen[1] > seen[0] + 24


def test_what_does_not_fit_is_forgotten_or_refused(outputs: Path) -> None:
    chat, out, notes = opened(outputs, context=128)
    for _ in range(4):
        chat.ask(QUESTION)
    assert "fit: forgotten" in notes.getvalue()
    assert chat.history[0]["role"] == "user"
    assert len(chat.history) < 8
    before, said = list(chat.history), out.getvalue()
    chat.ask("far too long " * 40)
    assert "fit beside an answer of 24 in a context of 128" in notes.getvalue()
    assert (chat.history, out.getvalue()) == (before, said)


def test_bytes_that_command_a_terminal_are_not_passed_on() -> None:
    assert (
        "\x1b[2Jhi\r\n\t\x07é東".translate(chat_module.HARMLESS) == "\ufffd[2Jhi\ufffd\n\t\ufffdé東"
    )


@pytest.mark.parametrize("way_out", [EOFError, KeyboardInterrupt])
def test_ctrl_d_and_ctrl_c_leave_cleanly(
    outputs: Path,
    way_out: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed(monkeypatch, QUESTION, way_out)
    run_chat(outputs / "main", settings())
    assert capsys.readouterr().err.endswith("tokens/s\n\n")


# ---------------------------------------------------------------- command


def test_the_command_takes_the_gamma_of_the_report(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--once", QUESTION, "--no-compile", "--max-new-tokens", "4", "--context", "256"]
    assert main(["chat", "--outputs", str(outputs), *options]) == 0
    assert f"drafting {tiny_report().best.gamma}, temperature 0.7" in capsys.readouterr().err
    assert main(["chat", "--outputs", str(outputs), *options, "--gamma", "0"]) == 0
    assert "acceptance_length 1.00" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--run", "other"]])
def test_without_a_draft_it_says_what_makes_one(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--outputs", str(tmp_path), *options]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("error: there is no draft in ")
    assert "`make smoke`" in shown.err


@pytest.mark.parametrize(
    "options",
    [["--gamma", "-1"], ["--gamma", "1.5"], ["--temperature", "nan"], ["--temperature", "-1"]],
)
def test_a_bad_number_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["chat", *options])
    assert left.value.code == 2
    assert f"argument {options[0]}: {options[1]}: use " in capsys.readouterr().err


def test_an_empty_stop_string_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["chat", "--stop", ""])
    assert left.value.code == 2
    assert "argument --stop: it is empty" in capsys.readouterr().err


def test_a_stop_string_and_a_penalty_reach_the_decoder(outputs: Path) -> None:
    whole = alone(QUESTION)
    chat, _, _ = opened(outputs, stop=(whole[3:6],))
    chat.ask(QUESTION)
    short = chat.history[-1]["content"]
    assert whole.startswith(short) and whole[3:6] in short and len(short) < len(whole)
    chat, _, _ = opened(outputs, repetition_penalty=1.8)
    chat.ask(QUESTION)
    assert chat.history[-1]["content"] != whole


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(said in shown for said in ("chat", "bench", "--once", "stage=evaluate"))


def test_with_lookup_the_answer_is_the_same(outputs: Path) -> None:
    for lookup, gamma, kind in (
        (0, 2, ModelDrafter),
        (6, 2, CombinedDrafter),
        (6, 0, ModelDrafter),
    ):
        chat, _, _ = opened(outputs, lookup=lookup, gamma=gamma)
        chat.ask("Hello Hello Hello")
        assert chat.history[-1]["content"] == alone("Hello Hello Hello")
        assert type(chat._decoder.drafter) is kind
        assert (chat.counts.num_draft_steps == 0) is (gamma == 0)


def test_bench_fails_when_a_benchmark_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--only", "e2e", "--outputs", str(tmp_path)]) == 1
    assert "failed" in capsys.readouterr().out
    example_report().write(tmp_path / "main" / "report")
    assert main(["bench", "--only", "e2e", "--outputs", str(tmp_path)]) == 0
    assert "e2e.speedup" in capsys.readouterr().out
    assert (tmp_path / "bench" / "bench.json").is_file()
