"""Records of files and folders.

A record is a dict of columns. `key` names the setting in errors, for example
`data.sources.boolq.path`.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from conf.errors import ConfigError, require

Record = dict[str, Any]

FORMATS = (".jsonl", ".json", ".csv", ".txt")  # each also compressed as .gz
PARQUET = ".parquet"
BATCH_RECORDS = 1024  # of a Parquet file that are in memory at a time
KINDS = ", ".join((*FORMATS, PARQUET))


def read_files(key: str, path: Path, where: str = "") -> Iterator[Record]:
    """Records of a file, or of the files of a folder one after another; `where` is for .json."""
    return itertools.chain.from_iterable(parse(key, each, where) for each in files_of(key, path))


def files_of(key: str, path: Path) -> list[Path]:
    """The file itself, or all of a folder and the folders in it that can be read, by name."""
    if path.is_file():
        return [path]
    known = [each for each in sorted(path.rglob("*")) if _format(each) in (*FORMATS, PARQUET)]
    require(bool(known), key, path, "no file in this folder can be read", f"Use {KINDS} files")
    return known


def _format(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def parse(key: str, path: Path, where: str = "") -> Iterator[Record]:
    """Records of a .jsonl, .json, .csv or .txt file, each also compressed as .gz, or of a .parquet
    file; text has one prompt per line.
    """
    suffix = _format(path)
    if suffix == PARQUET:
        yield from _parquet(key, path)
        return
    with _open_text(path) as file:
        try:
            if suffix == ".jsonl":
                yield from _parse_lines(key, path, file)
            elif suffix == ".json":
                yield from _walk(key, json.load(file), where)
            elif suffix == ".csv":
                yield from csv.DictReader(file)
            elif suffix == ".txt":
                yield from ({"prompt": line.strip()} for line in file if line.strip())
            else:
                require(
                    False,
                    key,
                    path.name,
                    "the format is unknown",
                    f"Use a {KINDS} file, or one of the first four as .gz",
                )
        except json.JSONDecodeError as broken:
            raise ConfigError(
                f"{key}={path.name}: line {broken.lineno} is no JSON ({broken.msg}). "
                "Correct the line or give another file."
            ) from None
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as broken:
            raise ConfigError(
                f"{key}={path.name}: it cannot be read as UTF-8 text ({broken}). Give another file."
            ) from None


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _parquet(key: str, path: Path) -> Iterator[Record]:
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_RECORDS):
                yield from batch.to_pylist()
    except (OSError, ValueError) as broken:  # pyarrow's own errors are ValueErrors
        raise ConfigError(
            f"{key}={path.name}: it cannot be read as Parquet ({broken}). Give another file."
        ) from None


def _parse_lines(key: str, path: Path, lines: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as broken:
            raise ConfigError(
                f"{key}={path.name}: line {number} is no JSON ({broken.msg}). "
                "Correct the line or give another file."
            ) from None
        yield _as_record(key, path.name, record)


def _walk(key: str, tree: Any, where: str) -> Iterator[Record]:
    """Every node of the JSON tree that the dotted path `where` leads to; without a path, the items
    of a list.
    """
    nodes = [tree] if where or isinstance(tree, dict) else list(tree)
    for step in filter(None, where.split(".")):
        if step == "*":
            nodes = [
                child
                for node in nodes
                for child in (node.values() if isinstance(node, dict) else node)
            ]
            continue
        present = [node for node in nodes if isinstance(node, dict) and step in node]
        if nodes and not present:
            raise ConfigError(
                missing_column(
                    key.replace(".path", ".records"),
                    step,
                    nodes[0] if isinstance(nodes[0], dict) else {},
                )
            )
        nodes = [node[step] for node in present]
    for node in nodes:
        yield _as_record(key, where or "its list", node)


def _as_record(key: str, place: str, node: Any) -> Record:
    """An object is a record; a text, or a list of texts or of messages that one person sent in a
    row, is a `prompt`.
    """
    if isinstance(node, dict):
        return node
    if isinstance(node, str):
        return {"prompt": node}
    if isinstance(node, list):
        texts = [
            part.get("text", part.get("content")) if isinstance(part, dict) else part
            for part in node
        ]
        spoken = [text.strip() for text in texts if isinstance(text, str)]
        if spoken and len(spoken) == len(texts):
            return {"prompt": " ".join(spoken)}
    raise ConfigError(
        f"{key}={place}: a record is {type(node).__name__} {str(node)[:40]!r}, where an object "
        "with columns or a text is needed. Say with `records` where the records are in the file."
    )


def missing_column(key: str, column: str, record: Record) -> str:
    """The sentence for a column that a record lacks."""
    there = ", ".join(sorted(map(str, record))) or "none"
    return f"{key}={column}: the records have no such column. Use one of those there are: {there}."
