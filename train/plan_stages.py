"""What a stage is reckoned to take, where, and what it answers; preparing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from conf.choices import SourceKind, Stage
from conf.contracts import MANIFEST, Corpus
from conf.devices import DEVICES
from conf.errors import ConfigError
from conf.run import Run, fingerprint
from conf.schema import Config
from data.files import files_of
from data.prepare import corpus_determined_by
from data.sources import count_known, locate
from models.jobs import SPLITS, Job, jobs_of, plan_jobs
from models.load import device_of, dtype_of, is_plain, open_target
from train.estimate import GIB

# Of the default run, as measured: the share of generate.max_prompt_tokens that a prompt has, and of
# data.max_chars; a prompt's line without its text
USUAL_PROMPT, USUAL_CHARS, PROMPT_BYTES = 0.3, 0.2, 130
# a second's bytes of a JSON lines file; a prompt's own time, and what starts before the first
READ_BYTES, PROMPT_SECONDS, PREPARE_SECONDS = 28e6, 1e-3, 3.0
SECONDS_TO_SEE, BUSY = 0.5, 0.25  # how long, and from which share of all cores on
COMPILER_BYTES = 0.6 * GIB
# of preparing: the program, which needs no torch; generators and streams; a document's objects over
# its bytes
PREPARE_BYTES, GENERATORS_BYTES, JSON_COPIES = 0.04 * GIB, 0.1 * GIB, 5


@dataclass(kw_only=True)
class StagePlan:
    """What one stage takes. Tokens and bytes: as expected, and at most."""

    stage: Stage
    tokens: float = 0.0
    most_tokens: float = 0.0
    seconds: float = 0.0
    disk: float = 0.0
    most_disk: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)  # bytes, by what holds them
    loading: float = 0.0  # bytes held before that, where they may be more

    @property
    def peak(self) -> float:
        """The most that is held at a time."""
        return max(self.loading, sum(self.memory.values()))


@dataclass(frozen=True)
class Place:
    """Where the work is done."""

    on_cpu: bool
    room: float  # bytes
    itemsize: int  # of the target's weights while it computes
    program: float  # bytes that count against the room

    @classmethod
    def of(cls, config: Config, program: float) -> Place:
        """The device that is named, or the one here."""
        if config.plan.device:
            return cls(False, DEVICES[config.plan.device].gb * 1e9, 2, 0.0)
        device = device_of(config.runtime)
        itemsize = dtype_of(config.target.dtype, device).itemsize
        if device.type == "cuda":
            room = torch.cuda.get_device_properties(device).total_memory
            return cls(False, float(room), itemsize, 0.0)
        compiler = COMPILER_BYTES if config.runtime.compile else 0.0
        return cls(True, float(psutil.virtual_memory().total), itemsize, program + compiler)


def expected_jobs(config: Config, run: Run) -> tuple[list[Job], bool]:
    """The answers to generate, and whether their prompts were counted: they are when the corpus of
    this configuration and the target's tokenizer are there.
    """
    if (run.corpus / MANIFEST).is_file() and is_plain(config.target):
        made = Corpus.read(run.corpus).fingerprint
        if made == fingerprint(corpus_determined_by(config)):
            try:
                return plan_jobs(config, run, open_target(config))[0], True
            except ConfigError:  # of a target that is a configuration alone
                pass
    usual = [0] * max(1, round(USUAL_PROMPT * config.generate.max_prompt_tokens))
    wanted = {"train": config.data.num_train, "validation": config.data.num_validation}
    prompts = ((split, n, "", usual, None) for split in SPLITS for n in range(wanted[split]))
    return jobs_of(config.generate, prompts), False


def prepare(config: Config, run: Run) -> StagePlan:
    """Reading the sources, and the prompts that are kept."""
    wanted = config.data.num_train + config.data.num_validation
    used = [source for source in config.data.sources.values() if source.weight > 0]
    sizes = dict(_file_sizes(config))
    files = [run.corpus / f"{split}.jsonl" for split in SPLITS]
    there = [path.stat().st_size for path in files if path.is_file()]
    disk = wanted * (PROMPT_BYTES + USUAL_CHARS * config.data.max_chars)
    documents = [size for path, size in sizes.items() if path.suffix == ".json"]
    return StagePlan(
        stage=Stage.prepare,
        seconds=PREPARE_SECONDS + sum(sizes.values()) / READ_BYTES + wanted * PROMPT_SECONDS,
        disk=float(sum(there)) if len(there) == len(files) else disk,
        most_disk=wanted * (PROMPT_BYTES + 4.0 * config.data.max_chars),  # bytes of a character
        memory={}
        if config.plan.device
        else {
            "program": PREPARE_BYTES,
            "generators": 0.0 if set(map(count_known, used)) == {True} else GENERATORS_BYTES,
            "documents": float(JSON_COPIES * max(documents, default=0)),
        },
    )


def _file_sizes(config: Config) -> list[tuple[Path, int]]:
    """Bytes of the files of all sources that are files; those of streams are not known."""
    sizes = []
    for name, source in config.data.sources.items():
        if source.weight > 0 and source.kind in (SourceKind.file, SourceKind.package):
            key = f"data.sources.{name}.path"
            found = files_of(key, locate(key, source, source.path))
            sizes += [(path, path.stat().st_size) for path in found]
    return sizes


def too_large(stage: StagePlan, place: Place) -> list[str]:
    """What to say when a stage does not fit."""
    if stage.peak <= place.room:
        return []
    largest = max(stage.memory, key=stage.memory.__getitem__)
    ways_out = {
        "cache": "Lower generate.batch_size or generate.max_new_tokens",
        "activations": "Lower optim.tokens_per_step",
        "lessons": "Lower data.num_train",
    }
    way_out = ways_out.get(largest, "Take a device with more memory, or a smaller model")
    return [
        f"{stage.stage} takes {gib(stage.peak)} of {gib(place.room)}, most of it {largest}."
        f" {way_out}."
    ]


def too_busy(place: Place) -> list[str]:
    """What to say before rates are measured on cores that others use; waits a moment to see."""
    busy = psutil.cpu_percent(SECONDS_TO_SEE) / 100
    if not place.on_cpu or busy < BUSY:
        return []
    return [
        f"other work keeps {busy:.0%} of this machine busy, and the times are measured beside it. A"
        " plan made while it is idle says less."
    ]


def gib(num_bytes: float) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.0f} KiB" if num_bytes else "-"
