"""Stage generate: the target answers the prompts, and its distribution at every generated token is
kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from conf import choices
from conf.contracts import Corpus, Lessons
from conf.run import Resume, Run, determined, process_rank, provenance
from conf.schema import Config
from conf.tracking import Tracker
from data.chat import show_supervision
from data.codec import VERSION
from models.decoding.autoregressive import Answer, Generator, Request
from models.decoding.engine import SHALLOW, Engine
from models.decoding.kernels import use_kernel
from models.jobs import Job, at_their_longest, next_turn, plan_jobs, require_room
from models.load import Target, describe, device_of, load_model, open_target, set_threads
from models.recording import (
    Writer,
    answers_on_disk,
    answers_to,
    reopen_if_damaged,
    row_of,
    take_stock,
)
from models.remote import Remote
from models.with_vllm import Vllm

REPORT_SECONDS = 20.0


def generate(config: Config, run: Run, tracker: Tracker) -> Lessons:
    """Answer every prompt of the corpus and record the target's distributions.

    Rerunning continues after the last complete shard; a finished recording of the same
    configuration is reused, also by other runs. Raises ConfigError when the recording would exceed
    `generate.max_gib` or the free disk space.
    """
    corpus = Corpus.read(run.corpus)
    made_by = determined(config, "generate", "target", corpus=corpus.fingerprint, codec=VERSION)
    made_by["generate"] = config.generate.what_determines(made_by["generate"])
    folder = run.shared("lessons", made_by)
    if run.resume(folder, Lessons, made_by) is Resume.complete:
        lessons = Lessons.read(folder)
        if not reopen_if_damaged(folder, lessons, tracker.message):
            tracker.message(
                f"generate: {lessons.splits['train'].num_tokens} recorded training tokens are"
                " there already."
            )
            # another run may have made them: this one used them
            tracker.artifact(
                "lessons", folder, uses=["corpus"], metadata={"fingerprint": lessons.fingerprint}
            )
            return lessons
    set_threads(config.runtime)
    target = open_target(config)
    jobs, num_skipped = plan_jobs(config, run, target)
    start = time.perf_counter()
    done = answers_on_disk(folder, process_rank(), tracker.message)
    planned = at_their_longest(jobs, config.generate)
    require_room(config, planned, done, target.config, folder, tracker.message)
    teacher = open_teacher(config, target, tracker.message)
    try:
        seconds, num_tokens = _answer_jobs(config, target, teacher, jobs, done, folder, tracker)
    finally:
        teacher.close()
    PartialState().wait_for_everyone()
    if process_rank() != 0:
        PartialState().wait_for_everyone()
        return Lessons.read(folder)
    splits, mean_mass = take_stock(folder, target.stop_ids)
    num_laws = sum(split.num_laws for split in splits.values())
    lessons = Lessons(
        fingerprint=folder.resolve().name.removeprefix("lessons-"),
        determined_by=made_by,
        provenance=provenance(config.seed, teacher.device, time.perf_counter() - start),
        target=describe(target, config.target, teacher.model),
        engine=teacher.manifest(),
        splits=splits,
        num_skipped_prompts=num_skipped,
        num_unanswered=len(planned) - sum(split.num_rows for split in splits.values()),
        top_k=config.generate.top_k,
        mean_recorded_mass=mean_mass,
        bytes_per_token=sum(
            shard.num_bytes - shard.num_hidden_bytes
            for split in splits.values()
            for shard in split.shards
        )
        / max(num_laws, 1),
        tokens_per_second=num_tokens / seconds if seconds else 0.0,
        seconds=round(time.perf_counter() - start, 1),
    )
    lessons.write(folder)
    PartialState().wait_for_everyone()
    _show(lessons, tracker)
    tracker.artifact(
        "lessons", folder, uses=["corpus"], metadata={"fingerprint": lessons.fingerprint}
    )
    return lessons


class Teacher(Protocol):
    """An engine that the target answers with; `model` may be without weights."""

    model: PreTrainedModel
    device: str

    def record(self, jobs: Sequence[Job], writer: Writer) -> Iterator[Answer]:
        """Answer jobs, none of which waits for another, and write what was recorded."""

    def manifest(self) -> dict[str, Any]:
        """What is to be known of the recording."""

    def close(self) -> None:
        """Give back what the engine holds outside this process."""


def open_teacher(config: Config, target: Target, say: Callable[[str], None]) -> Teacher:
    """The engine that the configuration names."""
    match config.generate.engine:
        case choices.Engine.server:
            return Remote(config, target, say)
        case choices.Engine.vllm:
            return Vllm(config, target, say)
        case choices.Engine.builtin:
            return BuiltIn(config, target)


class BuiltIn:
    """Our own engine, with the target's weights in this process."""

    def __init__(self, config: Config, target: Target) -> None:
        self.config, self.target = config, target
        self.model = load_model(target, config.target, device_of(config.runtime))
        self.device = str(self.model.device)

    def record(self, jobs: Sequence[Job], writer: Writer) -> Iterator[Answer]:
        """Answer jobs, none of which waits for another, and write what was recorded."""
        generator = open_generator(self.config, self.target, self.model, jobs)
        try:
            yield from record(self.config, generator, jobs, writer)
        finally:
            generator.close()

    def manifest(self) -> dict[str, Any]:
        """What is to be known of the recording."""
        return {"kind": "builtin"}

    def close(self) -> None:
        """Nothing is held outside this process."""


