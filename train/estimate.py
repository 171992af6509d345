"""What training will take, said before its first step: memory by what holds it, and time.

Activations grow with the packed positions and, where attention keeps its scores, with their
squares. What autograd really keeps of a short answer and of a long one gives both coefficients, so
no family of models needs a formula of its own. Time is that of a few steps, run and thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from statistics import median

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from conf.console import Value
from data.batches import collate, num_positions
from data.shards import Row
from models.decoding.engine import synchronise
from models.load import peak_gib
from models.packed import PACKED
from train.head import features_of
from train.loop import Trainer
from train.optim import looked_up
from train.processes import local
from train.validation import packs

GIB = 2**30
COPIES_OF_LOGITS = 4  # of a chunk, alive together: logits, exponentials and two gradients of them
NUM_WARMUP, NUM_TIMED = 3, 5  # steps, the first ones run to warm up


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes, by what holds them while a step runs.

    `program` is what the process holds besides the draft and the lessons: code, libraries, what
    else is loaded. On a GPU it and the lessons are not counted: they are not in its memory.
    """

    program: int
    lessons: int
    weights: int  # of the draft, and of the reference that selects for it
    target: int  # weights, where it runs beside the draft
    gradients: int
    moments: int  # of the optimizer
    activations: int  # of the heaviest step
    # of the heaviest pack of validation answers, which finds no room in what smaller blocks left
    validation: int
    logits: int
    loading: int  # the most that was held until now, which may stay the peak

    @property
    def training(self) -> int:
        """All parts but the last together."""
        return sum(getattr(self, each.name) for each in fields(self)) - self.loading

    @property
    def peak(self) -> int:
        """The most that will have been held at the end."""
        return max(self.training, self.loading)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory, and what the seconds of a run are made of."""

    memory: Memory
    seconds_per_position: float
    seconds_per_update: float
    seconds_per_validation: float
    positions_of_steps: list[int]  # of the process that has most of them
    evaluate_every: int
    num_last: int = 0  # steps of a last phase with a teacher of its own, counted like the others

    def seconds(self, done: int = 0) -> float:
        """Of the steps from `done` on, with their validations."""
        left = self.positions_of_steps[done:]
        num_validations = ceil(len(left) / self.evaluate_every) + (done == 0)
        return (
            self.seconds_per_position * sum(left)
            + self.seconds_per_update * len(left)
            + self.seconds_per_validation * num_validations
        )

    def steps_within(self, seconds: float) -> int:
        """How many steps fit, at least one; validations are not counted."""
        return steps_within(
            seconds, self.positions_of_steps, self.seconds_per_position, self.seconds_per_update
        )

    def limited(self, num_steps: int) -> Estimate:
        """The same for a shorter run."""
        return replace(self, positions_of_steps=self.positions_of_steps[:num_steps])

    def event(self, done: int = 0) -> dict[str, Value]:
        """What the run says of itself."""
        held: dict[str, Value] = {
            f"{name}_gib": size / GIB for name, size in asdict(self.memory).items() if size
        }
        based_on = f"the time of {NUM_TIMED} steps, the activations of two answers"
        if self.num_last:
            based_on += f"; the last {self.num_last} steps have another teacher and are not timed"
        return {
            "minutes": self.seconds(done) / 60,
            "peak_gib": self.memory.peak / GIB,
            **held,
            "based_on": based_on,
        }


def estimate(trainer: Trainer) -> Estimate:
    """What `trainer.fit` will take, before its first step and without a trace in what it learns."""
    memory = _memory(trainer)  # of what is held before the first rehearsed step
    per_position, per_update = step_seconds(trainer)
    return Estimate(
        memory=memory,
        seconds_per_position=per_position,
        seconds_per_update=per_update,
        seconds_per_validation=_validation_seconds(trainer),
        positions_of_steps=positions_of_steps(trainer),
        evaluate_every=trainer.config.optim.evaluate_every,
        num_last=len(trainer.plan) - trainer.sources.num_first(len(trainer.plan)),
    )


def positions_of_steps(trainer: Trainer) -> list[int]:
    """Packed positions that the process with most of them has in each step."""
    lengths = [num_positions(row) for row in trainer.train_rows]
    return [max(sum(lengths[i] for i in share) for share in step) for step in trainer.plan]


def steps_within(
    seconds: float, positions: Sequence[int], per_position: float, per_update: float
) -> int:
    """How many steps of so many positions fit, at least one."""
    spent = 0.0
    for number, of_this in enumerate(positions):
        spent += per_position * of_this + per_update
        if spent > seconds:
            return max(number, 1)
    return len(positions)


def held_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


# ---------------------------------------------------------------- memory


def _memory(trainer: Trainer) -> Memory:
    model, head = trainer.model, trainer.head
    trained = trainer.optimizers.parameters
    on_gpu = trainer.device.type == "cuda"
    held = held_bytes()
    rows = [*trainer.train_rows, *trainer.validation_rows]
    kept = activation_bytes(trainer, rows)
    heaviest = max((kept(trainer.rows_of(step)) for step in range(len(trainer.plan))), default=0)
    # without gradients a layer's activations go before the next one's come
    num_layers = model.config.num_hidden_layers
    validating = max(map(kept, packs(trainer.validation_rows))) // num_layers
    lessons = num_bytes(value for row in rows for value in vars(row).values())
    weights = num_bytes([*model.parameters(), model.head, head.weight_VE, head.weight_HE])
    selection = trainer.selection
    if selection is not None:
        other = selection.head
        weights += num_bytes([*selection.reference.parameters(), other.weight_VE, other.weight_HE])
    teacher, later = trainer.sources.first.teacher, trainer.sources.last_bytes
    target = 0 if teacher is None else num_bytes(teacher.model.parameters())
    num_columns = len(head.hot_ids_H) + head.num_cold
    if target or later:
        num_columns += len(head.weight_VE)
    return Memory(
        # one that comes for the last steps is not in what is held now
        program=0 if on_gpu else max(0, held - lessons - weights - target),
        lessons=0 if on_gpu else lessons,
        weights=weights,
        target=target + later,
        gradients=num_bytes(trained),
        moments=sum(map(moment_bytes, trainer.optimizers.members)),
        activations=heaviest,
        validation=validating,
        logits=COPIES_OF_LOGITS * 4 * num_columns * head.chunk,
        loading=int(peak_gib(trainer.device) * GIB),
    )


def num_bytes(values: Iterable[object]) -> int:
    """Bytes of the distinct storages behind the tensors among some values."""
    storages = {}
    for value in values:
        if isinstance(value, Tensor):
            storage = local(value).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes an optimizer will keep: one momentum by Muon, two moments by AdamW."""
    copies = 1 if isinstance(optimizer, torch.optim.Muon) else 2
    return copies * num_bytes(
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )


