"""Pictures of a Report, one for each question a reader asks.

Plots are pure functions Report -> Figure, or None where the report has nothing to show. They use
Figure objects directly: pyplot would keep global state and look for a display.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from conf.contracts import Report, Result
from eval.table import (
    ALL,
    acceptance_interval,
    by_category,
    confidence,
    interval_label,
    is_best,
    pooled,
    temperature_label,
    times,
)

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

# Okabe and Ito's palette, distinguishable with every common colour blindness; markers differ too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: pairs do not repeat
INK, FAINT = "#222222", "#767676"
STYLE: dict[RcKeyType, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 9.5,
    **{"axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left"},
    **{"axes.titlepad": 10, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.edgecolor": FAINT, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e6e6"},
    **{"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK},
    **{"legend.frameon": False, "savefig.dpi": 160},
}


def render_plots(report: Report) -> dict[str, bytes]:
    """PNG images by name; a plot without data is left out."""
    images = {}
    with matplotlib.rc_context(STYLE):
        for draw in PLOTS:
            figure = draw(report)
            if figure is not None:
                buffer = io.BytesIO()
                figure.savefig(buffer, format="png", metadata={"Software": None})
                images[draw.__name__] = buffer.getvalue()
    return images


def _figure(width: float = 7.2, height: float = 4.2) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _temperatures(rows: Sequence[Result]) -> list[float]:
    return sorted({row.temperature for row in rows})


def _look(report: Report, temperature: float) -> dict[str, Any]:
    """Colour and marker of a temperature, the same in every plot."""
    i = _temperatures(report.results).index(temperature)
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def _reach(value: float, low: float, high: float) -> list[list[float]]:
    """An interval as matplotlib wants it: how far it reaches below and above the value."""
    return [[max(value - low, 0.0)], [max(high - value, 0.0)]]


def _side_by_side(temperatures: Sequence[float], temperature: float, width: float) -> float:
    """Offset of a temperature's marks, so that intervals do not hide each other."""
    width = min(width, 0.8 / len(temperatures))
    return width * (temperatures.index(temperature) - (len(temperatures) - 1) / 2)


def _handle(label: str, **look: Any) -> Line2D:
    return Line2D([], [], label=label, **{"linestyle": "none", "color": FAINT, **look})


def _legend_below(figure: Figure, handles: Sequence[Line2D]) -> None:
    columns = len(handles) if len(handles) <= 4 else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8.5)


def _integers(axes: Axes, values: Sequence[int]) -> None:
    axes.set_xticks(sorted(set(values)))
    axes.set_xlim(min(values) - 0.5, max(values) + 0.5)


def _by_length(row: Result) -> tuple[bool, int]:
    return row.by_cost, row.gamma


def speedup_by_gamma(report: Report) -> Figure | None:
    """Measured and predicted speedup against draft length, all prompts, by temperature."""
    rows = pooled(report.results)
    if not rows:
        return None
    figure = _figure()
    axes = figure.subplots()
    temperatures = _temperatures(rows)
    handles = []
    ways = list(dict.fromkeys(row.drafting for row in sorted(rows, key=_by_length)))
    for temperature in temperatures:
        look = _look(report, temperature)
        shift = _side_by_side(temperatures, temperature, 0.14)
        own = sorted((row for row in rows if row.temperature == temperature), key=_by_length)
        places = [ways.index(row.drafting) + shift for row in own]
        fixed = [(x, r.speedup.median) for x, r in zip(places, own, strict=True) if not r.by_cost]
        axes.plot(*zip(*fixed, strict=True), color=look["color"], alpha=0.45)
        for x, row in zip(places, own, strict=True):
            y = row.speedup.median
            error = _reach(y, row.speedup.low, row.speedup.high)
            axes.errorbar(x, y, yerr=error, capsize=3, ms=6, **look)
            axes.plot(x, row.predicted_speedup, mfc="white", ms=6, zorder=2, **look)
            if is_best(report, row):
                axes.plot(x, y, "o", mfc="none", mec=INK, ms=15, mew=1.4)
        handles.append(_handle(f"{temperature_label(temperature)}, measured", **look))
    axes.axhline(1.0, color=INK, lw=1, ls="--")
    axes.set_xticks(range(len(ways)), ways)
    axes.set_xlim(-0.5, len(ways) - 0.5)
    axes.set_xlabel("draft length gamma (most tokens proposed per target call)")
    axes.set_ylabel("speedup over plain decoding (times)")
    axes.set_title("Speedup by draft length, all prompts")
    handles.append(_handle("predicted", marker="o", mfc="white"))
    handles.append(_handle(interval_label(report), marker="|", ms=12))
    handles.append(_handle("1.0: no gain", ls="--", color=INK))
    best = f"best: {times(report.best.speedup.median)}"
    handles.append(_handle(best, marker="o", mfc="none", color=INK, ms=11))
    _legend_below(figure, handles)
    return figure


