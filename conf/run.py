"""The run folder: fingerprints, atomic writes, provenance, and what to do with an artefact that is
already there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from conf.contracts import MANIFEST, Manifest, Provenance
from conf.errors import ConfigError
from conf.schema import Config, as_tree

RECORDED_PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "peft",
    "hydra-core",
    "wandb",
    "draftsmith",
)


class Resume(StrEnum):
    fresh = "fresh"
    partial = "continue"
    complete = "skip"


def write_atomically(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Write under a temporary name, flush to disk, rename: a reader sees the old file or the new
    one, never a part.

    A function as content writes to the file that it is given: what is large need not be in memory
    twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def fingerprint(tree: Mapping[str, Any]) -> str:
    """Digest of a JSON tree, independent of key order; 16 hexadecimal digits."""
    canonical = json.dumps(
        as_tree(dict(tree)), sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def provenance(seed: int, device: str, seconds: float = 0.0) -> Provenance:
    """What made an artefact: commit, versions, seed, device and command line."""
    root = Path(__file__).parent.parent
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    versions = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    return Provenance(
        git_commit=git.stdout.strip() or "unknown",
        command=shlex.join(_command()),
        seed=seed,
        device=device,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        packages=versions,
        seconds=round(seconds, 1),
        peak_memory_gib=peak_memory_gib(),
    )


def peak_memory_gib() -> float:
    """Largest resident memory of this process so far, in GiB."""
    status = Path("/proc/self/status")
    if status.is_file():
        # the figure below also knows what the process held that started this one, until it became
        # this program
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    per_gib = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_gib


def _command() -> list[str]:
    # `python -m train` shows as a path of the file inside the package; say what was typed, without
    # local folders
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return ["python", "-m", name, *sys.argv[1:]]


def process_rank() -> int:
    """Rank of this process under a launcher such as `accelerate launch`, 0 without one."""
    return int(os.environ.get("RANK", "0"))


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from _differences(
                old.get(name, "absent"), new.get(name, "absent"), f"{key}.{name}" if key else name
            )
    elif old != new:
        yield key, old, new


@dataclass(frozen=True)
class Run:
    """The folder of one run, `outputs/<name>/`, and the store that runs share."""

    folder: Path
    store: Path
    seed: int
    name: str

    @classmethod
    def open(cls, config: Config, folder: Path) -> Run:
        """Create the folders; raises ConfigError when they cannot be written."""
        store = Path(config.outputs).absolute() / ".store"
        try:
            for path in (folder, store):
                path.mkdir(parents=True, exist_ok=True)
                probe = path / f".probe-{os.getpid()}"
                probe.write_bytes(b"")
                probe.unlink()
        except OSError as refused:
            raise ConfigError(
                f"outputs={config.outputs}: {path} cannot be written ({refused.strerror}). Choose"
                " another folder with outputs=."
            ) from None
        return cls(folder=folder, store=store, seed=config.seed, name=config.name)

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def lessons(self) -> Path:
        return self.folder / "lessons"

    @property
    def draft(self) -> Path:
        return self.folder / "draft"

    @property
    def report(self) -> Path:
        return self.folder / "report"

    def shared(self, kind: str, determined_by: Mapping[str, Any]) -> Path:
        """Folder `outputs/<name>/<kind>` as a link into the store, keyed by fingerprint.

        Runs that differ only in what comes later share it. A link to something else that is already
        complete is kept, so that `resume` can name the changed keys.
        """
        link = self.folder / kind
        stored = self.store / f"{kind}-{fingerprint(determined_by)}"
        if (link / MANIFEST).is_file():
            return link
        stored.mkdir(parents=True, exist_ok=True)
        if process_rank() == 0 and (not link.is_symlink() or link.resolve() != stored.resolve()):
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(stored, link.parent), target_is_directory=True)
        # the others may come here before the link is there
        return link if process_rank() == 0 else stored

    def resume(
        self, folder: Path, kind: type[Manifest], determined_by: Mapping[str, Any]
    ) -> Resume:
        """Whether a stage's artefact is complete, partial or absent.

        Raises ConfigError when a complete artefact was made from another configuration, naming each
        changed key with both values and the way out.
        """
        tree = json.loads(json.dumps(as_tree(dict(determined_by))))
        if (folder / MANIFEST).is_file():
            made_by = kind.read(folder).determined_by
            changed = list(_differences(made_by, tree))
            if changed:
                listed = "; ".join(
                    f"{key}: was {old!r}, is now {new!r}" for key, old, new in changed
                )
                raise ConfigError(
                    f"{folder.name} of run {self.name} was made from another configuration"
                    f" ({listed}). Give this run its own name (name=...), restore the values, or"
                    f" remove {folder} to make it again."
                )
            return Resume.complete
        return Resume.partial if folder.is_dir() and any(folder.iterdir()) else Resume.fresh


def determined(config: Config, *groups: str, **more: Any) -> dict[str, Any]:
    """The part of the configuration that determines an artefact: whole groups, the seed and what
    else is named.
    """
    return {
        "seed": config.seed,
        **{group: as_tree(getattr(config, group)) for group in groups},
        **more,
    }
