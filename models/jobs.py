"""The answers that are to be generated, and what recording them takes on disk, before anything is
computed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PretrainedConfig

from conf.contracts import Prompt
from conf.errors import require
from conf.groups import GenerateConfig
from conf.run import Run
from conf.schema import Config
from data.chat import render_prompt
from data.codec import law_bytes, width
from data.prepare import read_prompts
from data.shards import SHARDS
from models.load import Target

# in the order they are answered: without validation answers nothing can be selected
SPLITS = ("validation", "train")
# the share of generate.top_k ids that a mass of 0.95 takes, and of generate.max_new_tokens that an
# answer has, as measured with the default target and prompts
USUAL_IDS, USUAL_LENGTH = 0.6, 0.7
ROW_BYTES, SHARD_BYTES = 32, 4096  # of what is kept once an answer, and of a file's header


@dataclass(frozen=True)
class Job:
    """One answer to generate. Its number names it for good.

    A conversation of several turns to answer is as many jobs, numbered one after another. Each
    turn's prompt is what the chat template makes of the conversation so far, the target's answers
    in it, as a chat server would send it; each turn's own ids are what is learned from. The later
    turns of a job are in `follow_ups`: what is said after its answer.
    """

    index: int
    split: str
    category: str
    prompt: list[int]
    temperature: float
    keep_hidden: bool
    messages: Sequence[dict[str, str]] = ()  # the conversation that `prompt` renders
    follow_ups: Sequence[Sequence[dict[str, str]]] = ()

    def seed(self, run_seed: int, attempt: int = 0) -> int:
        """Of the answer where another program draws it; depends on nothing else."""
        return random.Random(f"{run_seed}-{self.index}-{attempt}").randrange(2**31)


# of a prompt, its split, its number there, its category, its ids and itself
Asked = tuple[str, int, str, list[int], Prompt | None]


def plan_jobs(config: Config, run: Run, target: Target) -> tuple[list[Job], int]:
    """The first answer to every prompt, in order, and the number of prompts left out as too long.
    The number of an answer counts the later turns before it.
    """
    num_skipped = 0

    def short_enough() -> Iterator[Asked]:
        nonlocal num_skipped
        for split in SPLITS:
            for number, prompt in enumerate(read_prompts(run.corpus, split)):
                ids = _render(target, prompt.messages, config)
                if len(ids) > config.generate.max_prompt_tokens:
                    num_skipped += 1
                    continue
                yield split, number, prompt.category, ids, prompt

    jobs = jobs_of(config.generate, short_enough())
    for split in SPLITS:
        require(
            any(job.split == split for job in jobs),
            "generate.max_prompt_tokens",
            config.generate.max_prompt_tokens,
            f"no {split} prompt is that short",
            "Raise it, or use other data.sources",
        )
    return jobs, num_skipped


def jobs_of(settings: GenerateConfig, prompts: Iterable[Asked]) -> list[Job]:
    """The answers to prompts, of each its split, its number there, its category, its ids
    and, where there is one, itself."""
    jobs: list[Job] = []
    index = 0
    room = settings.warm_start_tokens  # as if every answer were as long as it may be
    for split, number, category, ids, prompt in prompts:
        follow_ups = prompt.follow_ups if prompt else []
        temperatures = settings.temperatures_of(split)
        for answer in range(settings.answers_per_prompt):
            temperature = temperatures[(number + answer) % len(temperatures)]
            room -= settings.max_new_tokens * (1 + len(follow_ups)) if split == "train" else 0
            keep = split == "train" and room >= 0 and settings.sees_inside
            job = Job(index, split, category, ids, temperature, keep)
            if prompt:
                job = replace(job, messages=prompt.messages, follow_ups=follow_ups)
            jobs.append(job)
            index += 1 + len(follow_ups)
    return jobs


def _render(target: Target, messages: Sequence[dict[str, str]], config: Config) -> list[int]:
    return render_prompt(target.tokenizer, messages, config.target.system_prompt)


def next_turn(job: Job, answer: Sequence[int], target: Target, config: Config) -> Job | None:
    """The job after this one in its conversation, given what was answered; None where nothing
    follows, or what follows is longer than `generate.max_prompt_tokens`.
    """
    if not job.follow_ups:
        return None
    said = [token for token in answer if token not in target.stop_ids]
    text = target.tokenizer.decode(said, skip_special_tokens=True)
    reply = {"role": "assistant", "content": str(text)}
    messages = [*job.messages, reply, *job.follow_ups[0]]
    prompt = _render(target, messages, config)
    if len(prompt) > config.generate.max_prompt_tokens:
        return None
    return replace(
        job, index=job.index + 1, prompt=prompt, messages=messages, follow_ups=job.follow_ups[1:]
    )


def at_their_longest(jobs: Iterable[Job], settings: GenerateConfig) -> list[Job]:
    """All turns of these jobs, the later ones with prompts as long as they may be."""
    longest = [0] * settings.max_prompt_tokens
    return [
        replace(job, index=job.index + turn, prompt=longest if turn else job.prompt)
        for job in jobs
        for turn in range(1 + len(job.follow_ups))
    ]


@dataclass(frozen=True)
class Size:
    """Bytes of a recording: the most that it can take, and what it usually does."""

    most: float
    expected: float


def size_of(jobs: Sequence[Job], settings: GenerateConfig, target: PretrainedConfig) -> Size:
    """What the answers to these jobs take."""
    bytes_of = [
        _bytes(jobs, settings, target, share_of_ids, share_of_length)
        for share_of_ids, share_of_length in ((1.0, 1.0), (USUAL_IDS, USUAL_LENGTH))
    ]
    return Size(*bytes_of)


def _bytes(
    jobs: Sequence[Job],
    settings: GenerateConfig,
    target: PretrainedConfig,
    share_of_ids: float,
    share_of_length: float,
) -> float:
    generated = settings.max_new_tokens * share_of_length
    num_prompt = sum(len(job.prompt) for job in jobs)
    num_laws = len(jobs) * generated
    if settings.reads_prompts:
        num_laws += sum(len(job.prompt) for job in jobs if job.split == "train")
    num_hidden = sum(job.keep_hidden for job in jobs) * generated
    num_ids = round(settings.top_k * share_of_ids) if settings.has_laws else 0
    num_files = len(jobs) / settings.rows_per_shard + 2 * len(SPLITS)
    return (
        num_laws * law_bytes(num_ids, target.vocab_size)
        + (num_prompt + len(jobs) * generated) * width(target.vocab_size) / 8
        + num_hidden * target.hidden_size * 2
        + len(jobs) * ROW_BYTES
        + num_files * SHARD_BYTES
    )


def require_room(
    config: Config,
    jobs: Sequence[Job],
    done: Collection[int],
    target: PretrainedConfig,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Say what the recording takes. Raises ConfigError when that can be more than
    `generate.max_gib`, or when what is missing can be more than the disk has free.
    """
    settings = config.generate
    missing = [job for job in jobs if job.index not in done]
    whole, left = size_of(jobs, settings, target), size_of(missing, settings, target)
    expected = left.expected
    if done:  # as large as those that are there
        there = sum(path.stat().st_size for path in folder.glob(SHARDS))
        expected = there / len(done) * len(missing)
    require(
        whole.most <= settings.max_gib * 2**30,
        "generate.max_gib",
        settings.max_gib,
        f"up to {_gib(whole.most)} would be recorded",
        "Raise it, or lower data.num_train, generate.max_new_tokens or generate.top_k",
    )
    free = shutil.disk_usage(folder).free
    require(
        left.most < free,
        "outputs",
        config.outputs,
        f"up to {_gib(left.most)} would be recorded, {_gib(free)} are free",
        "Make room",
    )
    if missing:
        say(
            f"generate: {len(missing)} answers to record, about {_gib(expected)}, at most"
            f" {_gib(left.most)}; {_gib(free)} are free."
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"