def by_prompt_category(report: Report) -> Figure | None:
    """Speedup and acceptance rate of each category at the recommended draft length."""
    best = report.best
    everything = [row for row in pooled(report.results) if row.drafts_like(best)]
    # slowest first, for the axis counts upwards
    single = sorted(by_category(report.results, best), key=lambda row: row.speedup.median)
    if not single:
        return None
    temperatures = _temperatures([*single, *everything])
    order = [row.category for row in single if row.temperature == temperatures[0]]
    order = list(dict.fromkeys([*order, *(row.category for row in single)]))
    order += [ALL] if everything else []
    level = confidence(report) or 0.9
    figure = _figure(8.2, 1.9 + 0.4 * len(order))
    left, right = figure.subplots(1, 2, sharey=True)
    for row in [*single, *everything]:
        look = {**_look(report, row.temperature), "capsize": 2.5, "ms": 5.5}
        y = order.index(row.category) - _side_by_side(temperatures, row.temperature, 0.2)
        error = _reach(row.speedup.median, row.speedup.low, row.speedup.high)
        left.errorbar(row.speedup.median, y, xerr=error, **look)
        error = _reach(row.acceptance_rate, *acceptance_interval(row, level))
        right.errorbar(row.acceptance_rate, y, xerr=error, **look)
    left.axvline(1.0, color=INK, lw=1, ls="--")
    left.set_yticks(range(len(order)), ["all prompts" if name == ALL else name for name in order])
    left.set(xlabel="speedup (times; dashed line: no gain)", ylabel="category of prompt")
    left.set_title(f"Speedup, drafting {best.drafting}")
    right.set_xlabel("acceptance rate (accepted / tested tokens)")
    right.set_title("Acceptance rate")
    handles = [_handle(temperature_label(t), **_look(report, t)) for t in temperatures]
    _legend_below(figure, [*handles, _handle(interval_label(report), marker="_", ms=12)])
    return figure


def acceptance_by_position(report: Report) -> Figure | None:
    """How far into a draft the target follows it, at the largest draft length measured."""
    rows = [row for row in pooled(report.results) if row.position_acceptance]
    if not rows:
        return None
    longest = max(rows, key=_by_length)
    rows = [row for row in rows if row.drafts_like(longest)]
    figure = _figure()
    axes = figure.subplots()
    handles = []
    for row in rows:
        look = _look(report, row.temperature)
        positions = range(1, len(row.position_acceptance) + 1)
        axes.plot(positions, row.position_acceptance, **look)
        positions = range(1, len(row.conditional_acceptance) + 1)
        hollow = {**look, "mfc": "white", "ls": "--", "zorder": 2}
        axes.plot(positions, row.conditional_acceptance, **hollow)
        handles.append(_handle(temperature_label(row.temperature), **look))
    _integers(axes, range(1, max(len(row.position_acceptance) for row in rows) + 1))
    axes.set_ylim(0, 1)
    axes.set(xlabel="position in the draft (1 = first proposed token)", ylabel="share accepted")
    axes.set_title(f"Acceptance by position in the draft, drafting {longest.drafting}")
    handles.append(_handle("accepted with all before it", ls="-"))
    handles.append(_handle("accepted when tested", ls="--"))
    _legend_below(figure, handles)
    return figure


def tokens_per_target_call(report: Report) -> Figure | None:
    """Distribution of the tokens one target call yields, at the recommended setting."""
    counts = report.best.acceptance_length_histogram
    if not sum(counts):
        return None
    figure = _figure(7.2, 3.8)
    axes = figure.subplots()
    shares = [100 * count / sum(counts) for count in counts]
    lengths = range(1, len(counts) + 1)
    bars = axes.bar(lengths, shares, width=0.62, color=COLOURS[0])
    axes.bar_label(bars, [f"{share:.0f}%" for share in shares], padding=3)
    # a mark above the bars: a line through them would cross their labels
    top = 1.28 * max(shares)
    axes.plot(report.best.acceptance_length, 0.94 * top, "v", color=COLOURS[1], ms=11)
    _integers(axes, lengths)
    axes.set_ylim(0, top)
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="tokens committed by one target call", ylabel="share of target calls (%)")
    sampling = temperature_label(report.best.temperature)
    axes.set_title(f"Tokens per target call, {sampling}, drafting {report.best.drafting}")
    mean = f"mean: acceptance length {report.best.acceptance_length:.2f} (plain decoding: 1)"
    _legend_below(figure, [_handle(mean, color=COLOURS[1], marker="v", ms=9)])
    return figure


