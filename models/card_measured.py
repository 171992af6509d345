"""What was measured, as a model card shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conf.contracts import Report, Result
from models.card_words import acceptance_text, group_of, speedup_text, table_of

POOLED = "all"  # the category of rows over every prompt
COLUMNS = [
    "speedup",
    "predicted",
    "tokens/s alone",
    "tokens/s with draft",
    "acceptance rate",
    "tokens per call",
    "utilisation",
    "identical",
    "prompts",
    "tokens",
]


def measurements(report: Report, recipe: Mapping[str, Any], plots: Sequence[str]) -> str:
    """Every row of the report by temperature, category and draft length, the plots, and what the
    columns mean.
    """
    confidence = group_of(recipe, "eval").get("confidence")
    interval = "interval" if confidence is None else f"{confidence:.0%} interval"
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    blocks = [
        "## What was measured",
        f"Machine: {machine}. One request at a time, with draftsmith's own decoder; the baseline "
        "is the same target decoding token by token in the same loop. Speedup is wall time "
        "without the draft over wall time with it, prefill included: the median and in brackets "
        f"its {interval}.",
    ]
    for temperature in sorted({row.temperature for row in report.results}):
        blocks += _at_temperature(report, temperature)
    blocks += [f"![{name.rpartition('.')[0]}]({name})" for name in plots]
    blocks.append(
        "- *predicted*: the speedup expected from acceptance and cost alone (see below)\n"
        "- *acceptance rate*: accepted / tested drafted tokens; after a rejection none is tested\n"
        "- *tokens per call*: tokens committed per target call, the target's own included\n"
        "- *utilisation*: accepted / drafted tokens, which some engines call acceptance rate\n"
        "- *identical*: prompts whose greedy text equals the target's own, token for token; in "
        "half precision, rounding may decide between two nearly equal tokens differently\n"
        "- *expected acceptance*: mean overlap of the draft's and the target's next-token "
        "distributions at temperature 1, over held-out answers"
    )
    return "\n\n".join(blocks)


def _at_temperature(report: Report, temperature: float) -> list[str]:
    name = "Greedy" if temperature == 0 else f"Sampled at temperature {temperature:g}"
    rows = [row for row in report.results if row.temperature == temperature]
    pooled = sorted((row for row in rows if row.category == POOLED), key=lambda row: row.gamma)
    best = max(pooled or rows, key=lambda row: row.speedup.median)
    if temperature == report.best.temperature:
        best = report.best
    chosen = [row for row in rows if row.drafts_like(best)]
    chosen.sort(key=lambda row: (row.category == POOLED, row.category))
    blocks = [
        f"### {name}, draft length {best.drafting}, by category",
        table_of(["category", *COLUMNS], [(row.category, *_cells(row)) for row in chosen]),
    ]
    if len(pooled) > 1:
        blocks += [
            f"### {name}, all categories, by draft length",
            table_of(["draft length", *COLUMNS], [(row.drafting, *_cells(row)) for row in pooled]),
        ]
    return blocks


def _cells(row: Result) -> tuple[str, ...]:
    return (
        speedup_text(row.speedup),
        f"{row.predicted_speedup:.2f}x",
        f"{row.tokens_per_second.autoregressive:.1f}",
        f"{row.tokens_per_second.speculative:.1f}",
        f"{row.acceptance_rate:.1%}",
        f"{row.acceptance_length:.2f}",
        f"{row.draft_utilisation:.1%}",
        "" if row.identical_outputs is None else f"{row.identical_outputs:.0%}",
        str(row.num_prompts),
        str(row.num_tokens),
    )


def why_this_speed(report: Report) -> str:
    """What explains the speed: step times, and acceptance by category."""
    cost = report.cost
    widths = sorted(cost.v.items(), key=lambda item: int(item[0]))
    blocks = [
        "## Why this speed",
        f"A draft step takes {cost.draft_step_ms:.2f} ms and a target step "
        f"{cost.target_step_ms:.2f} ms: c = {cost.c:.3f}. A target call over several tokens costs "
        "v times one over a single token:",
        table_of(
            ["tokens", *(width for width, _ in widths)],
            [("v", *(f"{value:.2f}" for _, value in widths))],
        ),
        "Predicted speedup = tokens per call / (draft length x c + v(draft length + 1)). Another "
        "machine or engine has another c and v; acceptance depends on the models and the text.",
    ]
    by_category = sorted(report.expected_acceptance.after_by_category.items())
    if by_category:
        rows = [(name, acceptance_text(value)) for name, value in by_category]
        blocks.append(table_of(["category", "expected acceptance"], rows))
    return "\n\n".join(blocks)
