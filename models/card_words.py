"""Words and cells of a model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conf.contracts import Acceptance, Interval


def group_of(tree: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The mapping under `keys`; empty where the manifests did not record it."""
    for key in keys:
        found = tree.get(key)
        tree = found if isinstance(found, Mapping) else {}
    return tree


def table_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    # a pipe inside a cell would end it
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def plural(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def speedup_text(value: Interval) -> str:
    """The median and its interval."""
    return f"{value.median:.2f}x [{value.low:.2f}, {value.high:.2f}]"


def acceptance_text(value: Acceptance) -> str:
    """A mean and its interval."""
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


def count_text(number: int) -> str:
    """Three digits of a large number."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
