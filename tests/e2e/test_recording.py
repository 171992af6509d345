"""A recording survives what can happen to it: killed processes, damaged files, a full disk."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conf.contracts import Lessons
from conf.groups import GenerateConfig
from conf.schema import as_tree
from data.shards import Row, read_split
from models.jobs import SPLITS, jobs_of
from tests.commands import ROOT, TIMEOUT, Place, tiny_place, wait_for

NUM_ANSWERS = 36 + 8
NAMESPACE = ("--user", "--map-root-user", "--mount")  # in which anybody may mount
FILL_UP = """
disk=$1/disk kept=$1/kept before=$2; shift 2
mount -t tmpfs -o size=8m tmpfs "$disk" || exit
cp -r "$before" "$disk/outputs" || exit
"$@" & command=$!
until ls "$disk"/outputs/main/lessons/*.safetensors; do
    kill -0 $command || exit
    sleep 0.01
done >/dev/null 2>&1
cat /dev/zero > "$disk/ballast" 2>/dev/null
wait $command; echo "left with $?" >&2
echo --- >&2; ls -A "$disk/outputs/main/lessons" >&2; echo --- >&2
rm "$disk/ballast"
"$@"; echo "left with $?" >&2
cp -r "$disk/outputs" "$kept"
"""


@dataclass(frozen=True)
class Recorded:
    """A place, and what its recording holds when nothing happens to it."""

    place: Place
    folder: Path
    answers: set[Any]
    said: str  # by the command that recorded it

    def copy(self, name: str) -> Path:
        """The run under another name, in outputs of its own."""
        outputs = self.place.folder / name
        shutil.copytree(self.place.outputs, outputs, symlinks=True)
        return outputs / "main"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    place = tiny_place(tmp_path_factory.mktemp("recording"))
    place.run("stage=prepare", "tracker=none")
    done = place.run("stage=generate", "tracker=none")
    folder = place.outputs / "main"
    return Recorded(place, folder, contents(folder / "lessons"), done.stderr)


def contents(lessons: Path) -> set[Any]:
    """What a recording holds, each answer once."""
    manifest = Lessons.read(lessons)
    rows = [row for split in manifest.splits.values() for row in read_split(lessons, split)]
    assert sorted(row.index for row in rows) == list(range(NUM_ANSWERS)), "an answer twice, or none"
    return {by_content(row) for row in rows}


def by_content(row: Row) -> tuple[Any, ...]:
    ids = (tuple(row.prompt.tolist()), tuple(row.generated.tolist()))
    return row.index, row.category, row.temperature, *ids


def files(lessons: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in lessons.glob("*.safetensors")}


def has_more_than(lessons: Path, number: int) -> bool:
    return len(files(lessons)) > number


# ---------------------------------------------------------------- killed


def test_a_killed_generation_goes_on_without_duplicates(recorded: Recorded) -> None:
    """Killed again and again, each time after one more file: none is lost, no answer is twice."""
    outputs = recorded.place.folder / "killed"
    lessons = outputs / "main" / "lessons"
    settings = (f"outputs={outputs}", "tracker=none", "generate.max_new_tokens=32")
    recorded.place.run(*settings, "stage=prepare")
    kept: dict[str, bytes] = {}
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, *recorded.place.command(*settings, "stage=generate")],
            cwd=ROOT,
            env=recorded.place.environment(),
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(partial(has_more_than, lessons, len(kept)), process)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        now = files(lessons)
        assert {name: now.get(name) for name in kept} == kept
        kept = now
        assert not (lessons / "manifest.json").exists()
    # as a process leaves it that is killed while it writes
    (lessons / ".train-000-00099.safetensors.1.tmp").write_bytes(b"part of a file")
    done = recorded.place.run(*settings, "stage=generate")
    assert "answers are on disk already, going on from there" in done.stderr
    assert not list(lessons.glob(".*.tmp"))
    now = files(lessons)
    assert {name: now[name] for name in kept} == kept
    assert contents(lessons) == recorded.answers


# ---------------------------------------------------------------- damaged


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 4
    path.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_a_damaged_file_is_named_and_it_alone_is_recorded_again(
    recorded: Recorded, how: str, finished: bool
) -> None:
    folder = recorded.copy(f"{how}-{finished}")
    lessons = folder / "lessons"
    before = {path: path.stat().st_mtime_ns for path in lessons.glob("*.safetensors")}
    victim = sorted(before)[1]
    damage(victim, how)
    settings = (f"outputs={folder.parent}", "tracker=none")
    if finished:  # what reads the files says so; it does not make them again
        refused = recorded.place.run(*settings, "stage=distill", code=2).stderr
        assert f"{victim.name}: missing, cut short or changed" in refused
        assert "Rerun stage=generate" in refused
    else:
        (lessons / "manifest.json").unlink()
    done = recorded.place.run(*settings, "stage=generate")
    if finished or how != "gone":
        assert victim.name in done.stderr
    changed = [path for path in before if path.stat().st_mtime_ns != before[path]]
    assert changed == [victim]
    assert contents(lessons) == recorded.answers


# ---------------------------------------------------------------- room on the disk


def test_what_a_recording_takes_is_said_before_and_not_exceeded(recorded: Recorded) -> None:
    said = re.search(
        rf"{NUM_ANSWERS} answers to record, about (\S+) MiB, at most (\S+) MiB; \S+ GiB are free",
        recorded.said,
    )
    assert said is not None
    expected, most = map(float, said.groups())
    found = sum(map(len, files(recorded.folder / "lessons").values())) / 2**20
    assert found <= most + 0.05 < 3 * found  # it is said to one decimal
    assert expected / 2 < found < expected * 2
    manifest = Lessons.read(recorded.folder / "lessons")
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    num_laws = sum(split.num_laws for split in manifest.splits.values())
    plain = sum(shard.num_bytes - shard.num_hidden_bytes for shard in shards)
    assert manifest.bytes_per_token == pytest.approx(plain / num_laws)
    assert sum(shard.num_hidden_bytes for shard in shards) == sum(
        len(row.generated) * 32 * 2
        for row in read_split(recorded.folder / "lessons", manifest.splits["train"])
    )


def test_a_recording_that_may_be_larger_than_allowed_is_refused(recorded: Recorded) -> None:
    settings = ("name=large", "tracker=none", "generate.max_gib=0.0001")
    recorded.place.run(*settings, "stage=prepare")
    refused = recorded.place.run(*settings, "stage=generate", code=2).stderr
    assert re.search(r"generate.max_gib=0.0001: up to \S+ MiB would be recorded. Raise it", refused)


# ---------------------------------------------------------------- a full disk


@pytest.mark.skipif(
    subprocess.run(["unshare", *NAMESPACE, "true"], capture_output=True).returncode != 0
    if shutil.which("unshare")
    else True,
    reason="a small file system cannot be mounted here",
)
def test_a_full_disk_stops_with_a_sentence_and_the_same_command_goes_on(
    recorded: Recorded, tmp_path: Path
) -> None:
    """On a real file system of 8 MiB that somebody else fills up once the first file is there."""
    (tmp_path / "disk").mkdir()
    before = recorded.copy("before").parent
    shutil.rmtree((before / "main" / "lessons").resolve())
    settings = (f"outputs={tmp_path}/disk/outputs", "tracker=none", "generate.max_new_tokens=128")
    command = [sys.executable, *recorded.place.command(*settings, "stage=generate")]
    shell = ["unshare", *NAMESPACE, "sh", "-c", FILL_UP, "sh", str(tmp_path), str(before)]
    done = subprocess.run(
        [*shell, *command],
        cwd=ROOT,
        env=recorded.place.environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    full, again = done.stderr.split("left with 2", 1)
    last = full.splitlines()[-1]
    assert re.match(r"error: .*safetensors: No space left on device\. The \d+ answers", last)
    assert "the same command goes on" in last
    left = again.split("---")[1].split()  # the complete files, and nothing half written
    assert left and all(re.fullmatch(r"(train|validation)-000-\d+\.safetensors", n) for n in left)
    assert "answers are on disk already, going on from there" in again
    assert again.rstrip().endswith("left with 0")
    contents(tmp_path / "kept" / "main" / "lessons")


def test_validation_answers_keep_their_temperatures_when_the_mix_changes() -> None:
    """And recordings without such temperatures stay what they were before there were any."""
    prompts = [(split, n, "chat", [5, 6], None) for split in SPLITS for n in range(3)]

    def temperatures(**settings: list[float]) -> dict[str, list[float]]:
        jobs = jobs_of(GenerateConfig(**settings), prompts)
        return {split: [job.temperature for job in jobs if job.split == split] for split in SPLITS}

    assert temperatures(temperatures=[0.5], validation_temperatures=[0.7, 1.0]) == {
        "train": [0.5, 0.5, 0.5],
        "validation": [0.7, 1.0, 0.7],
    }
    assert temperatures(temperatures=[0.0, 0.5])["validation"] == [0.0, 0.5, 0.0]
    for own in ([], [1.0]):
        settings = GenerateConfig(validation_temperatures=own)
        made_by = settings.what_determines(as_tree(settings))
        assert ("validation_temperatures" in made_by) == bool(own)
