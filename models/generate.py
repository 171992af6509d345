"""Stage generate: the target answers the prompts, and its distribution at every generated token is
kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from conf.contracts import Corpus, Lessons
from conf.run import Resume, Run, determined, process_rank, provenance
from conf.schema import Config
from conf.tracking import Tracker
from data.chat import show_supervision
from data.codec import VERSION, cut_at_mass
from data.shards import Row
from models.decoding.autoregressive import Answer, Generator, Request
from models.decoding.engine import SHALLOW, Engine
from models.jobs import Job, plan_jobs, require_room
from models.load import Target, describe, device_of, load_model, open_target, set_threads
from models.recording import Writer, answers_on_disk, reopen_if_damaged, take_stock

REPORT_SECONDS = 20.0


def generate(config: Config, run: Run, tracker: Tracker) -> Lessons:
    """Answer every prompt of the corpus and record the target's distributions.

    Rerunning continues after the last complete shard; a finished recording of the same
    configuration is reused, also by other runs. Raises ConfigError when the recording would exceed
    `generate.max_gib` or the free disk space.
    """
    corpus = Corpus.read(run.corpus)
    made_by = determined(config, "generate", "target", corpus=corpus.fingerprint, codec=VERSION)
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
    require_room(config, jobs, done, target.config, folder, tracker.message)
    model = load_model(target, config.target, device_of(config.runtime))
    seconds, num_tokens = _answer_jobs(config, target, model, jobs, done, folder, tracker)
    PartialState().wait_for_everyone()
    if process_rank() != 0:
        PartialState().wait_for_everyone()
        return Lessons.read(folder)
    splits, mean_mass = take_stock(folder, config.generate.max_new_tokens)
    num_laws = sum(split.num_laws for split in splits.values())
    lessons = Lessons(
        fingerprint=folder.resolve().name.removeprefix("lessons-"),
        determined_by=made_by,
        provenance=provenance(config.seed, str(model.device), time.perf_counter() - start),
        target=describe(target, config.target, model),
        splits=splits,
        num_skipped_prompts=num_skipped,
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


def _answer_jobs(
    config: Config,
    target: Target,
    model: PreTrainedModel,
    jobs: list[Job],
    done: set[int],
    folder: Path,
    tracker: Tracker,
) -> tuple[float, int]:
    """Generate what is missing; returns the seconds spent generating and the tokens generated."""
    settings = config.generate
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = process_rank()
    mine = [job for job in jobs if job.index % world == rank]
    missing = [job for job in mine if job.index not in done]
    if not missing:
        return 0.0, 0
    generator = open_generator(config, target, model, missing)
    writer = Writer(folder, target.config.vocab_size, settings.rows_per_shard, rank)
    num_tokens = 0
    start = last = time.perf_counter()
    with tracker.progress("generate", len(mine), "answers") as bar:
        bar.advance(len(mine) - len(missing))
        for answer in record(config, generator, missing, writer):
            if num_tokens == 0:
                tracker.message(
                    "generate: one answer, what is learned between brackets: "
                    + _sample(target, answer)
                )
            num_tokens += len(answer.tokens)
            bar.advance()
            now = time.perf_counter()
            if now - last > REPORT_SECONDS:
                last = now
                values = {"tokens": num_tokens, "tokens_per_second": num_tokens / (now - start)}
                tracker.event("generate", values, step=num_tokens)
    generator.close()
    return time.perf_counter() - start, num_tokens


def open_generator(
    config: Config,
    target: Target,
    model: PreTrainedModel,
    jobs: Sequence[Job],
    engine_class: type[Engine] = Engine,
) -> Generator:
    """What answers these jobs; it has read already what all their prompts begin with."""
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
            writer.add(job.split, _row(job, answer, settings.mass))
        yield answer
    with generator.recording:
        writer.close()


def _sample(target: Target, answer: Answer) -> str:
    text = [*answer.prompt, *answer.tokens]
    return repr(show_supervision(target.tokenizer, text, len(answer.ids_MK)))


def _row(job: Job, answer: Answer, mass: float) -> Row:
    return Row(
        index=job.index,
        category=job.category,
        temperature=job.temperature,
        prompt=torch.tensor(answer.prompt),
        generated=torch.tensor(answer.tokens),
        top_ids=answer.ids_MK,
        top_log_p=cut_at_mass(answer.log_probabilities_MK, mass),
        hidden=None if answer.hidden_ND is None else answer.hidden_ND.bfloat16(),
    )


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
