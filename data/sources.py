"""Records of a source, wherever they lie: an installed package, a file, the Hub, Python itself, a
generator.

A record is a dict of columns. Packages are found through their metadata and never imported: their
text is read where it is installed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import itertools
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from conf.choices import SourceKind
from conf.errors import ConfigError, require
from conf.groups import SourceConfig
from conf.validate import require_package
from data import stdlib
from data.files import Record, files_of, missing_column, read_files
from data.order import Numbered

STDLIB = {"functions": stdlib.functions, "manual": stdlib.manual}
SHUFFLE_BUFFER = 4096  # records of a stream that are shuffled at a time
DIGEST_BLOCK = 2**16  # bytes


def read_records(key: str, source: SourceConfig, *, seed: int) -> Iterator[Numbered]:
    """The records `start` to `stop`, numbered, one at a time: those of a source that ends in its
    own order, those of a stream (a Hub dataset, a generator) in one drawn from the seed.

    `key` names the source in errors, for example `data.sources.boolq`. A stream is endless for
    practical purposes and read only as far as it is asked for. Raises ConfigError when a source
    cannot be read.
    """
    if source.kind is SourceKind.hub:
        return _numbered(_hub(key, source, seed), source)
    if source.kind is SourceKind.reasoning:
        return _numbered(_reasoning(key, source, seed), source)
    records = _stdlib(key, source) if source.kind is SourceKind.stdlib else _from_file(key, source)
    return _numbered(records, source)


def count_known(source: SourceConfig) -> bool:
    """Whether the source ends by itself, so that what is left over can be counted."""
    return source.kind not in (SourceKind.hub, SourceKind.reasoning)


def held_out(key: str, source: SourceConfig) -> dict[str, set[Any]]:
    """Column -> values by which `exclude` recognises the records that must not be used."""
    values: dict[str, set[Any]] = {}
    for path, column in source.exclude.items():
        place = f"{key}.exclude"
        for record in read_files(place, locate(place, source, path), source.records):
            if column not in record:
                raise ConfigError(missing_column(place, column, record))
            values.setdefault(column, set()).add(record[column])
    return values


def _numbered(records: Iterable[Record], source: SourceConfig) -> Iterator[Numbered]:
    return itertools.islice(
        enumerate(records), source.start, source.stop if source.stop >= 0 else None
    )


# ---------------------------------------------------------------- files


def _from_file(key: str, source: SourceConfig) -> Iterator[Record]:
    return read_files(f"{key}.path", locate(f"{key}.path", source, source.path), source.records)


def locate(key: str, source: SourceConfig, path: str) -> Path:
    """Where the file or folder lies on this machine; raises ConfigError when there is none."""
    if source.kind is SourceKind.package:
        require_package(key.rpartition(".")[0], source.package)
        for entry in importlib.metadata.files(source.package) or ():
            if str(entry) == path:
                found = Path(str(entry.locate()))
                require(
                    found.is_file(),
                    key,
                    path,
                    f"package {source.package} has lost this file",
                    "Install it again",
                )
                return found
        require(
            False,
            key,
            path,
            f"package {source.package} ships no such file",
            "See `pip show -f` for those it ships",
        )
    found = Path(path)
    way_out = "Give a readable file or folder"
    require(bool(path) and found.exists(), key, repr(path), "there is no such file", way_out)
    return found


# ---------------------------------------------------------------- what is no file


def _stdlib(key: str, source: SourceConfig) -> Iterator[Record]:
    require(
        source.path in STDLIB,
        f"{key}.path",
        repr(source.path),
        "the standard library has functions and a manual",
        f"Use one of {', '.join(STDLIB)}",
    )
    return STDLIB[source.path]()


def _reasoning(key: str, source: SourceConfig, seed: int) -> Iterator[Record]:
    """Problems of the named generators, taken in turn."""
    require_package(key, source.package)
    gym = importlib.import_module("reasoning_gym")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    names = [name.strip() for name in source.path.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    require(
        bool(names) and not unknown,
        f"{key}.path",
        repr(source.path),
        f"reasoning-gym has no generator {unknown[0]}" if unknown else "no generator is named",
        f"Use some of {', '.join(sorted(known))}",
    )
    generators = [gym.create_dataset(name, size=2**31 - 1, seed=seed) for name in names]
    return (
        {"problem": generator[i]["question"], "generator": name}
        for i in itertools.count()
        for name, generator in zip(names, generators, strict=True)
    )


def _hub(key: str, source: SourceConfig, seed: int) -> Iterator[Record]:
    datasets = importlib.import_module("datasets")
    # what datasets raises for a missing dataset, configuration or split, and without a network
    errors = (OSError, ValueError, RuntimeError)
    try:
        stream = datasets.load_dataset(
            source.path,
            source.config or None,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
        if source.start == 0 and source.stop < 0:
            # a range means records of the file, so only a whole dataset is shuffled
            stream = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        yield from stream
    except errors as refused:
        reason = (str(refused).splitlines() or [type(refused).__name__])[0]
        raise ConfigError(
            f"{key}.path={source.path!r}: the Hub dataset cannot be read ({reason}). Check its "
            "name, `config` and `split`, the network, and that you are logged in if it asks for it."
        ) from refused


def digest(key: str, source: SourceConfig) -> str:
    """What the content of a source depends on beyond its configuration: a version, or a digest of
    the file.
    """
    if source.kind is SourceKind.stdlib:
        return f"python {platform.python_version()}"
    if source.kind is SourceKind.hub:
        return f"revision {source.revision}"
    if source.kind is SourceKind.file:
        sha256 = hashlib.sha256()
        for path in (source.path, *sorted(source.exclude)):
            for file in files_of(f"{key}.path", locate(f"{key}.path", source, path)):
                with file.open("rb") as content:
                    while block := content.read(DIGEST_BLOCK):
                        sha256.update(block)
        return f"sha256 {sha256.hexdigest()[:16]}"
    require_package(key, source.package)
    return f"{source.package} {importlib.metadata.version(source.package)}"
