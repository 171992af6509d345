"""Rates of the device here, measured on models of the target's own shapes with made-up weights:
time does not depend on their values. They are only as deep as a part of the free memory holds, and
the rest follows by the weights that a call uses. Where not even one layer fits, a matrix product
and a large sum are measured instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conf.schema import Config
from data.batches import num_positions
from data.shards import Row
from models.anatomy import Anatomy, with_layers
from models.decoding.engine import Engine, measure_seconds
from models.decoding.kernels import use_kernel
from models.draft import DraftModel
from models.load import device_of, dtype_of
from train.estimate import estimate
from train.head import Head
from train.loop import NUM_COLD, Trainer
from train.rates import READ_TOKENS, ByWork, Draft, Rates, Training

MEASURED_SHARES = 0.7, 0.7  # what is usually reached of a large product's and a large sum's rate
LARGEST_PROBE = 2**31  # bytes of a model made up to be measured
SHARE_OF_FREE = 0.25  # of the memory that such a model may take
NUM_REPEATS = 5
PRODUCT = 2048  # rows and columns of the matrices whose product is measured
BUFFER_BYTES = 2**28


def free_bytes(device: torch.device) -> int:
    """Memory that nothing uses now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


@dataclass
class Measured:
    """Calls of made-up models on the device here."""

    config: Config
    model_config: PretrainedConfig
    target: Anatomy
    name: str
    depth: int  # layers of the model that is measured
    basis: str = ""

    def __post_init__(self) -> None:
        self.device = device_of(self.config.runtime)
        self.dtype = dtype_of(self.config.target.dtype, self.device)
        self._scale = self.target.used_weights / self._anatomy.used_weights
        deep = "" if self.depth == len(self.target.layers) else f" of {self.depth} layers"
        self._readings: dict[bool, float] = {}
        self.basis = f"measured on calls of a model{deep} with made-up weights"

    @property
    def _anatomy(self) -> Anatomy:
        return self.target.of_layers(range(self.depth))

    @cached_property
    def _model(self) -> PreTrainedModel:
        """As recording and decoding run it: with weights that bfloat16 holds, like those of most
        checkpoints.
        """
        shape = with_layers(self.model_config, range(self.depth))
        model = made_up(shape, torch.bfloat16, self.device)
        nn.Module.to(model, self.dtype)  # the wrapped method has a signature checkers misread
        use_kernel(model)
        return model

    def step(self, num_rows: int, context: int, longest: int) -> float:
        engine = Engine(self._model, num_rows=num_rows, capacity=longest, compiled=False)
        return self._timed(engine, num_rows, context, longest)

    def _timed(self, engine: Engine, num_rows: int, context: int, longest: int) -> float:
        tokens_B1 = torch.full((num_rows, 1), 5, device=self.device)
        positions_B1 = torch.full((num_rows, 1), context, device=self.device)

        def run() -> object:
            return engine.forward(tokens_B1, positions_B1, longest=longest)

        return self._scale * self._least(run)

    def reading(self, all_logits: bool) -> float:
        if all_logits not in self._readings:
            self._readings[all_logits] = self._reading(all_logits)
        return self._readings[all_logits]

    def _reading(self, all_logits: bool) -> float:
        engine = Engine(self._model, num_rows=1, capacity=READ_TOKENS, compiled=False)
        tokens_1T = torch.full((1, READ_TOKENS), 5, device=self.device)
        positions_1T = torch.arange(READ_TOKENS, device=self.device).unsqueeze(0)
        rows_B = torch.zeros(1, dtype=torch.long, device=self.device)
        seconds = self._least(
            lambda: engine.forward(
                tokens_1T,
                positions_1T,
                longest=READ_TOKENS,
                rows_B=rows_B,
                fresh=True,
                last_only=not all_logits,
            )
        )
        return self._scale * seconds / READ_TOKENS

    def step_alone(self, context: int) -> float:
        capacity = context + 64
        engine = Engine(
            self._model, num_rows=1, capacity=capacity, compiled=self.config.runtime.compile
        )
        return self._timed(engine, 1, context, context + 1)

    def _least(self, run: Callable[[], object]) -> float:
        # other work on the machine only ever adds
        return measure_seconds(run, device=self.device, warmup=2, repeats=NUM_REPEATS)[0]

    def training(self, draft: Draft, rows: list[Row]) -> Training:
        runtime = self.config.runtime
        held = 16 * draft.trained + 4 * (draft.anatomy.weights + draft.anatomy.head)
        if held > _largest_probe(self.device):
            return by_work(self.config, self.target, self.name).training(draft, rows)
        model_config = with_layers(self.model_config, draft.layers)
        model = DraftModel(made_up(model_config, torch.float32, self.device))
        if not self.config.draft.train_embeddings:
            model.freeze_embeddings()
        hot_ids = None
        if 0 < self.config.draft.hot_vocab < self.target.vocab_size:
            hot_ids = torch.arange(self.config.draft.hot_vocab)
        head = Head(
            model.head,
            hot_ids,
            num_cold=NUM_COLD,
            dtype=dtype_of(runtime.train_dtype, self.device),
            chunk=runtime.head_chunk,
        )
        plain = replace(self.config.objective, reference="")
        trainer = Trainer(replace(self.config, objective=plain), model, head, rows, rows[:8])
        found = estimate(trainer)
        validated = sum(map(num_positions, trainer.validation_rows))
        return Training(
            per_position=found.seconds_per_position,
            per_update=found.seconds_per_update,
            per_validated=found.seconds_per_validation / validated,
            memory=found.memory,
        )


