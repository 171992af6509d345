"""`make bench`: every figure this project promises, as rows of one file.

A benchmark is a function (run folder, outputs folder) -> rows. It is run in the order of the
registry; one that fails says so in a row of its own and the others are kept.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from conf.bench import DISTILL_ROWS, Row, read_rows, write_rows
from conf.contracts import Report
from conf.errors import UserError
from eval.table import pooled, reproduce_command

log = logging.getLogger(__name__)

LOG_WIDTH = 160


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


def distill(_folder: Path, outputs: Path) -> list[Row]:
    """What `python -m train.bench` measured; raises UserError when it has not run."""
    path = outputs / DISTILL_ROWS
    if not path.is_file():
        raise UserError(f"{path} is not there: `python -m train.bench` makes it, in 10 minutes.")
    return read_rows(path)


# Name (the prefix of its rows) -> benchmark, in the order they run; those that load models, and
# those that another command measured, are added by the caller of `bench`.
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
    write_rows(outputs / "bench" / "bench.json", rows)
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
