"""The results as rows of text: one definition of each column, for the terminal, page and card."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from conf.contracts import Report, Result

ALL = "all"  # the category that pools every prompt
MULTIPLY = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """One column: its header, the name in report.json, what it means, how a row shows it."""

    header: str
    name: str
    definition: str
    show: Callable[[Result], str]


def temperature_label(temperature: float) -> str:
    """`greedy` for temperature 0, else `T=1`, `T=0.7`."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def times(value: float) -> str:
    """A speedup as text, two decimals: `1.31×`."""
    return f"{value:.2f}{MULTIPLY}"


def _interval(row: Result) -> str:
    return f"{row.speedup.low:.2f}{DASH}{row.speedup.high:.2f}"


def _identical(row: Result) -> str:
    if row.identical_outputs is None:
        return "n/a"
    share = f"{round(row.identical_outputs * row.num_prompts)}/{row.num_prompts}"
    gaps = [one.gap for one in row.differences]
    return f"{share} (gap {max(gaps):.2g})" if gaps else share


COLUMNS = (
    Column(
        "prompts",
        "category",
        "Category of the evaluation prompts; all pools every category.",
        lambda r: r.category,
    ),
    Column(
        "sampling",
        "temperature",
        "How tokens are chosen: greedy (temperature 0), or drawn at temperature T from the "
        "target's distribution.",
        lambda r: temperature_label(r.temperature),
    ),
    Column(
        "gamma",
        "gamma",
        "Draft length: tokens the draft proposes for each target call, at most. By cost: a tree "
        "(greedy) or chain that grows while a further token raises expected tokens per expected "
        "time. Others end early behind a doubtful token when eval.stop_below is set.",
        lambda r: r.drafting,
    ),
    Column(
        "speedup",
        "speedup",
        "Wall time of plain autoregressive decoding / wall time of speculative decoding, for the "
        "same prompts, the same number of tokens, the same target and the same loop, prompt "
        "processing included. Above 1 the draft pays.",
        lambda r: times(r.speedup.median),
    ),
    Column(
        "interval",
        "speedup.low, speedup.high",
        "Bootstrap interval of the speedup over prompts. When it holds 1.0, a gain is not shown.",
        _interval,
    ),
    Column(
        "predicted",
        "predicted_speedup",
        "What theory gives from the measured step times: acceptance_length / (gamma c + "
        "v(gamma+1)), each call taken at the number of tokens it really drafted.",
        lambda r: times(r.predicted_speedup),
    ),
    Column(
        "efficiency",
        "efficiency",
        "Measured speedup / predicted speedup. What is missing to 1 is the decoder's own overhead.",
        lambda r: f"{r.efficiency:.2f}",
    ),
    Column(
        "acceptance rate",
        "acceptance_rate",
        "Accepted draft tokens / tested draft tokens. Tokens after a rejection are never tested.",
        lambda r: f"{r.acceptance_rate:.3f}",
    ),
    Column(
        "acceptance length",
        "acceptance_length",
        "Tokens that one target call yields on average: accepted draft tokens plus the one the "
        "target adds itself. Plain decoding yields 1.",
        lambda r: f"{r.acceptance_length:.2f}",
    ),
    Column(
        "tokens/s plain",
        "tokens_per_second.autoregressive",
        "Tokens per second of the target alone.",
        lambda r: f"{r.tokens_per_second.autoregressive:.1f}",
    ),
    Column(
        "tokens/s with draft",
        "tokens_per_second.speculative",
        "Tokens per second of the target with this draft.",
        lambda r: f"{r.tokens_per_second.speculative:.1f}",
    ),
    Column(
        "identical",
        "identical_outputs",
        "Greedy only: prompts whose answer is token for token that of plain decoding / prompts. In "
        "bfloat16 near ties can fall either way: the gap is the largest one between the target's "
        "logits of the two tokens where outputs part; see the section on identical outputs.",
        _identical,
    ),
    Column(
        "draft utilisation",
        "draft_utilisation",
        "Accepted draft tokens / drafted tokens. It falls with gamma; vLLM calls this one the "
        "acceptance rate.",
        lambda r: f"{r.draft_utilisation:.3f}",
    ),
    Column(
        "tokens",
        "num_tokens",
        "Tokens decoded for this row, on the speculative side.",
        lambda r: f"{r.num_tokens:,}",
    ),
    Column(
        "target calls",
        "num_target_calls",
        "Calls of the target these tokens took.",
        lambda r: f"{r.num_target_calls:,}",
    ),
)
_TERMINAL = (  # what fits beside each other in a terminal
    *("category", "temperature", "gamma", "speedup", "speedup.low, speedup.high"),
    *("acceptance_rate", "acceptance_length", "identical_outputs"),
)