def made_up(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model with weights of no meaning, rounded to bfloat16 as a target's are."""
    with torch.random.fork_rng():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    nn.Module.to(model, device)  # the wrapped method has a signature that type checkers misread
    nn.Module.to(model, dtype)
    return model.eval()


def measured_here(
    config: Config, model_config: PretrainedConfig, target: Anatomy, cached: int
) -> Rates:
    """Of the device here: of models made up for it, or by work where they would be too large.
    `cached` is what a layer's cache holds, in numbers.
    """
    device = device_of(config.runtime)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU here"
    size = dtype_of(config.target.dtype, device).itemsize
    outside = size * (target.weights - sum(target.layers))
    room = _largest_probe(device) - outside
    depth = min(len(target.layers), int(room // (size * (max(target.layers) + cached))))
    if depth < 1:
        return by_work(config, target, name)
    return Measured(config, model_config, target, name, depth)


def _largest_probe(device: torch.device) -> float:
    return min(LARGEST_PROBE, SHARE_OF_FREE * free_bytes(device))


def by_work(config: Config, target: Anatomy, name: str) -> ByWork:
    """Of the device here, by the rates of one matrix product and one large sum."""
    device = device_of(config.runtime)
    dtype = dtype_of(config.target.dtype, device)
    matrix = torch.ones(PRODUCT, PRODUCT, dtype=dtype, device=device)
    buffer = torch.ones(BUFFER_BYTES // 4, device=device)
    product = measure_seconds(lambda: matrix @ matrix, device=device, repeats=NUM_REPEATS)[0]
    reading = measure_seconds(lambda: buffer.sum(), device=device, repeats=NUM_REPEATS)[0]
    products, memory = 2.0 * PRODUCT**3 / product, BUFFER_BYTES / reading
    of_products, of_memory = MEASURED_SHARES
    return ByWork(
        name=name,
        basis=f"{of_products:.0%} of {products / 1e12:.3g} TFLOPS and {of_memory:.0%} of"
        f" {memory / 1e9:.3g} GB/s, measured on one product and one sum",
        target=target,
        products_per_s=of_products * products,
        bytes_per_s=of_memory * memory,
        weight_bytes=dtype.itemsize,
    )
