"""Benchmarks of the stage generate: the target of the last run answers its training prompts once
more, as the stage does it and by transformers' generate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from conf.contracts import Lessons
from conf.groups import GenerateConfig
from conf.schema import Config
from data.shards import read_split
from eval.bench import Row
from eval.chat import target_of
from eval.plain import plain_generate
from models.decoding.autoregressive import Generator, Stopwatch
from models.decoding.engine import Engine, synchronise
from models.generate import open_generator, record
from models.jobs import Job
from models.load import Target, device_of, load_model, open_target
from models.recording import Writer

COMMAND = "make bench"
NUM_PROMPTS = 64
# half of the prompts, as in a long recording: rows that have ended are replaced, and the rows of a
# step have prompts of like lengths
BATCH_SIZE = 32
PEER_BATCH_SIZES = (16, 32, 64)
TRIAL_TOKENS = 16  # of each prompt in a warm-up, and while the peer's batch size is chosen


class TimedEngine(Engine):
    """Counts the seconds of the model's own calls, the device's work included."""

    def __init__(self, model: PreTrainedModel, **options: Any):
        super().__init__(model, **options)
        self.calls = Stopwatch()

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, **options: Any) -> Tensor:
        """As the engine's own."""
        with self.calls:
            logits = super().forward(tokens_BT, positions_BT, **options)
            synchronise(self.device)
        return logits


@dataclass
class Spent:
    """Seconds, by what they were spent on, and what came of it."""

    total: float
    num_tokens: int
    calls: float = 0.0
    recording: float = 0.0


@dataclass
class Bench:
    """The target twice, for our compiled calls and for transformers' loop, and what to answer."""

    config: Config
    target: Target
    plain: PreTrainedModel
    generator: Generator
    engine: TimedEngine
    jobs: list[Job]

    @classmethod
    def load(cls, folder: Path) -> Bench:
        """The target and first prompts of a run; raises ContractError when it has no recording."""
        lessons = Lessons.read(folder / "lessons")
        settings = GenerateConfig(**lessons.determined_by["generate"])
        config = Config(
            target=target_of(folder),
            generate=replace(settings, batch_size=min(BATCH_SIZE, settings.batch_size)),
        )
        rows = sorted(
            read_split(folder / "lessons", lessons.splits["train"]), key=lambda row: row.index
        )
        jobs = [
            Job(row.index, "train", row.category, row.prompt.tolist(), 1.0, keep_hidden=False)
            for row in rows[:NUM_PROMPTS]
        ]
        target, device = open_target(config), device_of(config.runtime)
        model, plain = (load_model(target, config.target, device) for _ in range(2))
        generator = open_generator(config, target, model, jobs, TimedEngine)
        assert isinstance(generator.engine, TimedEngine)
        return cls(config, target, plain, generator, generator.engine, jobs)

    def ours(self, max_new_tokens: int) -> Spent:
        """Answer, record and write, as the stage does."""
        settings = replace(self.config.generate, max_new_tokens=max_new_tokens)
        config = replace(self.config, generate=settings)
        self.generator.max_new_tokens = max_new_tokens
        self.engine.calls, self.generator.recording = Stopwatch(), Stopwatch()
        start = time.perf_counter()
        self.engine.share([job.prompt for job in self.jobs])
        with TemporaryDirectory() as folder:
            writer = Writer(
                Path(folder), self.target.config.vocab_size, settings.rows_per_shard, rank=0
            )
            answers = record(config, self.generator, self.jobs, writer)
            num_tokens = sum(len(answer.tokens) for answer in answers)
        return Spent(
            total=time.perf_counter() - start,
            num_tokens=num_tokens,
            calls=self.engine.calls.seconds,
            recording=self.generator.recording.seconds,
        )

    def theirs(self, prompts: Sequence[list[int]], batch_size: int, max_new_tokens: int) -> Spent:
        """Answer by generate, prompts of like lengths together."""
        ordered = sorted(prompts, key=len, reverse=True)
        start = time.perf_counter()
        num_tokens = sum(
            plain_generate(
                self.plain,
                self.target,
                ordered[first : first + batch_size],
                max_new_tokens=max_new_tokens,
                sample=True,
            )
            for first in range(0, len(ordered), batch_size)
        )
        return Spent(time.perf_counter() - start, num_tokens)

    def best_batch_size(self) -> int:
        """At which generate takes the least time for a prompt and its first new tokens."""
        prompts = [job.prompt for job in self.jobs]
        sizes = [size for size in PEER_BATCH_SIZES if size <= len(prompts)] or [len(prompts)]
        self.theirs(prompts[:1], 1, TRIAL_TOKENS)  # what the first call loads must not count
        times = {
            size: self.theirs(prompts[:size], size, TRIAL_TOKENS).total / size for size in sizes
        }
        return min(times, key=times.__getitem__)


def generate(folder: Path, _outputs: Path) -> Iterator[Row]:
    """The three figures of one recording, after a short one that compiles its calls."""
    bench = Bench.load(folder)
    bench.ours(TRIAL_TOKENS)
    ours = bench.ours(bench.config.generate.max_new_tokens)
    bench.generator.close()
    prompts = [job.prompt for job in bench.jobs]
    theirs = bench.theirs(prompts, bench.best_batch_size(), bench.config.generate.max_new_tokens)
    ratio = (ours.num_tokens / ours.total) / (theirs.num_tokens / theirs.total)
    yield _row("vs_hf", ratio, "x", ">= 3")
    # of a run that would do nothing but these calls of the model
    yield _row("forward_share", ours.calls / ours.total, "share", ">= 0.85")
    yield _row("recording_cost", ours.recording / ours.total, "share", "<= 0.05")


def _row(name: str, value: float, unit: str, to_reach: str) -> Row:
    return Row(name=f"generate.{name}", value=value, unit=unit, to_reach=to_reach, command=COMMAND)
