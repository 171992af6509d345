"""`make bench`: the figures of the last run, and what happens when a benchmark fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from eval.bench import BENCHMARKS, Row, bench, end_to_end
from tests.reports import example_report

KEYS = ["name", "value", "low", "high", "unit", "to_reach", "command"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    example_report().write(tmp_path / "main" / "report")
    return tmp_path / "main"


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=200, quiet=True)


def test_rows_of_the_last_run(run: Path, tmp_path: Path, console: Console) -> None:
    report = example_report()
    beside = report.with_lookup[0]  # greedy, all prompts
    rows = bench(run, tmp_path, console=console)
    stored = json.loads((tmp_path / "bench" / "bench.json").read_text(encoding="utf-8"))
    assert [list(row) for row in stored] == [KEYS] * 5
    assert {row["name"]: (row["value"], row["low"], row["high"]) for row in stored} == {
        "e2e.minutes": (pytest.approx((31 + 520 + 448 + 243) / 60), None, None),
        "e2e.speedup": tuple(dataclasses.astuple(report.best.speedup)),
        "e2e.speedup_with_lookup": tuple(dataclasses.astuple(beside.speedup)),
        "e2e.expected_acceptance": (0.431, 0.422, 0.440),
        "e2e.peak_memory_gib": (3.4, None, None),
    }
    assert [row.to_reach for row in rows] == ["<= 25", ">= 1.25", ">= 1.25", ">= 0.42", "<= 8"]
    assert all(row.reached for row in rows)
    assert {row.command for row in rows} == {"make distill"}


def test_a_run_with_overrides_is_not_passed_off_as_the_default_one(run: Path) -> None:
    report = example_report()
    typed = "python -m train draft.num_layers=4"
    made = dataclasses.replace(report.provenance, command=typed)
    dataclasses.replace(report, provenance=made).write(run / "report")
    commands = {row.command for row in end_to_end(run, run)}
    assert commands == {'make distill ARGS="draft.num_layers=4"'}


def _fails(_folder: Path, _outputs: Path) -> Iterator[Row]:
    yield Row(name="decode.batch", value=1.0, unit="x", command="make bench")
    raise RuntimeError("no [device] left")


def test_a_failed_benchmark_is_a_row_and_the_others_are_kept(
    run: Path, tmp_path: Path, console: Console
) -> None:
    rows = bench(run, tmp_path, benchmarks={"decode": _fails, **BENCHMARKS}, console=console)
    failed = [row for row in rows if row.error]
    assert [row.name for row in failed] == ["decode"]
    assert failed[0].value is None
    assert len(rows) == 2 + 5  # what it gave before it failed stands, too
    stored = json.loads((tmp_path / "bench" / "bench.json").read_text(encoding="utf-8"))
    assert stored[1]["error"] == "RuntimeError: no [device] left"
    console.quiet = False
    bench(run, tmp_path, benchmarks={"decode": _fails}, console=console)
    assert "failed: RuntimeError: no [device] left" in console.export_text()


def test_without_a_run_the_row_says_what_to_do(tmp_path: Path, console: Console) -> None:
    (row,) = bench(tmp_path / "main", tmp_path, console=console)
    assert row.name == "e2e"
    assert "manifest.json: not there. Run the stage" in row.error


@pytest.mark.parametrize(
    ("value", "to_reach", "reached"),
    [
        (1.25, ">= 1.25", True),
        (1.24, ">= 1.25", False),
        (8.1, "<= 8", False),
        (None, "<= 8", False),
        (3.0, "", None),
    ],
)
def test_reached(value: float | None, to_reach: str, reached: bool | None) -> None:
    row = Row(name="a.b", value=value, unit="", to_reach=to_reach, command="make bench")
    assert row.reached is reached
