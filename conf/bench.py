"""Figures that this project promises, as rows that several commands write and one shows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.run import write_atomically

DISTILL_ROWS = Path("bench") / "distill.json"  # below the outputs folder


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


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as a JSON list, atomically."""
    content = json.dumps([row.as_json() for row in rows], indent=1, ensure_ascii=False)
    write_atomically(path, content + "\n")


def read_rows(path: Path) -> list[Row]:
    """Rows that `write_rows` wrote."""
    return [Row(**tree) for tree in json.loads(path.read_text(encoding="utf-8"))]
