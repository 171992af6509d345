"""A recording on disk: shards as they fill up, what is there when a run goes on, what is in it in
the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from conf.contracts import MANIFEST, Lessons, SplitLessons
from conf.errors import UserError
from data.codec import cut_at_mass
from data.shards import SHARDS, Row, ShardError, check_shard, entry_of, read_shard, write_shard
from models.decoding.autoregressive import Answer
from models.jobs import Job


class RecordingStopped(UserError):
    """The disk takes no more. The message says what is kept and how to go on."""


@dataclass
class Writer:
    """Collects finished rows and writes them in shards; rows with and without hidden states never
    share a file.
    """

    folder: Path
    vocab_size: int
    rows_per_shard: int
    rank: int
    num_written: int = 0
    _waiting: dict[tuple[str, bool], list[Row]] = field(default_factory=lambda: defaultdict(list))
    _number: int = 0

    def add(self, split: str, row: Row) -> None:
        """Take a row, and write its shard when that is complete."""
        rows = self._waiting[split, row.hidden is not None]
        rows.append(row)
        if len(rows) >= self.rows_per_shard:
            self._write(split, rows)

    def close(self) -> None:
        """Write what is left."""
        for (split, _), rows in self._waiting.items():
            if rows:
                self._write(split, rows)

    def _write(self, split: str, rows: list[Row]) -> None:
        while (path := self.folder / _name(split, self.rank, self._number)).exists():
            self._number += 1
        try:
            write_shard(path, rows, self.vocab_size)
        except OSError as refused:
            _remove_unfinished(self.folder, self.rank)
            raise RecordingStopped(
                f"{path}: {refused.strerror}. The {self.num_written} answers that this command"
                " recorded before are kept. Make room there, and the same command goes on from"
                " them."
            ) from None
        self.num_written += len(rows)
        rows.clear()


def row_of(answer: Answer, category: str, mass: float) -> Row:
    """What is kept of an answer: of each law, the likeliest ids that hold `mass`."""
    return Row(
        index=answer.index,
        category=category,
        temperature=answer.temperature,
        prompt=torch.tensor(answer.prompt),
        generated=torch.tensor(answer.tokens),
        top_ids=answer.ids_MK,
        top_log_p=cut_at_mass(answer.log_probabilities_MK, mass),
        hidden=None if answer.hidden_ND is None else answer.hidden_ND.bfloat16(),
    )


def written(
    answers: Iterable[Answer], jobs: Sequence[Job], writer: Writer, mass: float
) -> Iterator[Answer]:
    """Write each answer to a job and hand it on. When no more come, or one fails, what is left is
    written too.
    """
    by_index = {job.index: job for job in jobs}
    try:
        for answer in answers:
            job = by_index[answer.index]
            writer.add(job.split, row_of(answer, job.category, mass))
            yield answer
    finally:
        writer.close()


def _name(split: str, rank: int, number: int) -> str:
    return f"{split}-{rank:03d}-{number:05d}.safetensors"


def _remove_unfinished(folder: Path, rank: int) -> None:
    for path in folder.glob(f".*-{rank:03d}-*.tmp"):
        path.unlink(missing_ok=True)


def answers_on_disk(folder: Path, rank: int, say: Callable[[str], None]) -> set[int]:
    """Numbers of the answers in complete shards. A broken shard is removed, and so is what a killed
    process of this rank was writing: their answers are generated again.
    """
    _remove_unfinished(folder, rank)
    done: set[int] = set()
    for path in sorted(folder.glob(SHARDS)):
        try:
            found = {row.index for row in read_shard(path)}
        except ShardError as broken:
            say(f"generate: {broken}")
            path.unlink(missing_ok=True)
            continue
        if found & done:  # two commands at a time wrote to this folder
            say(f"generate: {path} holds answers that another file holds, and is left out.")
            path.unlink(missing_ok=True)
            continue
        done |= found
    if done:
        say(f"generate: {len(done)} answers are on disk already, going on from there.")
    return done


def reopen_if_damaged(folder: Path, lessons: Lessons, say: Callable[[str], None]) -> bool:
    """Whether files of a finished recording are missing or not what was written. They are removed,
    and the manifest with them, so that only their answers are generated again.
    """
    damaged = []
    for shard in (shard for split in lessons.splits.values() for shard in split.shards):
        try:
            check_shard(folder, shard)
        except ShardError:
            damaged.append(folder / shard.file)
    for path in damaged:
        say(f"generate: {path} is missing or damaged; its answers are generated again.")
    if damaged:
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in damaged:
            path.unlink(missing_ok=True)
    return bool(damaged)


def answers_to(folder: Path, wanted: Collection[int]) -> dict[int, list[int]]:
    """Tokens of the recorded answers of these numbers."""
    if not wanted:
        return {}
    return {
        row.index: row.generated.tolist()
        for path in sorted(folder.glob(SHARDS))
        for row in read_shard(path)
        if row.index in wanted
    }


def take_stock(folder: Path, stop_ids: Collection[int]) -> tuple[dict[str, SplitLessons], float]:
    """Read every shard back and count what is in it; also the mean probability mass the recorded
    ids cover.
    """
    splits = {}
    mass = total = 0.0
    for split in ("train", "validation"):
        shards, categories, temperatures = [], Counter[str](), Counter[str]()
        seen: set[tuple[str, tuple[int, ...]]] = set()
        num = Counter[str]()
        for path in sorted(folder.glob(f"{split}-*.safetensors")):
            rows = read_shard(path)
            shards.append(entry_of(path, rows, path.read_bytes()))
            for row in rows:
                answer = row.generated.tolist()
                key = (row.category, tuple(answer))
                num["rows"] += 1
                num["tokens"] += len(answer)
                num["prompt"] += len(row.prompt)
                num["truncated"] += answer[-1] not in stop_ids
                num["empty"] += len(answer) == 1 and answer[0] in stop_ids
                num["looping"] += is_looping(answer)
                num["duplicate"] += key in seen
                seen.add(key)
                categories[row.category] += 1
                temperatures[str(row.temperature)] += len(answer)
                mass += float(row.top_log_p.exp().sum())
                num["laws"] += row.num_laws
        splits[split] = SplitLessons(
            shards=shards,
            num_rows=num["rows"],
            num_tokens=num["tokens"],
            num_prompt_tokens=num["prompt"],
            num_laws=num["laws"],
            num_truncated=num["truncated"],
            num_empty=num["empty"],
            num_looping=num["looping"],
            num_duplicates=num["duplicate"],
            rows_by_category=dict(sorted(categories.items())),
            tokens_by_temperature=dict(sorted(temperatures.items())),
        )
        total += num["laws"]
    return splits, mass / max(total, 1)


def is_looping(tokens: list[int]) -> bool:
    """Whether the last 32 tokens repeat a pattern of at most 8."""
    tail = tokens[-32:]
    return len(tail) == 32 and any(tail[period:] == tail[:-period] for period in range(1, 9))
