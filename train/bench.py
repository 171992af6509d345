"""`python -m train.bench`: figures of distillation, on the target and lessons of a finished run.

Each is measured in a process of its own, one after another; `python -m eval bench` shows them. trl
is a peer: without it the rows that compare with it are left out, and a line says how to install it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from conf.bench import DISTILL_ROWS, Row, write_rows
from conf.console import Screen, text_of
from conf.contracts import MANIFEST
from data.statistics import pooled
from train.bench_work import Found, Work
from train.validation import CONFIDENCE

COMMAND = "make bench"
PEER_SECONDS = 75.0  # of training with trl, and of ours beside it
NUM_COMPARED = 60  # steps on recorded and on whole laws
NUM_COLD_STEPS = 270  # 100 thousand supervised tokens
NUM_FIT_STEPS = 128  # of the map, by draft.fit_steps
LONG_TOKENS, NUM_LONG_STEPS = 4096, 3

Measure = Callable[[Work], Found]


def measured(work: Work) -> Found:
    """Do the work in a process of its own. Raises RuntimeError with the end of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found.json"
        program = [sys.executable, "-m", "train.bench_work", json.dumps(asdict(work)), str(result)]
        ended = subprocess.run(program, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{work.kind} ended with {ended.returncode}: {ended.stderr[-400:]}")
        return Found(**json.loads(result.read_text("utf-8")))


def row(name: str, value: float, unit: str, to_reach: str) -> Row:
    """A figure of this benchmark."""
    return Row(name=f"distill.{name}", value=value, unit=unit, to_reach=to_reach, command=COMMAND)


def gain(name: str, one: Found, other: Found, to_reach: str) -> Row:
    """Expected acceptance of one less another's, with a 90% bootstrap interval over validation
    answers. Both were judged on the same ones, so the differences are what is resampled: how much
    another training run would differ is not in it.
    """
    assert one.positions == other.positions
    differences = [mine - its for mine, its in zip(one.accepted, other.accepted, strict=True)]
    found = pooled(differences, one.positions, CONFIDENCE)
    return replace(row(name, found.value, "probability", to_reach), low=found.low, high=found.high)


def beside_trl(folder: str, measure: Measure) -> Iterator[Row]:
    """Our loop and trl's for the same time from the same start."""
    work = Work(kind="trl", folder=folder, seconds=PEER_SECONDS)
    trl = measure(work)
    ours = measure(replace(work, kind="ours", seconds=trl.seconds))
    speed = ours.tokens / ours.seconds / (trl.tokens / trl.seconds)
    yield row("tokens_vs_trl", speed, "x", ">= 4")
    yield row("memory_vs_trl", ours.peak_gib / trl.peak_gib, "x", "<= 0.33")
    yield gain("acceptance_vs_trl", ours, trl, ">= 0.05")


def by_length(folder: str, measure: Measure) -> Iterator[Row]:
    """Peak memory with answers of 4096 positions and of 512, the same tokens in a step."""
    work = Work(kind="long", folder=folder, steps=NUM_LONG_STEPS, tokens_per_step=LONG_TOKENS)
    long, short = (measure(replace(work, length=length)) for length in (4096, 512))
    yield row("memory_T4096_vs_T512", long.peak_gib / short.peak_gib, "x", "<= 1.1")


def by_source(folder: str, measure: Measure) -> Iterator[Row]:
    """Recorded laws and the target's whole ones, the same steps."""
    work = Work(kind="online", folder=folder, steps=NUM_COMPARED)
    online, recorded = measure(work), measure(replace(work, kind="ours"))
    speed = (recorded.steps / recorded.seconds) / (online.steps / online.seconds)
    yield gain("sparse_vs_dense", online, recorded, "<= 0.005")
    yield row("recorded_vs_online", speed, "x", ">= 3")


def by_start(folder: str, measure: Measure) -> Iterator[Row]:
    """The warm start before its first step, its map fitted to laws and by regression alone, and
    copied layers after 100 thousand tokens.
    """
    fitted = measure(Work(kind="fitted", folder=folder, steps=NUM_FIT_STEPS))
    closed = measure(Work(kind="ours", folder=folder))
    cold = measure(Work(kind="cold", folder=folder, steps=NUM_COLD_STEPS))
    yield gain("warm_start", fitted, cold, ">= 0.0")
    yield gain("warm_start_by_regression", closed, cold, "")


def rows_of(folder: str, measure: Measure, say: Callable[[str], None]) -> list[Row]:
    """Every figure; what fails says so in a row of its own."""

    def told(work: Work) -> Found:
        found = measure(work)
        figures = ", ".join(
            f"{name} {text_of(getattr(found, name))}"
            for name in ("steps", "tokens", "seconds", "peak_gib", "acceptance")
        )
        say(f"bench: {work.kind}: {figures}")
        return found

    rows: list[Row] = []
    groups = [by_length, by_source, by_start]
    if importlib.util.find_spec("trl") is None:
        say(
            "bench: trl is not installed, so nothing is compared with it: pip install -e '.[peers]'"
        )
    else:
        groups.insert(0, beside_trl)
    for group in groups:
        say(f"bench: {group.__doc__}")
        try:
            rows += group(folder, told)
        except Exception as failed:  # whatever one dies of, the figures of the others stand
            error = f"{type(failed).__name__}: {failed}"
            name = f"distill.{group.__name__}"
            rows.append(Row(name=name, value=None, unit="", command=COMMAND, error=error))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what `python -m eval bench`, which has the same options, then shows."""
    parser = argparse.ArgumentParser(prog="python -m train.bench", description=main.__doc__)
    parser.add_argument("--run", default="main", help="run below OUTPUTS (%(default)s)")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"))
    parser.add_argument("--only", nargs="+", choices=("e2e", "distill", "decode"))
    options = parser.parse_args(arguments)
    if options.only and "distill" not in options.only:
        return 0
    path = options.outputs / DISTILL_ROWS
    path.unlink(missing_ok=True)  # of an earlier run
    folder = options.outputs / options.run
    if not (folder / "draft" / MANIFEST).is_file():
        sys.stderr.write(f"error: there is no draft in {folder}: `make distill` makes one.\n")
        return 2
    write_rows(path, rows_of(str(folder), measured, Screen().say))
    return 0


if __name__ == "__main__":
    sys.exit(main())
