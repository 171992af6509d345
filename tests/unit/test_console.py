"""How a run looks: progress on a terminal and in a log, values for people."""

from __future__ import annotations

import io
import math
import os
import time

import pytest
from rich.console import Console

from conf.console import Screen, settle_libraries, text_of


def test_progress_in_a_log_says_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 16.0, 20.0, 40.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    console = io.StringIO()
    screen = Screen(Console(file=console, width=200))
    with screen.progress("generate", 200, "answers") as bar:
        bar.describe("400 tokens/s")
        for _ in range(4):
            bar.advance(40)
    assert console.getvalue().splitlines() == [
        "generate: 40% (80/200 answers), 5.000 answers/s, 0:00:24 left  400 tokens/s",
        "generate: 80% (160/200 answers), 4.000 answers/s, 0:00:10 left  400 tokens/s",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_nested_and_not_garbled_by_events() -> None:
    file = Terminal()
    screen = Screen(Console(file=file, width=120, force_terminal=True, _environ={"TERM": "xterm"}))
    for title in ("first", "second"):
        with (
            screen.progress(title, 2, "steps") as outer,
            screen.progress("inner", 4, "rows") as inner,
        ):
            inner.advance(4)
            outer.describe("loss 1.5")
            screen.values("distill/train", {"step": 1, "loss": 1.5})
            outer.advance(1)
            time.sleep(0.01)  # a rate needs two moments
            outer.advance(1)
    text = file.getvalue()
    assert all(part in text for part in ("first  loss 1.5", "second", "inner", "2/2 steps"))
    assert "2/2 steps), " in text and " steps/s, 0:00:00 left" in text
    # the bar is erased before an event is printed and drawn again below it
    assert text.count("distill/train") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"),
        (1234.5678, "1235"),
        (431234.9, "431235"),
        (2.5e9, "2.500e+09"),
        (0.00001234, "1.234e-05"),
        (49152, "49152"),
        (-math.inf, "-inf"),
        (None, "-"),
        ("cpu", "cpu"),
        (True, "True"),
    ],
)
def test_values_are_written_for_people(value: float | str | None, text: str) -> None:
    assert text_of(value) == text


def test_caches_of_libraries_are_small_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"LRU_CACHE_CAPACITY": "99"})
    settle_libraries()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "16"
    assert os.environ["LRU_CACHE_CAPACITY"] == "99"
