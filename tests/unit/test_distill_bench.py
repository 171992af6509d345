"""Rows of the distillation benchmark: how they are computed, kept and shown."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from conf.bench import DISTILL_ROWS, Row, read_rows, write_rows
from conf.errors import UserError
from conf.groups import OptimConfig
from eval.bench import bench, distill
from tests.lessons import made_up_row
from train import bench as distill_bench
from train.bench import PEER_SECONDS, gain, main, rows_of
from train.bench_trl import IGNORED, padded
from train.bench_work import Found, Work, spent_rate

GOALS = {
    "distill.tokens_vs_trl": ">= 4",
    "distill.memory_vs_trl": "<= 0.33",
    "distill.acceptance_vs_trl": ">= 0.05",
    "distill.memory_T4096_vs_T512": "<= 1.1",
    "distill.sparse_vs_dense": "<= 0.005",
    "distill.recorded_vs_online": ">= 3",
    "distill.warm_start": ">= 0.0",
    "distill.warm_start_by_regression": "",
}


def judged(acceptance: float) -> dict[str, Any]:
    """Two answers of 10 and 30 positions with this mean."""
    return {"accepted": [10 * acceptance, 30 * acceptance], "positions": [10, 30]}


def found(work: Work) -> Found:
    """Figures that tell the works apart."""
    if work.kind == "trl":
        assert work.seconds == PEER_SECONDS
        return Found(steps=10, tokens=1000, seconds=80.0, peak_gib=4.0, **judged(0.20))
    if work.kind == "long":
        return Found(peak_gib=2.0 if work.length == 4096 else 1.9)
    if work.kind == "online":
        return Found(steps=60, seconds=120.0, **judged(0.301))
    if work.kind == "cold":
        return Found(**judged(0.15))
    if work.kind == "fitted":
        return Found(**judged(0.28))
    if work.seconds:
        assert work.seconds == 80.0  # what trl really took
        return Found(steps=50, tokens=6000, seconds=60.0, peak_gib=1.0, **judged(0.27))
    return Found(steps=60, seconds=30.0, **judged(0.3 if work.steps else 0.25))


@pytest.fixture
def with_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())


@pytest.mark.usefixtures("with_trl")
def test_rows_are_ratios_and_differences_of_what_was_measured() -> None:
    said: list[str] = []
    rows = {row.name: row for row in rows_of("run", found, said.append)}
    assert any(line.startswith("bench: trl: steps 10, tokens 1000") for line in said)
    assert {name: row.to_reach for name, row in rows.items()} == GOALS
    assert {name: row.value for name, row in rows.items()} == pytest.approx(
        {
            "distill.tokens_vs_trl": 8.0,
            "distill.memory_vs_trl": 0.25,
            "distill.acceptance_vs_trl": 0.07,
            "distill.memory_T4096_vs_T512": 2.0 / 1.9,
            "distill.sparse_vs_dense": 0.001,
            "distill.recorded_vs_online": 4.0,
            "distill.warm_start": 0.13,
            "distill.warm_start_by_regression": 0.1,
        }
    )


def test_a_gain_is_pooled_over_positions_and_its_interval_over_answers() -> None:
    one = Found(accepted=[6.0, 3.0, 20.0], positions=[10, 10, 50])
    other = Found(accepted=[5.0, 3.0, 15.0], positions=[10, 10, 50])
    shown = gain("x", one, other, ">= 0.0")
    assert shown.value == pytest.approx(6 / 70)
    # at least what the answer that gains nothing gives, at most what the best one gives
    assert shown.low is not None and shown.high is not None
    assert 0 <= shown.low < 6 / 70 < shown.high <= 0.1 + 1e-12
    same = gain("x", one, one, ">= 0.0")
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_without_trl_its_rows_are_left_out_and_a_line_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    said: list[str] = []
    rows = rows_of("run", found, said.append)
    assert {row.name for row in rows} == {name for name in GOALS if "trl" not in name}
    assert any("pip install -e '.[peers]'" in line for line in said)


@pytest.mark.usefixtures("with_trl")
def test_one_that_fails_is_a_row_and_the_others_are_kept() -> None:
    def failing(work: Work) -> Found:
        if work.kind == "online":
            raise RuntimeError("no memory")
        return found(work)

    rows = {row.name: row for row in rows_of("run", failing, lambda _: None)}
    assert rows["distill.by_source"].error == "RuntimeError: no memory"
    assert len(rows) == len(GOALS) - 1


def test_rows_are_kept_where_the_other_command_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill_bench, "rows_of", lambda *_: [_row(1.0)])
    (tmp_path / "main" / "draft").mkdir(parents=True)
    (tmp_path / "main" / "draft" / "manifest.json").write_text("{}")
    assert main(["--outputs", str(tmp_path), "--only", "e2e"]) == 0
    assert not (tmp_path / DISTILL_ROWS).exists()
    assert main(["--outputs", str(tmp_path)]) == 0
    assert read_rows(tmp_path / DISTILL_ROWS) == [_row(1.0)]
    console = Console(record=True, width=200, quiet=True)
    bench(tmp_path / "main", tmp_path, benchmarks={"distill": distill}, console=console)
    (shown,) = json.loads((tmp_path / "bench" / "bench.json").read_text("utf-8"))
    assert (shown["name"], shown["value"]) == ("distill.x", 1.0)


def test_without_a_draft_or_rows_the_way_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--outputs", str(tmp_path)]) == 2
    assert "make distill" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"python -m train\.bench"):
        distill(tmp_path / "main", tmp_path)


def test_rows_survive_the_disk(tmp_path: Path) -> None:
    rows = [_row(1.5), Row(name="distill.y", value=None, unit="", command="c", error="no luck")]
    write_rows(tmp_path / "rows.json", rows)
    assert read_rows(tmp_path / "rows.json") == rows


def _row(value: float) -> Row:
    return Row(name="distill.x", value=value, unit="x", to_reach=">= 1", command="make bench")


# ---------------------------------------------------------------- the peer


def test_the_peer_learns_from_the_positions_that_we_learn_from() -> None:
    rows: list[Any] = [made_up_row(0, 4, 6, record_prompt=True), made_up_row(1, 3, 9)]
    batch = padded(rows)
    for number, row in enumerate(rows):
        text = torch.cat([row.prompt, row.generated])
        length = int(batch["attention_mask"][number].sum())
        assert torch.equal(batch["input_ids"][number, :length], text) and length == len(text)
        labelled = (batch["labels"][number] != IGNORED).nonzero().flatten().tolist()
        assert labelled == list(range(length - row.num_laws, length))
        assert torch.equal(batch["labels"][number, labelled], text[-row.num_laws :])


def test_the_peers_rate_follows_our_schedule_in_time() -> None:
    config = OptimConfig(warmup_share=0.1, decay_share=0.5)
    assert spent_rate(0.05, config) == pytest.approx(0.5, abs=0.02)
    assert spent_rate(0.3, config) == 1.0
    assert spent_rate(0.75, config) == pytest.approx(0.5, abs=0.02)
    assert 0 < spent_rate(1.2, config) < 0.01


def test_the_product_never_imports_the_peer() -> None:
    assert "trl" not in sys.modules
