"""events.jsonl: what a run reported, one JSON object a line, appended to by every command."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"  # in the run folder


class EventFile:
    """A line has `time` (UTC), `kind` (event, message, summary, table, images, artifact) and the
    fields of its kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.is_file() else b""
        if content and not content.endswith(b"\n"):
            # a killed process left its last line unfinished; ours must not continue it
            with path.open("ab") as file:
                file.write(b"\n")
            content += b"\n"
        self.num_lines = content.count(b"\n")

    def append(self, kind: str, **fields: Any) -> int:
        """Append a line, flushed; returns its number in the file, from 0."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        tree = {"time": moment, "kind": kind, **as_json(fields)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(tree, ensure_ascii=False, allow_nan=False) + "\n")
        self.num_lines += 1
        return self.num_lines - 1


def as_json(value: Any) -> Any:
    """A value as plain JSON; what JSON cannot say of a float is the string nan, inf or -inf."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [as_json(item) for item in value]
    raise TypeError(f"an event holds numbers and text, not {type(value).__name__}: {value!r}")
