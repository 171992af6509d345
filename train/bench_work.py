"""One measurement of distillation, in a process of its own: memory has a peak only once.

    python -m train.bench_work '{"kind": "ours", "folder": "outputs/main", "seconds": 60}' out.json

Every side starts from the run's own draft before its first step, with the same trainable weights,
and takes the same answers of the run in the same steps, by the same optimizer and rates.
"""

# T packed positions, K recorded ids

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from conf.choices import Dtype, Supervision
from conf.console import settle_libraries
from conf.contracts import Draft, Lessons
from conf.groups import ObjectiveConfig, OptimConfig, TargetConfig
from conf.run import peak_memory_gib, write_atomically
from conf.schema import Config
from data.batches import compact, num_positions
from data.shards import Row, read_split
from models.draft import DraftModel, from_layers, read_hot_ids
from models.load import (
    Target,
    device_of,
    dtype_of,
    load_folder,
    load_model,
    open_target,
    release_freed,
)
from train.estimate import positions_of_steps, step_seconds, steps_within
from train.head import Head
from train.loop import NUM_COLD, Trainer
from train.optim import rate_factor
from train.start import fit_map
from train.supervision import Source, Sources, Teacher
from train.validation import acceptances

# what oneDNN and torch do unless told otherwise
LIBRARIES_OWN = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
RATE_STEPS = 1000  # resolution of a rate that follows the time spent


@dataclass(frozen=True, kw_only=True)
class Work:
    """What to measure. `seconds` or, where it is 0, `steps` say how long."""

    # ours: recorded laws; online: the target's whole ones; cold: layers merely copied; fitted: the
    # map alone, to recorded laws; long: only memory; trl: the peer
    kind: str
    folder: str  # of a finished run
    seconds: float = 0.0
    steps: int = 0
    length: int = 0  # long: positions of each answer
    tokens_per_step: int = OptimConfig.tokens_per_step


@dataclass(kw_only=True)
class Found:
    """What was measured; evaluation is no part of `seconds` and `peak_gib`."""

    steps: int = 0
    tokens: int = 0  # supervised
    seconds: float = 0.0
    peak_gib: float = 0.0
    # of each validation answer: expected acceptance after the last step, summed, and positions
    accepted: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Expected, over all positions; 0 where nothing was judged."""
        return sum(self.accepted) / max(sum(self.positions), 1)


@dataclass
class Bench:
    """What all measurements share."""

    config: Config
    target: Target
    folder: Path
    train: list[Row]
    validation: list[Row]
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, work: Work) -> Bench:
        """The lessons of a finished run; raises ContractError when it has no draft."""
        folder = Path(work.folder)
        lessons = Lessons.read(folder / "lessons")
        tree = lessons.determined_by["target"]
        config = Config(
            target=TargetConfig(**{**tree, "dtype": Dtype(tree["dtype"])}),
            objective=ObjectiveConfig(),  # forward KL, which both sides have
            optim=OptimConfig(tokens_per_step=work.tokens_per_step),
        )
        device = device_of(config.runtime)
        train, validation = (
            sorted(
                map(compact, read_split(folder / "lessons", lessons.splits[split])),
                key=lambda row: row.index,
            )
            for split in ("train", "validation")
        )
        return cls(
            config=config,
            target=open_target(config),
            folder=folder,
            train=train,
            validation=validation,
            device=device,
            dtype=dtype_of(config.runtime.train_dtype, device),
        )

    def draft(self, *, cold: bool = False) -> DraftModel:
        """The run's draft before its first step, or its layers of the target merely copied; its
        head is frozen behind a trainable map, its embeddings are frozen.
        """
        if cold:
            full = load_model(self.target, self.config.target, torch.device("cpu"))
            plain = from_layers(full, Draft.read(self.folder / "draft").layers)
            plain.to(self.device)  # type: ignore[arg-type]
        else:
            plain = load_folder(
                self.folder / "draft" / "initial", dtype=torch.float32, device=self.device
            )
        model = DraftModel(plain)
        model.freeze_embeddings()
        return model

    def head(self, model: DraftModel, *, whole: bool = False) -> Head:
        """Over the ids that the run's draft proposes, or over all."""
        hot_ids = None if whole else read_hot_ids(self.folder / "draft" / "initial")
        chunk = self.config.runtime.head_chunk
        return Head(model.head, hot_ids, num_cold=NUM_COLD, dtype=self.dtype, chunk=chunk)

    def trainer(self, model: DraftModel, source: Source | None = None) -> Trainer:
        head = self.head(model)
        sources = Sources(source or Source())
        return Trainer(self.config, model, head, self.train, self.validation, sources)

    def judge(self, found: Found, model: DraftModel, *, whole: bool = False) -> None:
        """Add the expected acceptance by the recorded laws."""
        head = self.head(model, whole=whole)
        by_answer = acceptances(model, head, self.validation, self.dtype)
        found.accepted = [float(each.sum()) for each in by_answer]
        found.positions = list(map(len, by_answer))


