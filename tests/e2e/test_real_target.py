"""The smoke recipe on the real target, from its installed package, as `make smoke` runs it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.contracts import Corpus, Lessons, Report

ROOT = Path(__file__).parents[2]


@pytest.mark.real
def test_the_smoke_recipe_gives_sane_figures(tmp_path: Path) -> None:
    overrides = ["experiment=smoke", f"outputs={tmp_path}", "tracker=none"]
    done = subprocess.run(
        [sys.executable, "-m", "train", *overrides],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "smoke"
    report, lessons = Report.read(run / "report"), Lessons.read(run / "lessons")

    categories = {"chat", "qa", "summarisation", "translation", "mathematics", "code"}
    corpus = Corpus.read(run / "corpus")
    assert set(corpus.num_prompts["train"]) == categories
    assert {row.category for row in report.results} == {"all", *categories}

    assert report.target["vocab_size"] == 49152
    assert report.target["num_layers"] == 30
    # what a step reads decides its time; embeddings are most of a small draft and are looked up
    assert report.cost.draft_bytes < report.cost.target_bytes / 4
    assert lessons.mean_recorded_mass > 0.8  # 48 ids hold most of this target's mass

    # the warm start from a thousand positions; nothing of the target's layers alone gives 0.01
    before, after = report.expected_acceptance.before, report.expected_acceptance.after
    assert 0.1 < before.value < 1
    assert after.value > before.value - 0.02

    # step times on whatever machine this is, however busy
    assert 0 < report.cost.c < 1
    assert 0.3 < report.cost.v["2"] < 4
    for row in report.results:
        for figure in (row.speedup.low, row.speedup.median, row.speedup.high, row.efficiency):
            assert math.isfinite(figure)
            assert figure > 0
        assert (row.identical_outputs is not None) == (row.temperature == 0)
    assert report.verdict in done.stderr