def training_curve(report: Report) -> Figure | None:
    """Expected acceptance on validation answers while the draft learned, by tokens learned from."""
    points = [p for p in report.training_curve if "expected_acceptance" in p]
    if not points:
        return None
    figure = _figure()
    axes = figure.subplots()
    reached = [p["expected_acceptance"] for p in points]
    axes.plot([p["tokens"] for p in points], reached, marker="o", ms=4.5, color=COLOURS[0])
    measured = report.expected_acceptance
    axes.axhline(measured.before.value, color=COLOURS[1], ls=":", lw=1.6)
    axes.axhline(measured.after.value, color=COLOURS[2], ls="--", lw=1.6)
    highest = max(measured.before.value, measured.after.value, *reached)
    axes.set_ylim(0, min(1.0, 1.25 * highest))
    axes.xaxis.set_major_locator(MaxNLocator(6, min_n_ticks=1))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("recorded distributions the draft has been trained on")
    axes.set_ylabel("expected acceptance at temperature 1")
    axes.set_title("What training brought")
    handles = [
        _handle("during training, at least", marker="o", ls="-", color=COLOURS[0]),
        _handle(f"before training: {measured.before.value:.3f}", ls=":", color=COLOURS[1]),
        _handle(f"exported draft: {measured.after.value:.3f}", ls="--", color=COLOURS[2]),
    ]
    _legend_below(figure, handles)
    return figure


def where_time_goes(report: Report) -> Figure | None:
    """Time of a speculative step in parts beside plain decoding of the same tokens; v by width."""
    best, cost = report.best, report.cost
    widths_used = [str(width) for width, n in enumerate(best.target_call_widths, 1) if n]
    if best.speedup.median <= 0 or not set(widths_used) <= set(cost.v):
        return None
    figure = _figure(8.6, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1.55, 1))
    # of the average call: drafts may end before gamma
    num_steps = best.num_draft_steps / best.num_target_calls
    drafting = num_steps * cost.c
    verifying = (
        sum(best.target_call_widths[int(width) - 1] * cost.v[width] for width in widths_used)
        / best.num_target_calls
    )
    # a step takes acceptance_length / speedup; what theory leaves unexplained is the overhead
    measured = best.acceptance_length / best.speedup.median
    overhead = max(measured - drafting - verifying, 0.0)
    start = 0.0
    parts = (
        (f"drafting, {num_steps:.2f} steps of c: {drafting:.2f}", drafting, COLOURS[0]),
        (f"verifying: {verifying:.2f}", verifying, COLOURS[4]),
        (f"overhead: {overhead:.2f}", overhead, "#bbbbbb"),
    )
    for label, value, colour in parts:
        left.barh(0, value, left=start, color=colour, label=label, height=0.5)
        start += value
    left.barh(1, best.acceptance_length, color=COLOURS[5], height=0.5, label="plain decoding")
    end = max(start, measured)
    for y, x, length in ((0, end, measured), (1, best.acceptance_length, best.acceptance_length)):
        left.text(x, y, f"  {length:.2f}", va="center")
    left.set_yticks((0, 1), ("with the\ndraft", "plain"))
    left.set_xlim(0, 1.18 * max(end, best.acceptance_length))
    left.grid(axis="y", visible=False)
    left.set_xlabel(f"time in plain target steps (1 = {cost.target_step_ms:.1f} ms)")
    left.set_title(f"Time for the same {best.acceptance_length:.2f} tokens")
    left.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, fontsize=8.5)
    widths = sorted(int(k) for k in cost.v)
    right.plot(widths, [cost.v[str(k)] for k in widths], marker="o", color=COLOURS[0])
    right.axhline(1.0, color=INK, lw=1, ls="--")
    right.set_ylim(0, 1.2 * max(cost.v.values()))
    right.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    right.set(xlabel="k, tokens in one target call", ylabel="v(k), time relative to 1 token")
    right.set_title("Cost of checking k tokens")
    return figure


PLOTS: tuple[Callable[[Report], Figure | None], ...] = (
    speedup_by_gamma,
    by_prompt_category,
    acceptance_by_position,
    tokens_per_target_call,
    where_time_goes,
    training_curve,
)
