"""The benchmark of the stage prepare runs the real command and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conf.run import peak_memory_gib
from eval import bench_prepare

GIB = 2**30


def test_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_prepare, "FEW", 2000)
    monkeypatch.setattr(bench_prepare, "MANY", 4000)
    memory, speed = bench_prepare.prepare(tmp_path, tmp_path / "outputs")
    assert (memory.name, memory.to_reach) == ("prepare.memory", "<= 1.2")
    assert memory.value is not None and 0.5 < memory.value < 1.2
    assert speed.value is not None and speed.value > 0
    assert not list((tmp_path / "outputs").iterdir())


def test_its_prompts_are_distinct(tmp_path: Path) -> None:
    bench_prepare.write_rows(tmp_path / "rows.jsonl", 500)
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) == 500
    assert 80 < sum(map(len, lines)) / 500 < 120


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not inherit the figure")
def test_a_process_does_not_count_the_memory_of_the_one_that_started_it() -> None:
    """Which on Linux the system's own figure of a process does."""
    held = b"x" * (GIB // 4)
    program = "from conf.run import peak_memory_gib; print(peak_memory_gib())"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert peak_memory_gib() > len(held) / GIB > float(ended.stdout)
