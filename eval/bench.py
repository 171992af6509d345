"""`make bench`: every figure this project promises, as rows of one file.

A benchmark is a function (run folder, outputs folder) -> rows. It is run in the order of the
registry; one that fails says so in a row of its own and the others are kept.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from conf.contracts import Report
from conf.run import write_atomically
from eval.table import pooled, reproduce_command

log = logging.getLogger(__name__)

LOG_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. A failed benchmark has no value and an `error`.

    `to_reach` is a comparison such as ">= 1.25", or empty when the figure only informs.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str
    to_reach: str = ""
    command: str
    error: str = ""

    def __post_init__(self) -> None:
        sign, _, limit = self.to_reach.partition(" ")
        if self.to_reach:
            float(limit)
            assert sign in (">=", "<="), f"{self.name}: to_reach={self.to_reach!r} is no comparison"

    @property
    def reached(self) -> bool | None:
        """Whether the value meets `to_reach`; None when there is nothing to meet."""
        if not self.to_reach:
            return None
        sign, _, limit = self.to_reach.partition(" ")
        if self.value is None:
            return False
        return self.value >= float(limit) if sign == ">=" else self.value <= float(limit)

    def as_json(self) -> dict[str, Any]:
        """The row of bench.json; `error` is there only when the benchmark failed."""
        tree = dataclasses.asdict(self)
        return tree if self.error else {key: tree[key] for key in tree if key != "error"}


Benchmark = Callable[[Path, Path], Iterable[Row]]


def end_to_end(folder: Path, _outputs: Path) -> list[Row]:
    """What the last run in `folder` reached; raises ContractError when it has no report."""
    report = Report.read(folder / "report")
    command = reproduce_command(report)
    speedup, acceptance = report.best.speedup, report.expected_acceptance.after
    return [
        Row(
            name="e2e.minutes",
            value=sum(report.seconds_by_stage.values()) / 60,
            unit="min",
            to_reach="<= 25",
            command=command,
        ),
        Row(
            name="e2e.speedup",
            value=speedup.median,
            low=speedup.low,
            high=speedup.high,
            unit="x",
            to_reach=">= 1.25",
            command=command,
        ),
        *(
            Row(
                name="e2e.speedup_with_lookup",
                value=row.speedup.median,
                low=row.speedup.low,
                high=row.speedup.high,
                unit="x",
                to_reach=">= 1.25",
                command=command,
            )
            for row in pooled(report.with_lookup)
            if row.temperature == report.best.temperature
        ),
        Row(
            name="e2e.expected_acceptance",
            value=acceptance.value,
            low=acceptance.low,
            high=acceptance.high,
            unit="probability",
            to_reach=">= 0.42",
            command=command,
        ),
        Row(
            name="e2e.peak_memory_gib",
            value=report.peak_memory_gib,
            unit="GiB",
            to_reach="<= 8",
            command=command,
        ),
    ]


# Name (the prefix of its rows) -> benchmark, in the order they run; those that load models are
# added by the caller of `bench`.
BENCHMARKS: dict[str, Benchmark] = {"e2e": end_to_end}


def bench(
    folder: Path,
    outputs: Path,
    *,
    benchmarks: Mapping[str, Benchmark] = BENCHMARKS,
    console: Console | None = None,
) -> list[Row]:
    """Run the benchmarks on the run in `folder`, write outputs/bench/bench.json, show its rows."""
    rows: list[Row] = []
    for name, benchmark in benchmarks.items():
        try:
            rows += benchmark(folder, outputs)
        except (
            Exception
        ) as failed:  # whatever one benchmark dies of, the figures of the others stand
            log.debug("benchmark %s failed", name, exc_info=True)
            error = f"{type(failed).__name__}: {failed}"
            rows.append(Row(name=name, value=None, unit="", command="make bench", error=error))
    content = json.dumps([row.as_json() for row in rows], indent=1, ensure_ascii=False) + "\n"
    write_atomically(outputs / "bench" / "bench.json", content)
    # a log has no width that a table would have to fit
    width = None if sys.stdout.isatty() else LOG_WIDTH
    (console or Console(width=width)).print(bench_table(rows))
    return rows


def bench_table(rows: Iterable[Row]) -> Table:
    """The rows for the terminal, a failed one with its error in place of a value."""
    name = Column("name", no_wrap=True)
    table = Table(name, "value", "interval", "unit", "to reach", "", "command")
    for row in rows:
        interval = "" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        value = f"failed: {row.error}" if row.value is None else f"{row.value:.3f}"
        mark = {True: "reached", False: "missed", None: ""}[row.reached]
        # as plain text: an error may hold brackets, which rich would take for markup
        cells = (row.name, value, interval, row.unit, row.to_reach, mark, row.command)
        table.add_row(*map(Text, cells))
    return table