def is_best(report: Report, row: Result) -> bool:
    """Whether `row` is the setting the report recommends."""
    best = report.best
    return (row.category, row.temperature) == (
        best.category,
        best.temperature,
    ) and row.drafts_like(best)


def pooled(results: Sequence[Result]) -> list[Result]:
    """Rows over all prompts, by temperature and then gamma."""
    return sorted((r for r in results if r.category == ALL), key=lambda r: (r.temperature, r.gamma))


def by_category(results: Sequence[Result], like: Result | None = None) -> list[Result]:
    """Rows of single categories, all or those that drafted like another."""
    rows = (r for r in results if r.category != ALL and (like is None or r.drafts_like(like)))
    return sorted(rows, key=lambda r: (r.category, r.temperature, r.gamma))


def summary_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headers and rows for the terminal: every pooled setting, then categories at the best.

    The recommended row carries a star. Rows beside prompt lookup say so.
    """
    columns = [column for column in COLUMNS if column.name in _TERMINAL]
    headers = [*(column.header for column in columns), "tokens/s"]
    rows = []
    shown = [
        *((row, " *" if is_best(report, row) else "") for row in pooled(report.results)),
        *((row, ", with lookup") for row in pooled(report.with_lookup)),
        *((row, "") for row in by_category(report.results, report.best)),
    ]
    for result, mark in shown:
        rates = result.tokens_per_second
        tokens_per_second = (
            f"{rates.autoregressive:.1f} \N{RIGHTWARDS ARROW} {rates.speculative:.1f}"
        )
        cells = [*(column.show(result) for column in columns), tokens_per_second]
        cells[0] += mark
        rows.append(cells)
    return headers, rows


def confidence(report: Report) -> float | None:
    """Level of the report's intervals, from the configuration that made it; None if unrecorded."""
    level = report.determined_by.get("eval", {}).get("confidence")
    return None if level is None else float(level)


def interval_label(report: Report) -> str:
    """`90% interval`."""
    level = confidence(report)
    return "interval" if level is None else f"{100 * level:g}% interval"


def acceptance_interval(row: Result, level: float) -> tuple[float, float]:
    """Wilson's interval of the acceptance rate, from counts; (0, 1) when nothing was tested.

    It takes tokens for independent, so it is a little too narrow.
    """
    num = row.num_tested
    if num == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = row.num_accepted / num
    centre = share + z * z / (2 * num)
    width = z * (share * (1 - share) / num + (z / (2 * num)) ** 2) ** 0.5
    return (centre - width) / (1 + z * z / num), (centre + width) / (1 + z * z / num)


def reproduce_command(report: Report) -> str:
    """The `make` command that gives this report; a stage rerun alone counts as the whole run."""
    program, *arguments = [*shlex.split(report.provenance.command.removeprefix("python -m ")), ""]
    if program != "train":
        return report.provenance.command
    overrides = [a for a in arguments if a and a not in ("stage=evaluate", "stage=all")]
    return f'make distill ARGS="{shlex.join(overrides)}"' if overrides else "make distill"
