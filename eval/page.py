"""The report as one self-contained HTML page for a reader who knows nothing about it yet.

This module derives what the page says beyond the report's own fields; page.html.j2 holds the words.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conf.contracts import Cost, Report, Result
from eval.table import (
    COLUMNS,
    by_category,
    interval_label,
    is_best,
    pooled,
    reproduce_command,
    temperature_label,
    times,
)

TEMPLATE = "page.html.j2"


def render_page(report: Report, images: Mapping[str, Path]) -> str:
    """HTML of the page, with the images embedded. Text of models and prompts is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # by name it would be off, for the file ends in .j2
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        times=times, temperature=temperature_label, quantity=quantity, size=size, duration=duration
    )
    return environment.get_template(TEMPLATE).render(
        report=report,
        best=report.best,
        images={name: _data_uri(path) for name, path in images.items()},
        interval=interval_label(report),
        columns=COLUMNS,
        pooled=pooled(report.results),
        by_category=by_category(report.results),
        lookup=[*pooled(report.with_lookup), *by_category(report.with_lookup)],
        differences=[
            (row.drafting + beside, one)
            for rows, beside in ((report.results, ""), (report.with_lookup, ", with lookup"))
            for row in pooled(rows)
            for one in row.differences
        ],
        is_best=lambda row: is_best(report, row),
        reason=reason(report),
        best_by_temperature=best_by_temperature(report),
        budgets=budgets(report),
        steps=steps(report.cost),
        target_facts=facts(report.target, skip=("name",)),
        draft_facts=facts(report.draft),
        machine_facts=facts(report.machine),
        draft_path=f"outputs/{report.name}/draft/model",
        converted=report.target["name"].endswith(".gguf"),
        command=reproduce_command(report),
    )


@dataclass(frozen=True)
class Budget:
    """What a draft length costs, in plain target steps, and what acceptance pays for it."""

    gamma: int
    drafting: float
    verifying: float
    break_even: float
    rows: list[Result]  # pooled, one for each temperature

    @property
    def cost(self) -> float:
        return self.drafting + self.verifying


@dataclass(frozen=True)
class Step:
    """A measured step time beside the time that reading the weights once takes."""

    model: str
    measured_ms: float
    num_bytes: int
    limit_ms: float | None  # None: bandwidth not measured


def break_even_acceptance(cost: Cost, gamma: int) -> float | None:
    """Acceptance rate at which draft length `gamma` neither gains nor loses, without overhead.

    Solves 1 + alpha + ... + alpha^gamma = gamma c + v(gamma+1); at gamma 1 it is
    c + v(2) - 1. Above 1 no draft of this cost can pay. None when v(gamma+1) was not measured.
    Source: Leviathan et al. 2211.17192, theorem 3.8, with the measured v in place of 1.
    """
    verifying = cost.v.get(str(gamma + 1))
    if verifying is None:
        return None
    price = gamma * cost.c + verifying
    low, high = 0.0, max(price - 1, 0.0)  # the sum is at least 1 + alpha
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(gamma + 1)) < price:
            low = middle
        else:
            high = middle
    return high


def budgets(report: Report) -> list[Budget]:
    """Step cost and break-even acceptance of every draft length whose v was measured."""
    rows = [row for row in pooled(report.results) if not row.by_cost]
    found = []
    for gamma in sorted({1, *(row.gamma for row in rows)}):
        alpha = break_even_acceptance(report.cost, gamma)
        if alpha is not None:
            own = [row for row in rows if row.gamma == gamma]
            verifying = report.cost.v[str(gamma + 1)]
            found.append(Budget(gamma, gamma * report.cost.c, verifying, alpha, own))
    return found


def steps(cost: Cost) -> list[Step]:
    """Measured step times beside their physical limit, bytes of weights / memory bandwidth."""

    def step(model: str, milliseconds: float, num_bytes: int) -> Step:
        rate = cost.memory_gb_per_s
        return Step(model, milliseconds, num_bytes, num_bytes / (rate * 1e6) if rate > 0 else None)

    return [
        step("target", cost.target_step_ms, cost.target_bytes),
        step("draft", cost.draft_step_ms, cost.draft_bytes),
    ]


def reason(report: Report) -> str:
    """Why the best setting is no faster than plain decoding; empty when it is."""
    best = report.best
    if best.speedup.median >= 1:
        return ""
    length = best.usual_length
    alpha = break_even_acceptance(report.cost, length)
    if best.predicted_speedup >= 1 or alpha is None:
        return (
            f"Acceptance is not the obstacle: with {best.acceptance_length:.2f} tokens per target "
            f"call theory gives {times(best.predicted_speedup)}, and the decoder's own overhead "
            f"(efficiency {best.efficiency:.2f}) takes more than that."
        )
    text = (
        f"At draft length {length} the draft must have {alpha:.2f} of its tested tokens "
        f"accepted to break even, and {best.acceptance_rate:.2f} were."
    )
    if alpha > 1:
        text = (
            f"At draft length {length} even a draft whose every token is accepted could not "
            f"pay: break-even acceptance is {alpha:.2f}, above 1."
        )
    return text + (
        f" One draft step costs {report.cost.c:.2f} of a target step, and checking "
        f"{length + 1} tokens costs {report.cost.v[str(length + 1)]:.2f}."
    )


def best_by_temperature(report: Report) -> list[Result]:
    """The fastest pooled row of each temperature."""
    found: dict[float, Result] = {}
    for row in pooled(report.results):
        if (
            row.temperature not in found
            or row.speedup.median > found[row.temperature].speedup.median
        ):
            found[row.temperature] = row
    return list(found.values())


def facts(tree: Mapping[str, Any], skip: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Names and values of a report's free-form dictionary in words."""
    shown = []
    for key, value in tree.items():
        if key in skip or (key == "hot_vocab" and "shared_vocab" in tree):
            continue
        if key == "bytes" or key.endswith("_bytes"):
            text = size(value)
        elif key == "hot_vocab":
            text = f"{value:,} most frequent ids" if value else "all ids"
        elif key == "shared_vocab":
            text = f"{value:,} tokens, those that its own tokenizer shares with the target's"
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, int):
            text = quantity(value)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        shown.append((FACT_NAMES.get(key, key.removeprefix("num_").replace("_", " ")), text))
    return shown


FACT_NAMES = {
    "bytes": "size",
    "num_bytes": "size",
    "hot_vocab": "proposes",
    "shared_vocab": "proposes",
    "dtype": "number format",
}


def quantity(value: int) -> str:
    """A count for reading: `135M`, `1.2B`, or all digits below a million."""
    if value >= 1e9:
        return f"{value / 1e9:.2f}B"
    return f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value:,}"


def size(num_bytes: float) -> str:
    """Bytes for reading, decimal units as in bandwidths."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """`12 s` or `8 min 40 s`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
