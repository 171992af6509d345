"""Console, events.jsonl and W&B say the same; W&B never stands in a run's way."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from rich.console import Console

import conf.console
from conf.choices import TrackerKind
from conf.console import Screen, Value
from conf.groups import TargetConfig, TrackerConfig
from conf.run import Run
from conf.schema import Config
from conf.tracking import Tracker, open_tracker
from tests.offline_wandb import OfflineRun, read_offline_runs


@pytest.fixture(autouse=True)
def nobody_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No credentials, no wandb settings of the person who runs the tests, a fresh wandb session."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["RANK"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-home"))
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "outputs" / "toy"
    folder.mkdir(parents=True)
    return Run(folder=folder, store=tmp_path / "outputs" / ".store", seed=0, name="toy run=1")


def configured(kind: TrackerKind = TrackerKind.wandb) -> Config:
    tracker = TrackerConfig(kind=kind, project="tests", tags=["unit"])
    return Config(target=TargetConfig(path="toy"), tracker=tracker)


def screen() -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    return Screen(Console(file=file, width=120)), file


def lines(run: Run, kind: str = "") -> list[dict[str, Any]]:
    text = (run.folder / "events.jsonl").read_text(encoding="utf-8")
    tree = [json.loads(line) for line in text.splitlines()]
    return [line for line in tree if not kind or line["kind"] == kind]


def only_part(run: Run) -> OfflineRun:
    (part,) = read_offline_runs(run.folder)
    return part


def write_artifact(folder: Path, fingerprint: str) -> None:
    (folder / "shards").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"fingerprint": fingerprint}))
    (folder / "shards" / "train-0.safetensors").write_bytes(b"0" * 1000)
    (folder / ".half.tmp").write_bytes(b"")


# ---------------------------------------------------------------- the same everywhere


def test_console_jsonl_and_wandb_have_the_same_events(run: Run) -> None:
    shown, console = screen()
    logged: list[tuple[str, dict[str, Any], int | None]] = [
        ("generate/speed", {"tokens_per_second": 431.25, "device": "cpu"}, 64),
        ("distill/train", {"loss": 1.5, "tokens": 1024}, 1),
        ("distill/train", {"loss": 1.25, "tokens": 2048}, 2),
        ("distill/validation", {"expected_acceptance": 0.4123}, 2),
        ("evaluate/cost", {"c": 0.15}, None),
    ]
    with open_tracker(configured(), run, shown) as tracker:
        for name, values, step in logged:
            tracker.event(name, values, step=step)

    assert [(e["name"], e["values"], e["step"]) for e in lines(run, "event")] == logged
    part = only_part(run)
    assert part.history == [
        {f"{name}/{key}": value for key, value in values.items()}
        | ({f"{name.split('/')[0]}/step": step} if step is not None else {})
        for name, values, step in logged
    ]
    assert part.axes == {"distill/*": "distill/step", "generate/*": "generate/step"}
    assert part.steps == [i for i, line in enumerate(lines(run)) if line["kind"] == "event"]
    for text in ("distill/train", "step 2", "loss 1.250", "tokens 2048", "0.4123", "device cpu"):
        assert text in console.getvalue()


def test_the_wandb_run_is_the_runs(run: Run) -> None:
    with open_tracker(configured(), run, screen()[0]):
        pass
    part = only_part(run)
    assert (part.name, part.project, part.tags) == ("toy run=1", "tests", ["unit"])
    assert part.id == (run.folder / "wandb_id").read_text()
    assert part.config["optim"]["name"] == "adamw"
    assert part.exit_code == 0


def test_non_finite_values_stay_visible(run: Run) -> None:
    shown, console = screen()
    with open_tracker(configured(), run, shown) as tracker:
        tracker.event("distill/train", {"loss": math.nan, "norm": math.inf, "x": -math.inf}, step=1)
    assert lines(run, "event")[0]["values"] == {"loss": "nan", "norm": "inf", "x": "-inf"}
    row = only_part(run).history[0]
    assert math.isnan(row["distill/train/loss"])
    assert (row["distill/train/norm"], row["distill/train/x"]) == (math.inf, -math.inf)
    assert "loss nan" in console.getvalue()


def test_numpy_scalars_are_numbers(run: Run) -> None:
    with open_tracker(configured(), run, screen()[0]) as tracker:
        values: dict[str, Any] = {"a": np.float32(0.5), "b": np.int64(3)}
        tracker.event("distill/train", values, step=1)
    assert lines(run, "event")[0]["values"] == {"a": 0.5, "b": 3}
    assert only_part(run).history[0] == {
        "distill/train/a": 0.5,
        "distill/train/b": 3,
        "distill/step": 1,
    }


def test_summary_table_and_images(run: Run) -> None:
    from PIL import Image

    plot = run.folder / "report" / "speedup.png"
    plot.parent.mkdir()
    Image.new("RGB", (4, 4)).save(plot)
    columns = ["category", "speedup"]
    rows: list[list[Value]] = [["chat", 1.31], ["code", None]]
    shown, console = screen()
    with open_tracker(configured(), run, shown) as tracker:
        tracker.summary({"best_speedup": 1.31, "best_gamma": 2})
        tracker.table("report/results", columns, rows)
        tracker.images({"report/speedup": plot})

    part = only_part(run)
    assert part.summary["best_speedup"] == 1.31
    assert part.summary["best_gamma"] == 2
    assert lines(run, "summary")[0]["values"] == {"best_speedup": 1.31, "best_gamma": 2}

    table = part.history[0]["report/results"]
    stored = json.loads((part.folder / "files" / table["path"]).read_text())
    assert (stored["columns"], stored["data"]) == (columns, rows)
    assert (lines(run, "table")[0]["columns"], lines(run, "table")[0]["rows"]) == (columns, rows)

    image = part.history[1]["report/speedup"]
    assert (part.folder / "files" / image["path"]).read_bytes() == plot.read_bytes()
    assert lines(run, "images")[0]["values"] == {"report/speedup": "report/speedup.png"}
    assert all(text in console.getvalue() for text in ("category", "chat", "1.310", "best_gamma 2"))


def test_artifacts_say_what_they_are_made_of_and_copy_no_data(run: Run, tmp_path: Path) -> None:
    write_artifact(run.store / "lessons-1", "feed")
    (run.folder / "lessons").symlink_to(run.store / "lessons-1", target_is_directory=True)
    write_artifact(run.folder / "draft", "beef")
    with open_tracker(configured(), run, screen()[0]) as tracker:
        tracker.artifact("lessons", run.folder / "lessons", metadata={"num_rows": 12})
        tracker.artifact("draft", run.folder / "draft", uses=["lessons"])

    lessons, draft = only_part(run).artifacts
    assert (lessons.type, lessons.name) == ("lessons", "toy-run-1-lessons")
    assert sorted(lessons.aliases) == ["feed", "latest"]
    assert lessons.metadata == {"num_rows": 12, "fingerprint": "feed", "uses": {}}
    assert (draft.type, draft.metadata["uses"]) == ("draft", {"lessons": "feed"})
    assert list(lessons.files) == ["manifest.json"]
    shard = run.store / "lessons-1" / "shards" / "train-0.safetensors"
    assert lessons.references == {"shards/train-0.safetensors": shard.as_uri()}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and is_copy(path, run)]
    written = lines(run, "artifact")
    assert [(line["name"], line["folder"]) for line in written] == [
        ("lessons", "lessons"),
        ("draft", "draft"),
    ]
    assert (written[1]["fingerprint"], written[1]["uses"]) == ("beef", {"lessons": "feed"})


def is_copy(path: Path, run: Run) -> bool:
    made = (run.store, run.folder / "draft", run.folder / "lessons")
    return path.stat().st_size == 1000 and not any(path.is_relative_to(place) for place in made)


def test_messages_are_said_and_written(run: Run) -> None:
    shown, console = screen()
    with open_tracker(configured(TrackerKind.none), run, shown) as tracker:
        tracker.message("lessons [12 rows] are complete: skipped.")
    assert "lessons [12 rows] are complete: skipped." in console.getvalue()
    (line,) = lines(run)
    assert line["text"] == "lessons [12 rows] are complete: skipped."
    assert line["time"].endswith("+00:00")


# ---------------------------------------------------------------- continuing


def test_a_rerun_continues_the_wandb_run(run: Run) -> None:
    for step in (1, 2):
        with open_tracker(configured(), run, screen()[0]) as tracker:
            tracker.event("distill/train", {"loss": 1.0 / step}, step=step)
    first, second = read_offline_runs(run.folder)
    assert first.id == second.id
    assert second.resume
    assert second.history == [{"distill/train/loss": 0.5, "distill/step": 2}]
    assert second.steps[0] > first.steps[-1]
    assert [line["step"] for line in lines(run, "event")] == [1, 2]


def test_a_line_that_a_killed_process_left_unfinished_stays_alone(run: Run) -> None:
    events = run.folder / "events.jsonl"
    events.write_text('{"kind": "event"}\n{"kind": "ev')
    with open_tracker(configured(TrackerKind.none), run, screen()[0]) as tracker:
        tracker.event("distill/train", {"loss": 1.0})
    assert events.read_text().splitlines()[1] == '{"kind": "ev'
    assert json.loads(events.read_text().splitlines()[2])["values"] == {"loss": 1.0}


def test_an_exception_marks_the_wandb_run_failed(run: Run) -> None:
    with pytest.raises(ZeroDivisionError), open_tracker(configured(), run, screen()[0]):
        raise ZeroDivisionError
    assert only_part(run).exit_code == 1


# ---------------------------------------------------------------- online, offline, neither


def test_offline_says_once_where_the_run_lies_and_how_to_upload_it(run: Run) -> None:
    shown, console = screen()
    with open_tracker(configured(), run, shown):
        pass
    assert console.getvalue().count("not logged in") == 1
    assert console.getvalue().count("wandb sync") == 1
    pattern = console.getvalue().split("wandb sync ")[1].strip()
    assert [path.as_posix() for path in Path("/").glob(pattern[1:])] == [str(only_part(run).folder)]


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_mode_is_respected_and_never_asks(
    run: Run, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    shown, console = screen()
    with open_tracker(configured(), run, shown):
        pass
    reason = {"offline": "WANDB_MODE=offline", "online": "not logged in"}[mode]
    assert f"W&B is offline ({reason})" in console.getvalue()


def test_disabled_records_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    shown, console = screen()
    with open_tracker(configured(), run, shown) as tracker:
        tracker.event("distill/train", {"loss": 1.0}, step=1)
    assert "W&B is off (WANDB_MODE=disabled)." in console.getvalue()
    assert not (run.folder / "wandb").exists()


@pytest.mark.parametrize("place", ["WANDB_API_KEY", "netrc"])
def test_logged_in_means_online(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """Seen by the server asked: one on this machine that refuses everybody."""
    key = "0123456789" * 4
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody answers
    if place == "netrc":
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1:9\n  login user\n  password {key}\n")
    else:
        monkeypatch.setenv(place, key)
    monkeypatch.setattr("conf.dashboard.ONLINE_SECONDS", 1)
    shown, console = screen()
    with open_tracker(configured(), run, shown) as tracker:
        tracker.event("distill/train", {"loss": 1.0}, step=1)
    assert "the server did not accept the run" in console.getvalue()
    assert key not in console.getvalue()
    assert only_part(run).history == [{"distill/train/loss": 1.0, "distill/step": 1}]


def test_a_wandb_that_cannot_start_gets_one_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wandb, "init", disk_full)
    shown, console = screen()
    with open_tracker(configured(), run, shown) as tracker:
        tracker.event("distill/train", {"loss": 1.0}, step=1)
    assert console.getvalue().count("W&B") == 2  # one sentence and its way out
    assert "No space left on device" in console.getvalue()
    assert lines(run, "event")[0]["values"] == {"loss": 1.0}


def test_a_wandb_that_breaks_later_gets_one_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError("wandb-core is gone")

    shown, console = screen()
    with open_tracker(configured(), run, shown) as tracker, monkeypatch.context() as broken:
        broken.setattr(wandb.Run, "log", gone)
        for step in range(3):
            tracker.event("distill/train", {"loss": 1.0}, step=step)
    assert console.getvalue().count("W&B did not take the events") == 1
    assert len(lines(run, "event")) == 3


def test_tracker_none_never_imports_wandb(run: Run) -> None:
    program = f"""