def ours(bench: Bench, work: Work) -> Found:
    """Our loop: for so many steps, or as many as a rehearsal says fit into the seconds."""
    model = bench.draft(cold=work.kind == "cold")
    source = None
    if work.kind == "online":
        target = load_model(bench.target, bench.config.target, bench.device)
        bench.config.objective.source = Supervision.online
        source = Source(teacher=Teacher(target))
    release_freed()
    trainer = bench.trainer(model, source)
    if work.seconds:
        positions = positions_of_steps(trainer)
        count = steps_within(work.seconds, positions, *step_seconds(trainer))
        trainer.plan = trainer.plan[:count]
    else:
        trainer.plan = trainer.plan[: work.steps]
    return _run(bench, trainer)


def _run(bench: Bench, trainer: Trainer, *, judged: bool = True) -> Found:
    found = Found(steps=len(trainer.plan))
    start = time.perf_counter()
    for step in range(len(trainer.plan)):
        sums, _ = trainer.step(step)
        found.tokens += sums.count
    found.seconds = time.perf_counter() - start
    found.peak_gib = peak_memory_gib()
    if judged:
        bench.judge(found, trainer.model)
    return found


def fitted(bench: Bench, work: Work) -> Found:
    """The run's draft before its first step, its map fitted as `draft.fit_steps` has it."""
    model = bench.draft()
    head = bench.head(model)
    start = time.perf_counter()
    fit_map(model, head, bench.train, num_steps=work.steps, seed=bench.config.seed)
    found = Found(steps=work.steps, seconds=time.perf_counter() - start)
    found.peak_gib = peak_memory_gib()
    bench.judge(found, model)
    return found


def long(bench: Bench, work: Work) -> Found:
    """Answers of one length, made by joining recorded ones; the same tokens in every step."""
    whole = bench.train
    line = torch.cat([torch.cat([row.prompt, row.generated]) for row in whole])
    ids = torch.cat([row.top_ids.int() for row in whole])
    laws = torch.cat([row.top_log_p for row in whole])
    bench.train = [
        Row(
            index=number,
            category="",
            temperature=1.0,
            prompt=line[at : at + 1],
            generated=line[at + 1 : at + work.length + 1],
            top_ids=ids[at : at + work.length],
            top_log_p=laws[at : at + work.length],
        )
        for number, at in enumerate(range(0, work.steps * work.tokens_per_step, work.length))
    ]
    assert {num_positions(row) for row in bench.train} == {work.length}
    model = bench.draft()
    release_freed()
    trainer = bench.trainer(model)
    assert len(trainer.plan[0][0]) == work.tokens_per_step // work.length
    trainer.plan = trainer.plan[: work.steps]
    return _run(bench, trainer, judged=False)


def spent_rate(spent: float, config: OptimConfig) -> float:
    """The rate of our schedule when a share `spent` of the time is over."""
    step = min(RATE_STEPS - 1, int(spent * RATE_STEPS))
    return rate_factor(
        step, RATE_STEPS, warmup_share=config.warmup_share, decay_share=config.decay_share
    )


def main() -> None:
    """Measure what the first argument says, write it to the file that the second one names."""
    work = Work(**json.loads(sys.argv[1]))
    if work.kind == "trl":  # as it comes: how little the libraries keep is part of what we do
        os.environ |= LIBRARIES_OWN
    settle_libraries()
    bench = Bench.load(work)
    if work.kind == "trl":
        from train.bench_trl import by_trl

        found = by_trl(bench, work)
    else:
        found = {"long": long, "fitted": fitted}.get(work.kind, ours)(bench, work)
    write_atomically(Path(sys.argv[2]), json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
