"""Benchmark of the stage prepare: its memory on a large file of prompts beside that on a small
one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.contracts import Corpus
from eval.bench import Row

COMMAND = "make bench"
FEW, MANY = 100_000, 10_000_000  # rows
TOPICS = ("river", "mountain", "engine", "garden", "violin", "planet", "bridge", "harbour")
SUITE = "Name the longest lake of the northern continent."


def prepare(_folder: Path, outputs: Path) -> Iterator[Row]:
    """Peak memory of the command on many rows over that on few, and the rows it reads in a second.

    The larger file takes 1 GB of the disk while this runs.
    """
    few, many = (prepared(outputs, num_rows) for num_rows in (FEW, MANY))
    memory = many.provenance.peak_memory_gib / few.provenance.peak_memory_gib
    yield Row(name="prepare.memory", value=memory, unit="x", to_reach="<= 1.2", command=COMMAND)
    speed = MANY / many.provenance.seconds
    yield Row(name="prepare.rows_per_second", value=speed, unit="rows/s", command=COMMAND)


def prepared(outputs: Path, num_rows: int) -> Corpus:
    """The corpus that the command makes of so many rows, in a process of its own.

    Raises RuntimeError with the end of what the command said when it fails.
    """
    outputs.mkdir(parents=True, exist_ok=True)
    # not in the system's folder for such files, which may lie in memory
    with TemporaryDirectory(dir=outputs, prefix=".bench-") as name:
        folder = Path(name).absolute()
        write_rows(folder / "rows.jsonl", num_rows)
        (folder / "suite.jsonl").write_text(json.dumps({"prompt": SUITE}) + "\n", encoding="utf-8")
        program = [
            *(sys.executable, "-m", "train", "stage=prepare", "tracker=none", "name=prepared"),
            *(f"outputs='{folder}'", "target=hub", "target.path=none", "data=file", "eval=file"),
            f"data.sources.prompts.path='{folder / 'rows.jsonl'}'",
            f"eval.suites.prompts.path='{folder / 'suite.jsonl'}'",
        ]
        ended = subprocess.run(program, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"stage=prepare ended: {(ended.stderr or ended.stdout)[-400:]}")
        return Corpus.read(folder / "prepared" / "corpus")


def write_rows(path: Path, num_rows: int) -> None:
    """Distinct prompts of about a hundred bytes, one a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(
            f'{{"prompt": "In case {n} the {TOPICS[n % 8]} is older than the {TOPICS[n // 8 % 8]}: '
            f'why would number {n * 7919 % 1000003} matter here?"}}\n'
            for n in range(num_rows)
        )