import sys
from pathlib import Path
from conf.run import Run
from conf.choices import TrackerKind
from conf.groups import TrackerConfig
from conf.schema import Config
from conf.tracking import open_tracker
folder = Path({str(run.folder)!r})
run = Run(folder=folder, store=folder, seed=0, name="toy")
with open_tracker(Config(tracker=TrackerConfig(kind=TrackerKind.none)), run) as tracker:
    tracker.event("distill/train", dict(loss=1.0), step=1)
    tracker.table("a/b", ["c"], [[1]])
    tracker.artifact("draft", folder)
sys.exit("wandb" in sys.modules or "torch" in sys.modules)
"""
    root = Path(conf.console.__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
    assert not (run.folder / "wandb").exists()


def test_nothing_of_wandbs_own_is_printed(run: Run) -> None:
    program = f"""
from pathlib import Path
from conf.run import Run
from conf.schema import Config
from conf.tracking import open_tracker
folder = Path({str(run.folder)!r})
run = Run(folder=folder, store=folder, seed=0, name="toy")
with open_tracker(Config(), run) as tracker:
    tracker.event("distill/train", dict(loss=1.0), step=1)
    tracker.table("a/b", ["c"], [[1]])
    raise SystemExit("stop")
"""
    root = Path(conf.console.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "wandb:" not in done.stderr
    assert "Traceback" not in done.stderr
    assert only_part(run).exit_code == 1


def test_other_ranks_are_silent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    shown, console = screen()
    with open_tracker(configured(), run, shown) as tracker:
        use_everything(tracker, run.folder)
    assert console.getvalue() == ""
    assert list(run.folder.iterdir()) == []


def use_everything(tracker: Tracker, folder: Path) -> None:
    tracker.event("distill/train", {"loss": 1.0}, step=1)
    tracker.message("text")
    tracker.summary({"a": 1})
    tracker.table("a/b", ["c"], [[1]])
    tracker.images({"d": folder / "absent.png"})
    tracker.artifact("draft", folder / "absent", uses=["lessons"])
    with tracker.progress("title", 2, "rows") as bar:
        bar.advance()
        bar.describe("text")
