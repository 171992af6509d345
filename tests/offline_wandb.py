"""Reads what an offline W&B run recorded, from its `.wandb` file.

wandb 0.31 has no Python reader of its own format. The format is LevelDB's log (blocks of 32 KiB,
records cut into fragments) after a header of seven bytes; each record is a protobuf message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

pb: Any = wandb_internal_pb2  # generated code without types
BLOCK, HEADER, FRAGMENT_HEADER = 32 * 1024, 7, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Artifact:
    type: str
    name: str
    aliases: list[str]
    metadata: dict[str, Any]
    files: dict[str, Path]  # uploaded by wandb sync
    references: dict[str, str]  # pointed at


@dataclass
class OfflineRun:
    """One process's part of a W&B run."""

    folder: Path
    id: str = ""
    project: str = ""
    name: str = ""
    resume: bool = False
    exit_code: int | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)  # W&B's own, one for each row of history
    history: list[dict[str, Any]] = field(default_factory=list)  # without W&B's own keys
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)  # pattern of keys -> step key
    artifacts: list[Artifact] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # media, relative to folder/files


def read_offline_runs(run_folder: Path) -> list[OfflineRun]:
    """The parts of the W&B run below a run folder, oldest first."""
    parts = [_read(path) for path in run_folder.glob("wandb/offline-run-*/*.wandb")]
    return sorted(parts, key=lambda part: part.steps[0] if part.steps else 0)


def records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file."""
    content = path.read_bytes()
    assert content[:4] == b":W&B", f"{path} is no .wandb file"
    offset, message = HEADER, b""
    while offset < len(content):
        left = BLOCK - offset % BLOCK
        if left < FRAGMENT_HEADER.size:  # the rest of a block is padding
            offset += left
            continue
        if offset + FRAGMENT_HEADER.size > len(content):
            return  # a killed process left it there
        _, length, kind = FRAGMENT_HEADER.unpack_from(content, offset)
        offset += FRAGMENT_HEADER.size
        fragment = content[offset : offset + length]
        if len(fragment) < length:
            return
        offset += length
        message = fragment if kind in (FULL, FIRST) else message + fragment
        if kind in (FULL, LAST):
            record = pb.Record()
            record.ParseFromString(message)
            yield record


def _read(path: Path) -> OfflineRun:
    run = OfflineRun(path.parent)
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind in _READERS:
            _READERS[kind](run, getattr(record, kind))
    return run


def _tree(items: Iterable[Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for item in items:
        *parents, last = list(item.nested_key) or [item.key]
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = json.loads(item.value_json)
    return tree


def _own(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if not key.startswith("_")}


def _run(run: OfflineRun, record: Any) -> None:
    run.id, run.project, run.name = record.run_id, record.project, record.display_name
    run.resume, run.tags = record.resume, list(record.tags)
    run.config.update(_own(_tree(record.config.update)))


def _history(run: OfflineRun, record: Any) -> None:
    run.steps.append(record.step.num)
    run.history.append(_own(_tree(record.item)))


def _summary(run: OfflineRun, record: Any) -> None:
    run.summary.update(_own(_tree(record.update)))


def _metric(run: OfflineRun, record: Any) -> None:
    if record.step_metric:
        run.axes[record.glob_name or record.name] = record.step_metric


def _artifact(run: OfflineRun, record: Any) -> None:
    entries = record.manifest.contents
    run.artifacts.append(
        Artifact(
            type=record.type,
            name=record.name,
            aliases=list(record.aliases),
            metadata=json.loads(record.metadata or "{}"),
            files={e.path: Path(e.local_path) for e in entries if e.local_path},
            references={e.path: e.ref for e in entries if e.ref},
        )
    )


def _files(run: OfflineRun, record: Any) -> None:
    run.files += [file.path for file in record.files]


def _exit(run: OfflineRun, record: Any) -> None:
    run.exit_code = record.exit_code


_READERS = {
    "run": _run,
    "history": _history,
    "summary": _summary,
    "metric": _metric,
    "artifact": _artifact,
    "files": _files,
    "exit": _exit,
}
