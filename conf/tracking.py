"""Events of a run: one dict per event, shown on the console, in events.jsonl and in W&B.

Every stage reports through the one `Tracker` of the command. Only the process of rank 0 writes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from conf.choices import TrackerKind
from conf.console import Bar, Screen, Value
from conf.contracts import MANIFEST
from conf.dashboard import ONLINE_SECONDS, reason_of, start_wandb
from conf.events import EVENTS, EventFile, as_json
from conf.run import Run, process_rank
from conf.schema import Config

if TYPE_CHECKING:
    import wandb

UPLOADED = {".json", ".html", ".md", ".png"}  # files an artifact carries; it refers to all others
UPLOADED_BYTES = 8 << 20


def open_tracker(config: Config, run: Run, screen: Screen | None = None) -> Tracker:
    """The tracker of one command; a context manager that closes it, as failed after an exception.

    W&B is online when logged in and offline otherwise, decided without network and without a
    question. WANDB_MODE overrides.
    """
    tracker = Tracker(run, screen or Screen())
    if config.tracker.kind is TrackerKind.wandb and tracker.writes:
        tracker.attach(start_wandb(config, run, tracker.message))
    return tracker


class Tracker:
    """Console, `events.jsonl` in the run folder and, when attached, a W&B run.

    A rerun in the same folder appends. The number of a line in events.jsonl is W&B's own step, so
    that the steps of a continued run increase whatever was lost in between; plots use the step
    that the event names, on an axis of its group (`distill/step` for `distill/...`).
    """

    def __init__(self, run: Run, screen: Screen) -> None:
        self.run = run
        self.screen = screen
        self.writes = process_rank() == 0
        self._wandb: wandb.Run | None = None
        self._refused: set[str] = set()  # kinds of W&B calls that failed and were reported
        self._axes: set[str] = set()
        self._logged: dict[str, wandb.Artifact] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)

    @functools.cached_property
    def file(self) -> EventFile:
        return EventFile(self.run.folder / EVENTS)

    def attach(self, wandb_run: wandb.Run | None) -> None:
        """Send what follows to this W&B run too."""
        self._wandb = wandb_run

    def close(self, *, failed: bool = False) -> None:
        """Finish the W&B run, which uploads what is left of it. Calling it again does nothing."""

        def finish(run: wandb.Run) -> None:
            import wandb

            run.finish(exit_code=int(failed))
            wandb.teardown()  # finish returns before the last records are on the disk

        self._on_wandb("end of the run", finish)
        self._wandb = None

    # ------------------------------------------------------------ events

    def event(self, name: str, values: Mapping[str, Value], step: int | None = None) -> None:
        """Report values under `name`, for example distill/train; in W&B the keys are name/key.

        `step` is the place on the axis of the group, the part of `name` before the first slash.
        Without it the event has no place on that axis.
        """
        assert "step" not in values, f"event {name}: the step is an argument, not a value"
        if not self.writes:
            return
        number = self.file.append("event", name=name, step=step, values=values)
        self.screen.values(name, {"step": step, **values} if step is not None else values)
        row: dict[str, Any] = {f"{name}/{key}": value for key, value in values.items()}
        if step is not None:
            axis = f"{name.split('/')[0]}/step"
            row[axis] = step
            self._define_axis(axis)
        self._log("events", lambda: row, number)

    def message(self, text: str) -> None:
        """Say one sentence, on the console and in events.jsonl."""
        if self.writes:
            self.file.append("message", text=text)
            self.screen.say(text)

    def summary(self, values: Mapping[str, Value]) -> None:
        """Values to sort runs by: W&B's summary of the run."""
        if self.writes:
            self.file.append("summary", values=values)
            self.screen.values("summary", values)
            self._on_wandb("summary", lambda run: run.summary.update(dict(values)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> None:
        """Report a table: rendered on the console, a wandb.Table under `name`."""
        if not self.writes:
            return
        number = self.file.append("table", name=name, columns=columns, rows=rows)
        self.screen.table(name, columns, rows)

        def row() -> dict[str, Any]:
            import wandb

            # an absent number among numbers, or a word among them, is data and not a mistake
            cells = [list(cells) for cells in rows]
            return {name: wandb.Table(list(columns), cells, allow_mixed_types=True)}

        self._log("tables", row, number)

    def images(self, images: Mapping[str, Path]) -> None:
        """Report image files by name; events.jsonl has their paths relative to the run folder."""
        if not self.writes:
            return
        paths = {name: self._relative(path) for name, path in images.items()}
        number = self.file.append("images", values=paths)
        self.screen.values("images", paths)

        def row() -> dict[str, Any]:
            import wandb

            return {name: wandb.Image(str(path)) for name, path in images.items()}

        self._log("images", row, number)

    def artifact(
        self,
        kind: str,
        folder: Path,
        uses: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Report what a stage made, and from which kinds of artifact of this run (`uses`).

        Its lineage is always in its metadata: its fingerprint and, under `uses`, the fingerprints
        of what it was made from. Online, W&B's own links are made too, also to artifacts of an
        earlier process. Offline they cannot be: `use_artifact` asks the server.

        Manifests, reports and plots are part of the W&B artifact. Anything else (recorded answers
        of gigabytes, prompts, weights) is a reference to the file on this machine: wandb would
        copy it into its cache, checksum it and upload it, and data leave this machine only by
        `publish`. The manifest, which is a part, has the checksums and makes the version.
        """
        if not self.writes:
            return
        fingerprint = _fingerprint(folder)
        made_from = {used: _fingerprint(self.run.folder / used) for used in uses}
        lineage = {"fingerprint": fingerprint, "uses": made_from}
        self.file.append("artifact", name=kind, folder=self._relative(folder), **lineage)
        self.screen.values(f"artifact/{kind}", {"fingerprint": fingerprint, **made_from})

        def send(run: wandb.Run) -> None:
            import wandb

            described = as_json({**(metadata or {}), **lineage})
            artifact = wandb.Artifact(self._artifact_name(kind), kind, metadata=described)
            _add_files(artifact, folder.resolve())
            aliases = ["latest", fingerprint] if fingerprint else ["latest"]
            self._logged[kind] = run.log_artifact(artifact, aliases=aliases)

        self._on_wandb("links between artifacts", lambda run: self._link(run, made_from))
        self._on_wandb("artifacts", send)

    @contextlib.contextmanager
    def progress(self, title: str, total: int, unit: str) -> Iterator[Bar]:
        """A bar with rate and time left on a terminal, now and then a line with them elsewhere."""
        if not self.writes:
            yield Bar()
            return
        with self.screen.progress(title, total, unit) as bar:
            yield bar

    # ------------------------------------------------------------ inside

    def _relative(self, path: Path) -> str:
        return os.path.relpath(path, self.run.folder)

    def _on_wandb(self, what: str, act: Callable[[wandb.Run], object]) -> None:
        if self._wandb is None:
            return
        try:
            act(self._wandb)
        except Exception as failure:  # whatever a dashboard raises, it must not end hours of work
            if what not in self._refused:
                self._refused.add(what)
                self.message(
                    f"W&B did not take the {what} ({reason_of(failure)}). "
                    f"The run goes on: the console and {EVENTS} have everything."
                )

    def _log(self, what: str, row: Callable[[], dict[str, Any]], number: int) -> None:
        self._on_wandb(what, lambda run: run.log(row(), step=number, commit=True))

    def _define_axis(self, axis: str) -> None:
        if axis in self._axes:
            return
        self._axes.add(axis)

        def define(run: wandb.Run) -> None:
            run.define_metric(axis)
            # no step_sync: an event without a step would be given the last one
            run.define_metric(f"{axis.removesuffix('step')}*", step_metric=axis, step_sync=False)

        self._on_wandb("axes", define)

    def _artifact_name(self, kind: str) -> str:
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{self.run.name}-{kind}")[-128:]

    def _link(self, run: wandb.Run, uses: Mapping[str, str | None]) -> None:
        if run.offline:
            return
        for kind, fingerprint in uses.items():
            if kind in self._logged:
                run.use_artifact(self._logged[kind].wait(timeout=ONLINE_SECONDS))
            else:
                version = f"{self._artifact_name(kind)}:{fingerprint or 'latest'}"
                run.use_artifact(version, type=kind)


def _fingerprint(folder: Path) -> str | None:
    """Of a finished artefact, from its manifest."""
    path = folder / MANIFEST
    return json.loads(path.read_text("utf-8")).get("fingerprint") if path.is_file() else None


def _add_files(artifact: wandb.Artifact, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or any(
            part.startswith(".") for part in path.parts[len(folder.parts) :]
        ):
            continue
        if path.suffix in UPLOADED and path.stat().st_size <= UPLOADED_BYTES:
            artifact.add_file(str(path), name=name, policy="immutable", skip_cache=True)
        else:
            artifact.add_reference(path.as_uri(), name=name, checksum=False)
