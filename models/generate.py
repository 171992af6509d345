"""Stage generate: the target answers the prompts, and its distribution at every generated token is
kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState

from conf.contracts import Corpus, Lessons, Prompt, Shard, SplitLessons
from conf.errors import require
from conf.run import Resume, Run, determined, process_rank, provenance
from conf.schema import Config
from conf.tracking import Tracker
from data.chat import render_prompt, show_supervision
from data.codec import VERSION, cut_at_mass, law_bytes
from data.prepare import read_prompts
from data.shards import Row, ShardError, read_shard, write_shard
from models.decoding.autoregressive import Answer, Generator, Request
from models.decoding.engine import SHALLOW, Engine
from models.load import Target, describe, device_of, load_model, open_target, set_threads

# in the order they are answered: without validation answers nothing can be selected
SPLITS = ("validation", "train")
REPORT_SECONDS = 20.0


@dataclass(frozen=True)
class Job:
    """One answer to generate. Its number in the list of jobs names it for good."""

    index: int
    split: str
    category: str
    prompt: list[int]
    temperature: float
    keep_hidden: bool


@dataclass
class _Writer:
    """Collects finished rows and writes them in shards; rows with and without hidden states never
    share a file.
    """

    folder: Path
    vocab_size: int
    rows_per_shard: int
    rank: int
    waiting: dict[tuple[str, bool], list[Row]] = field(default_factory=lambda: defaultdict(list))
    number: int = 0

    def add(self, split: str, row: Row) -> bool:
        """Take a row; True when that completed a shard."""
        rows = self.waiting[split, row.hidden is not None]
        rows.append(row)
        if len(rows) < self.rows_per_shard:
            return False
        self._write(split, rows)
        return True

    def close(self) -> None:
        for (split, _), rows in self.waiting.items():
            if rows:
                self._write(split, rows)

    def _write(self, split: str, rows: list[Row]) -> None:
        while (
            path := self.folder / f"{split}-{self.rank:03d}-{self.number:05d}.safetensors"
        ).exists():
            self.number += 1
        write_shard(path, rows, self.vocab_size)
        rows.clear()


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
        tracker.message(
            f"generate: {lessons.splits['train'].num_tokens} recorded training tokens are there"
            " already."
        )
        # another run may have made them: this one used them
        tracker.artifact(
            "lessons", folder, uses=["corpus"], metadata={"fingerprint": lessons.fingerprint}
        )
        return lessons
    set_threads(config.runtime)
    target = open_target(config)
    jobs, num_skipped = plan_jobs(config, run, target)
    _check_size(config, jobs, target, folder)
    start = time.perf_counter()
    done = _finished(folder, tracker)
    model = load_model(target, config.target, device_of(config.runtime))
    seconds, num_tokens = _answer_jobs(config, target, model, jobs, done, folder, tracker)
    PartialState().wait_for_everyone()
    if process_rank() != 0:
        PartialState().wait_for_everyone()
        return Lessons.read(folder)
    splits, mean_mass = _take_stock(folder, config)
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
        bytes_per_token=sum(shard.num_bytes for split in splits.values() for shard in split.shards)
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


def plan_jobs(config: Config, run: Run, target: Target) -> tuple[list[Job], int]:
    """Every answer to generate, in order, and the number of prompts left out as too long."""
    jobs: list[Job] = []
    num_skipped = 0
    temperatures = config.generate.temperatures
    room = config.generate.warm_start_tokens  # as if every answer were as long as it may be
    for split in SPLITS:
        for number, prompt in enumerate(read_prompts(run.corpus, split)):
            ids = _render(target, prompt, config)
            if len(ids) > config.generate.max_prompt_tokens:
                num_skipped += 1
                continue
            for answer in range(config.generate.answers_per_prompt):
                temperature = temperatures[(number + answer) % len(temperatures)]
                room -= config.generate.max_new_tokens if split == "train" else 0
                keep = split == "train" and room >= 0
                jobs.append(Job(len(jobs), split, prompt.category, ids, temperature, keep))
    for split in SPLITS:
        require(
            any(job.split == split for job in jobs),
            "generate.max_prompt_tokens",
            config.generate.max_prompt_tokens,
            f"no {split} prompt is that short",
            "Raise it, or use other data.sources",
        )
    return jobs, num_skipped


def _render(target: Target, prompt: Prompt, config: Config) -> list[int]:
    return render_prompt(target.tokenizer, prompt.messages, config.target.system_prompt)


def _check_size(config: Config, jobs: list[Job], target: Target, folder: Path) -> None:
    """Refuse a recording that cannot fit, before anything is computed."""
    settings = config.generate
    most = len(jobs) * settings.max_new_tokens
    if settings.record_prompts:
        most += sum(len(job.prompt) for job in jobs)
    per_token = law_bytes(settings.top_k, target.config.vocab_size) + 3  # and the token itself
    hidden = min(most, settings.warm_start_tokens) * target.config.hidden_size * 2
    gib = (most * per_token + hidden) / 2**30
    require(
        gib <= settings.max_gib,
        "generate.max_gib",
        settings.max_gib,
        f"up to {gib:.2f} GiB would be recorded",
        "Raise it, or lower data.num_train, generate.max_new_tokens or generate.top_k",
    )
    free = shutil.disk_usage(folder).free / 2**30
    require(
        gib < free,
        "outputs",
        config.outputs,
        f"up to {gib:.2f} GiB would be recorded, {free:.2f} GiB are free",
        "Make room",
    )


def _finished(folder: Path, tracker: Tracker) -> set[int]:
    """Numbers of the answers already on disk. A broken shard is removed and its answers are
    generated again.
    """
    done: set[int] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            done.update(row.index for row in read_shard(path))
        except ShardError:
            tracker.message(f"generate: {path.name} is broken; its answers are generated again.")
            path.unlink(missing_ok=True)
    if done:
        tracker.message(f"generate: {len(done)} answers are on disk already, going on from there.")
    return done


def _answer_jobs(
    config: Config,
    target: Target,
    model: torch.nn.Module,
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
    capacity = max(len(job.prompt) for job in missing) + settings.max_new_tokens
    engine = Engine(
        model,  # type: ignore[arg-type]
        num_rows=min(settings.batch_size, len(missing)),
        capacity=-(-capacity // 64) * 64,
        # a shallow model is compiled whole, and then the hook that keeps hidden states may not run
        compiled=config.runtime.compile and target.config.num_hidden_layers > SHALLOW,
    )
    engine.share([job.prompt for job in missing])
    generator = Generator(
        engine,
        stop_ids=target.stop_ids,
        max_new_tokens=settings.max_new_tokens,
        top_k=settings.top_k,
    )
    writer = _Writer(folder, target.config.vocab_size, settings.rows_per_shard, rank)
    by_index = {job.index: job for job in missing}
    # rows decoded together read as far back as the longest of them: alike lengths go together, long
    # ones first
    missing.sort(key=lambda job: -len(job.prompt))
    num_tokens = 0

    def requests() -> Iterator[Request]:
        for job in missing:
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

    start = last = time.perf_counter()
    with tracker.progress("generate", len(mine), "answers") as bar:
        bar.advance(len(mine) - len(missing))
        for answer in generator.answer(requests()):
            job = by_index[answer.index]
            if num_tokens == 0:
                tracker.message(
                    "generate: one answer, what is learned between brackets: "
                    + _sample(target, answer)
                )
            writer.add(job.split, _row(job, answer, settings.mass))
            num_tokens += len(answer.tokens)
            bar.advance()
            now = time.perf_counter()
            if now - last > REPORT_SECONDS:
                last = now
                values = {"tokens": num_tokens, "tokens_per_second": num_tokens / (now - start)}
                tracker.event("generate", values, step=num_tokens)
    writer.close()
    generator.close()
    return time.perf_counter() - start, num_tokens


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
        hidden=answer.hidden_ND,
    )


def is_looping(tokens: list[int]) -> bool:
    """Whether the last 32 tokens repeat a pattern of at most 8."""
    tail = tokens[-32:]
    return len(tail) == 32 and any(tail[period:] == tail[:-period] for period in range(1, 9))


def _take_stock(folder: Path, config: Config) -> tuple[dict[str, SplitLessons], float]:
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
            content = path.read_bytes()
            tokens = sum(len(row.generated) for row in rows)
            shards.append(
                Shard(
                    file=path.name,
                    sha256=hashlib.sha256(content).hexdigest(),
                    num_rows=len(rows),
                    num_tokens=tokens,
                    num_bytes=len(content),
                )
            )
            for row in rows:
                answer = row.generated.tolist()
                key = (row.category, tuple(answer))
                num["rows"] += 1
                num["tokens"] += len(answer)
                num["prompt"] += len(row.prompt)
                num["truncated"] += len(answer) >= config.generate.max_new_tokens
                num["empty"] += len(answer) == 1
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
