"""Plots, tables and files of a report: they show what the report holds, whatever it lacks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from conf.contracts import MANIFEST, Report
from eval.plots import (
    PLOTS,
    STYLE,
    render_plots,
    speedup_by_gamma,
    tokens_per_target_call,
    where_time_goes,
)
from eval.report import write_report
from eval.table import COLUMNS, acceptance_interval, reproduce_command, summary_table
from tests.reports import SPARSE, example_report, example_result


def test_files_are_written_and_report_json_is_the_manifest(tmp_path: Path) -> None:
    report = example_report()
    images = write_report(report, tmp_path)
    assert [path.name for path in images.values()] == [f"{draw.__name__}.png" for draw in PLOTS]
    for path in images.values():
        assert path.parent == tmp_path / "plots"
        assert path.read_bytes().startswith(b"\x89PNG")
    report.write(tmp_path)
    assert (tmp_path / "report.json").read_bytes() == (tmp_path / MANIFEST).read_bytes()
    assert Report.read(tmp_path) == report
    assert "<html" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())
def test_sparse_reports_give_the_plots_they_have_data_for(
    make: Callable[[], Report], tmp_path: Path
) -> None:
    report = make()
    images = write_report(report, tmp_path)
    drawn = {draw.__name__ for draw in PLOTS if draw(report) is not None}
    assert set(images) == drawn
    assert ("training_curve" in drawn) == bool(report.training_curve)
    headers, rows = summary_table(report)
    assert all(len(row) == len(headers) for row in rows)


def test_the_same_report_gives_the_same_pictures() -> None:
    assert render_plots(example_report()) == render_plots(example_report())


def _texts(figure: Figure) -> str:
    return " ".join(text.get_text() for legend in figure.legends for text in legend.get_texts())


def test_speedup_plot_shows_measured_predicted_and_best() -> None:
    report = example_report()
    figure = speedup_by_gamma(report)
    assert figure is not None
    (axes,) = figure.axes
    drawn = {round(y, 9) for line in axes.lines for y in np.asarray(line.get_ydata()).tolist()}
    pooled = [row for row in report.results if row.category == "all"]
    assert {round(row.speedup.median, 9) for row in pooled} <= drawn
    assert {round(row.predicted_speedup, 9) for row in pooled} <= drawn
    (ring,) = [line for line in axes.lines if line.get_markersize() == 15]
    assert ring.get_ydata()[0] == report.best.speedup.median  # type: ignore[index]
    assert f"best: {report.best.speedup.median:.2f}×" in _texts(figure)
    assert "90% interval" in _texts(figure)


def test_time_bars_have_the_ratio_of_the_speedup() -> None:
    report = example_report()
    figure = where_time_goes(report)
    assert figure is not None
    *parts, plain = [bar.get_width() for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert plain / sum(parts) == pytest.approx(report.best.speedup.median)
    assert parts[0] == pytest.approx(report.best.gamma * report.cost.c)


def test_time_bars_count_what_was_really_drafted() -> None:
    """Half of the drafts ended after one token of two."""
    report = example_report()
    best = dataclasses.replace(
        example_result("all", 0.0, 2), num_draft_steps=1800, target_call_widths=[0, 600, 600]
    )
    figure = where_time_goes(dataclasses.replace(report, best=best))
    assert figure is not None
    drafting, verifying, *_ = (
        bar.get_width()  # type: ignore[attr-defined]
        for bar in figure.axes[0].patches
    )
    assert drafting == pytest.approx(1.5 * report.cost.c)
    assert verifying == pytest.approx((report.cost.v["2"] + report.cost.v["3"]) / 2)


def test_histogram_bars_are_shares_of_the_target_calls() -> None:
    report = example_report()
    figure = tokens_per_target_call(report)
    assert figure is not None
    heights = [bar.get_height() for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
    calls = report.best.num_target_calls
    assert heights == [100 * n / calls for n in report.best.acceptance_length_histogram]


def test_texts_of_a_plot_do_not_overlap() -> None:
    for draw in PLOTS:
        with matplotlib.rc_context(STYLE):
            figure = draw(example_report())
            assert figure is not None
            figure.draw_without_rendering()
        boxes = [legend.get_window_extent() for legend in figure.legends]
        for axes in figure.axes:
            left, right = axes.get_xlim()
            # matplotlib keeps the labels of ticks just outside the limits, and does not draw them
            ticks = [t for t in axes.get_xticklabels() if left <= t.get_position()[0] <= right]
            for text in (axes.xaxis.label, axes.yaxis.label, axes.title, *axes.texts, *ticks):
                boxes.append(text.get_window_extent())
        boxes = [box for box in boxes if box.width > 0]
        for i, first in enumerate(boxes):
            for second in boxes[i + 1 :]:
                assert not first.overlaps(second), f"{draw.__name__}: {first} and {second}"


def test_summary_stars_the_recommended_row_only() -> None:
    report = example_report()
    headers, rows = summary_table(report)
    starred = [row for row in rows if "*" in row[0]]
    assert len(starred) == 1
    shown = dict(zip(headers, starred[0], strict=True))
    assert shown["gamma"] == str(report.best.gamma)
    assert shown["speedup"] == f"{report.best.speedup.median:.2f}×"
    assert shown["identical"] == "22/24"
    rates = report.best.tokens_per_second
    assert shown["tokens/s"] == f"{rates.autoregressive:.1f} → {rates.speculative:.1f}"
    num_pooled = 2 * 4
    num_by_category = 6 * 2  # categories and temperatures, at the best draft length only
    with_lookup = [cells[0] for cells in rows if "lookup" in cells[0]]
    assert with_lookup == ["all, with lookup"] * 2  # greedy and sampled
    assert len(rows) == num_pooled + len(with_lookup) + num_by_category


def test_every_column_names_a_field_of_the_report() -> None:
    tree = json.loads(json.dumps(dataclasses.asdict(example_result("all", 0.0, 2))))
    for column in COLUMNS:
        for name in column.name.split(", "):
            value = tree
            for key in name.split("."):
                value = value[key]


@pytest.mark.parametrize(
    ("accepted", "tested", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (0, 0, 0.0, 1.0)],
)
def test_acceptance_interval_is_wilsons(
    accepted: int, tested: int, low: float, high: float
) -> None:
    row = dataclasses.replace(
        example_result("all", 0.0, 2), num_accepted=accepted, num_tested=tested
    )
    assert acceptance_interval(row, 0.95) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("python -m train", "make distill"),
        ("python -m train stage=evaluate", "make distill"),
        (
            "python -m train experiment=smoke name=x",
            'make distill ARGS="experiment=smoke name=x"',
        ),
        ("pytest tests", "pytest tests"),
    ],
)
def test_the_command_that_reproduces_a_run(typed: str, command: str) -> None:
    report = example_report()
    made = dataclasses.replace(report.provenance, command=typed)
    assert reproduce_command(dataclasses.replace(report, provenance=made)) == command
