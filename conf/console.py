"""How a run looks to the person who watches it, in a terminal or in a log file."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from numbers import Integral, Real

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

PIPED_WIDTH = 120  # columns of a table in a log file, where there is no window to ask
SECONDS_BETWEEN_LINES = 15.0  # of progress in a log file

Value = float | int | str | None


def settle_libraries() -> None:
    """Keep libraries' chatter out of a command's own report, errors still show, and their caches
    small.

    Call it before they are imported. What the environment says already stands.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # oneDNN and torch keep code and buffers for every shape of a bfloat16 product, 1024 of them by
    # default, and packs of answers come in hundreds of lengths: megabytes for each, for nothing
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "4")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers|torch|accelerate")


def text_of(value: Value) -> str:
    """A value for people: four significant digits, no exponent between 1e-4 and 1e7."""
    if value is None:
        return "-"
    if isinstance(value, Integral | str) or not isinstance(value, Real):
        return str(value)
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    return f"{number:.0f}" if 1e4 <= abs(number) < 1e7 else f"{number:#.4g}".rstrip(".")


class Bar:
    """Progress of one long step; this one, of a process that writes nothing, shows nothing."""

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""

    def describe(self, text: str) -> None:
        """Show `text`, for example the current loss, beside the title."""


class Screen:
    """Standard error: lines, tables and bars that do not garble one another."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        # FORCE_COLOR makes rich call a log file a terminal; bars redrawn in a file are no help
        self.terminal = self.console.file.isatty() and not self.console.is_dumb_terminal
        if console is None and not self.terminal:
            self.console.width = PIPED_WIDTH
        self._bars: Progress | None = None

    def say(self, text: str) -> None:
        """One line, as long as it is."""
        self.console.print(Text(text), soft_wrap=True)

    def values(self, name: str, values: Mapping[str, Value]) -> None:
        """One line of aligned `key value` pairs."""
        line = Text(f"{name:<20}", style="dim")
        for key, value in values.items():
            line.append(f" {key} ", "not dim cyan").append(f"{text_of(value):<9}", "not dim")
        line.rstrip()
        self.console.print(line, soft_wrap=True)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> None:
        table = Table(title=Text(name), title_style="dim", title_justify="left")
        for position, column in enumerate(columns):
            numeric = all(isinstance(row[position], Real | None) for row in rows)
            table.add_column(Text(column), justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(Text(text_of(value)) for value in row))
        self.console.print(table)

    @contextlib.contextmanager
    def progress(self, title: str, total: int, unit: str) -> Iterator[Bar]:
        """A bar with rate and time left on a terminal, now and then a line with them elsewhere."""
        if not self.terminal:
            yield PlainBar(title, total, unit, self.say)
            return
        bars, outermost = self._bars, self._bars is None
        if bars is None:
            title_column = TextColumn("{task.description}", markup=False)
            # two refreshes a second: drawing must not take time from the step it measures
            bars = Progress(
                title_column, BarColumn(20), Figures(), console=self.console, refresh_per_second=2
            )
            self._bars = bars
            bars.start()
        task = bars.add_task(title, total=total, unit=unit)
        try:
            yield TerminalBar(bars, task, title)
        finally:
            if outermost:
                bars.stop()
                self._bars = None
            else:
                bars.remove_task(task)


class PlainBar(Bar):
    """Progress in a log: at most a line every SECONDS_BETWEEN_LINES."""

    def __init__(self, title: str, total: int, unit: str, say: Callable[[str], None]) -> None:
        self._title, self._total, self._unit, self._say = title, total, unit, say
        self._done, self._text = 0, ""
        self._start = self._spoke = time.monotonic()

    def advance(self, n: int = 1) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._spoke >= SECONDS_BETWEEN_LINES:
            self._spoke = now
            rate = self._done / (now - self._start)
            text = f"  {self._text}" if self._text else ""
            self._say(f"{self._title}: {figures(self._done, self._total, self._unit, rate)}{text}")

    def describe(self, text: str) -> None:
        self._text = text


class TerminalBar(Bar):
    """Progress as a rich bar."""

    def __init__(self, bars: Progress, task: TaskID, title: str) -> None:
        self._bars, self._task, self._title = bars, task, title

    def advance(self, n: int = 1) -> None:
        self._bars.advance(self._task, n)

    def describe(self, text: str) -> None:
        self._bars.update(self._task, description=f"{self._title}  {text}")


class Figures(ProgressColumn):
    """The same figures beside a rich bar, by the rate of its last 30 seconds."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        done, total = int(task.completed), int(task.total or 0)
        return Text(figures(done, total, task.fields["unit"], task.finished_speed or task.speed))


def figures(done: int, total: int, unit: str, rate: float | None) -> str:
    """Share, count, rate and time left; `rate` in units a second, None while it is unknown."""
    count = (
        f"{done}/{total} {unit}" if total <= 0 else f"{done / total:.0%} ({done}/{total} {unit})"
    )
    if not rate:
        return count
    left = timedelta(seconds=round(max(total - done, 0) / rate))
    return f"{count}, {text_of(rate)} {unit}/s, {left} left"