def _answer_jobs(
    config: Config,
    target: Target,
    teacher: Teacher,
    jobs: list[Job],
    done: set[int],
    folder: Path,
    tracker: Tracker,
) -> tuple[float, int]:
    """Generate what is missing, the first turn of every conversation, then the second and so on;
    returns the seconds spent generating and the tokens generated.
    """
    settings = config.generate
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = process_rank()
    turn = [job for number, job in enumerate(jobs) if number % world == rank]
    mine = at_their_longest(turn, settings)
    writer = Writer(folder, target.config.vocab_size, settings.rows_per_shard, rank)
    num_tokens = 0
    start = last = time.perf_counter()
    with tracker.progress("generate", len(mine), "answers") as bar:
        bar.advance(sum(job.index in done for job in mine))
        while turn:
            missing = [job for job in turn if job.index not in done]
            talked_on = {job.index for job in turn if job.follow_ups}
            said = answers_to(folder, talked_on & done)
            for answer in teacher.record(missing, writer) if missing else ():
                if num_tokens == 0:
                    tracker.message(
                        "generate: one answer, what is learned between brackets: "
                        + _sample(target, answer)
                    )
                if answer.index in talked_on:
                    said[answer.index] = answer.tokens
                num_tokens += len(answer.tokens)
                bar.advance()
                now = time.perf_counter()
                if now - last > REPORT_SECONDS:
                    last = now
                    values = {"tokens": num_tokens, "tokens_per_second": num_tokens / (now - start)}
                    tracker.event("generate", values, step=num_tokens)
            later = (
                next_turn(job, said[job.index], target, config) for job in turn if job.index in said
            )
            turn = [job for job in later if job is not None]
    return (time.perf_counter() - start if num_tokens else 0.0), num_tokens


def open_generator(
    config: Config,
    target: Target,
    model: PreTrainedModel,
    jobs: Sequence[Job],
    engine_class: type[Engine] = Engine,
) -> Generator:
    """What answers these jobs; it has read already what all their prompts begin with. The model's
    layers are changed into those of our kernels, on a CPU.
    """
    use_kernel(model)
    settings = config.generate
    capacity = max(len(job.prompt) for job in jobs) + settings.max_new_tokens
    engine = engine_class(
        model,
        num_rows=min(settings.batch_size, len(jobs)),
        capacity=-(-capacity // 64) * 64,
        # a shallow model is compiled whole, and then the hook that keeps hidden states may not run
        compiled=config.runtime.compile and target.config.num_hidden_layers > SHALLOW,
    )
    engine.share([job.prompt for job in jobs])
    return Generator(
        engine,
        stop_ids=target.stop_ids,
        max_new_tokens=settings.max_new_tokens,
        top_k=settings.top_k,
    )


def record(
    config: Config, generator: Generator, jobs: Sequence[Job], writer: Writer
) -> Iterator[Answer]:
    """Answer the jobs and write what was recorded; yields each answer after that."""
    settings = config.generate
    by_index = {job.index: job for job in jobs}

    def requests() -> Iterator[Request]:
        # rows decoded together read as far back as the longest of them: alike lengths go together,
        # long ones first
        for job in sorted(jobs, key=lambda job: -len(job.prompt)):
            rng = torch.Generator().manual_seed(hash((config.seed, job.index)) % 2**63)
            uniforms = torch.rand(settings.max_new_tokens, generator=rng)
            yield Request(
                job.index,
                job.prompt,
                job.temperature,
                uniforms,
                keep_hidden=job.keep_hidden,
                record_prompt=settings.record_prompts and job.split == "train",
            )

    for answer in generator.answer(requests()):
        job = by_index[answer.index]
        with generator.recording:
            writer.add(job.split, row_of(answer, job.category, settings.mass))
        yield answer
    with generator.recording:
        writer.close()


def _sample(target: Target, answer: Answer) -> str:
    text = [*answer.prompt, *answer.tokens]
    return repr(show_supervision(target.tokenizer, text, len(answer.ids_MK)))


def _show(lessons: Lessons, tracker: Tracker) -> None:
    columns = ["split", "answers", "tokens", "laws", "truncated", "empty", "looping", "duplicates"]
    rows: list[list[str | int]] = [
        [
            name,
            s.num_rows,
            s.num_tokens,
            s.num_laws,
            s.num_truncated,
            s.num_empty,
            s.num_looping,
            s.num_duplicates,
        ]
        for name, s in lessons.splits.items()
    ]
    tracker.table("generate/answers", columns, rows)
    tracker.summary(
        {
            "generate/tokens_per_second": lessons.tokens_per_second,
            "generate/bytes_per_token": lessons.bytes_per_token,
            "generate/recorded_mass": lessons.mean_recorded_mass,
            "generate/num_tokens": lessons.splits["train"].num_tokens,
            "generate/seconds": lessons.seconds,
        }
    )