@contextmanager
def kept_by_autograd(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Inside, count what forward passes keep for the backward one, weights left out; yields the
    function that says how many bytes.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # looked up each time: of a sharded model they are whole only while a layer computes
        weights = {local(each).untyped_storage().data_ptr() for each in model.parameters()}
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(kept.values())


def activation_bytes(trainer: Trainer, rows: Sequence[Row]) -> Callable[[Sequence[Row]], int]:
    """A function that says what autograd will keep of a packed line.

    bytes = a * positions + b * attended pairs + weights rounded to what is computed in: the pairs
    inside each answer where attention is computed answer by answer, of the whole line elsewhere. a
    and b come from the shortest and the longest of `rows`, each in a line of its own.
    """
    rounded = rounded_bytes(trainer.model, trainer.dtype)
    by_answer = trainer.model.config._attn_implementation == PACKED

    def sizes(line: Sequence[Row]) -> tuple[int, int]:
        lengths = [num_positions(row) for row in line]
        total = sum(lengths)
        return total, sum(length**2 for length in lengths) if by_answer else total**2

    probes = [min(rows, key=num_positions), max(rows, key=num_positions)]
    found = []
    for row in probes:
        with kept_by_autograd(trainer.model) as kept:
            features = features_of(trainer.model, collate([row]).to(trainer.device), trainer.dtype)
            found.append(kept() - rounded)
            del features
    # of equally long answers the smallest solution is taken, which is right for lines of such
    solution, *_ = np.linalg.lstsq([sizes([row]) for row in probes], found)
    return lambda line: rounded + int(max(0.0, float(np.dot(solution, sizes(line)))))


def rounded_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the matrices that a forward pass rounds for its products, and keeps so."""
    tables = looked_up(model)
    return sum(
        parameter.numel() * dtype.itemsize
        for parameter in model.parameters()
        if parameter.ndim > 1 and parameter.dtype is not dtype and id(parameter) not in tables
    )


# ---------------------------------------------------------------- time


def step_seconds(trainer: Trainer) -> tuple[float, float]:
    """Seconds per packed position and per update of the weights, from steps spread over the
    plan.
    """
    count = trainer.sources.num_first(len(trainer.plan))
    if not count:
        return 0.0, 0.0
    last = NUM_WARMUP + NUM_TIMED - 1
    spread = [number * (count - 1) // last for number in range(last + 1)]
    per_position, per_update = [], []
    for number, step in enumerate(spread):
        rows = trainer.rows_of(step)
        start = time.perf_counter()
        trainer.add_gradients(trainer.texts_of(rows, step), step, 1.0)
        synchronise(trainer.device)
        middle = time.perf_counter()
        trainer.optimizers.rehearse()
        synchronise(trainer.device)
        if number >= NUM_WARMUP and rows:
            per_position.append((middle - start) / sum(map(num_positions, rows)))
            per_update.append(time.perf_counter() - middle)
    return median(per_position or [0.0]), median(per_update or [0.0])


def _validation_seconds(trainer: Trainer) -> float:
    """Of a whole validation, from its first pack."""
    pack = next(packs(trainer.validation_rows))
    start = time.perf_counter()
    trainer.judge(pack)
    seconds = time.perf_counter() - start
    share = sum(map(num_positions, trainer.validation_rows)) / sum(map(num_positions, pack))
    return seconds * share
