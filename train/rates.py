"""How long calls of target and draft take, as stated by a device's data sheet: as long as their
products or the reading of their weights, whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from conf.devices import DEVICES
from data.shards import Row
from models.anatomy import Anatomy
from train.estimate import Memory

STATED_SHARES = 0.4, 0.6  # what is usually reached of a data sheet's products and memory rate
READ_TOKENS = 512  # in a call that reads prompts
FORWARD_AND_BACKWARD = 3  # times the work of a forward call
OPTIMIZER_PASSES = 7 * 4  # bytes moved for each trained weight: it, its gradient, two moments


@dataclass(frozen=True)
class Training:
    """Seconds of distillation, and what it holds where that was measured."""

    per_position: float
    per_update: float
    per_validated: float  # for each position of a validation
    memory: Memory | None = None


@dataclass(frozen=True)
class Draft:
    """What is trained, in numbers of weights."""

    anatomy: Anatomy
    trained: int
    head_columns: int  # ids whose logits a position computes
    layers: tuple[int, ...]  # of the target


class Rates(Protocol):
    """Seconds of the target's calls and of training."""

    @property
    def name(self) -> str:
        """Of the device."""

    @property
    def basis(self) -> str:
        """Where the figures come from."""

    def step(self, num_rows: int, context: int, longest: int) -> float:
        """One more token for every row, with so many before it, in the longest row so many."""

    def reading(self, all_logits: bool) -> float:
        """For each token of prompts that are read, with the logits of every token or of the last
        alone.
        """

    def step_alone(self, context: int) -> float:
        """One more token of one text, as the decoder runs the target."""

    def training(self, draft: Draft, rows: list[Row]) -> Training:
        """On answers like these."""


@dataclass(frozen=True)
class ByWork:
    """The longer of two times: products at one rate, weights and cache read at another."""

    name: str
    basis: str
    target: Anatomy
    products_per_s: float
    bytes_per_s: float
    weight_bytes: int

    def _seconds(self, num_tokens: int, num_cached: int, logits_for: int) -> float:
        target = self.target
        products = 2.0 * (num_tokens * (target.used_weights - target.head))
        products += 2.0 * logits_for * target.head
        read = target.read_weights(num_tokens) + num_cached * target.cache_per_token
        return max(products / self.products_per_s, read * self.weight_bytes / self.bytes_per_s)

    def step(self, num_rows: int, context: int, longest: int) -> float:
        del longest  # a device reads each row as far as it goes
        return self._seconds(num_rows, num_rows * context, num_rows)

    def reading(self, all_logits: bool) -> float:
        return self._seconds(READ_TOKENS, 0, READ_TOKENS if all_logits else 1) / READ_TOKENS

    def step_alone(self, context: int) -> float:
        return self._seconds(1, context, 1)

    def training(self, draft: Draft, rows: list[Row]) -> Training:
        del rows
        anatomy = draft.anatomy
        body = sum(anatomy.used) + anatomy.hidden_size**2
        logits = draft.head_columns * anatomy.hidden_size
        forward = 2.0 * (body + logits)
        # the head is frozen: its backward pass is for the features alone
        backward = 2.0 * ((FORWARD_AND_BACKWARD - 1) * body + logits)
        return Training(
            per_position=(forward + backward) / self.products_per_s,
            per_update=OPTIMIZER_PASSES * draft.trained / self.bytes_per_s,
            per_validated=forward / self.products_per_s,
        )


def stated(name: str, target: Anatomy) -> ByWork:
    """By the data sheet of one of conf.devices."""
    sheet = DEVICES[name]
    products, memory = STATED_SHARES
    return ByWork(
        name=name,
        basis=f"stated: {products:.0%} of {sheet.tflops:g} TFLOPS, {memory:.0%} of"
        f" {sheet.gb_per_s:g} GB/s",
        target=target,
        products_per_s=products * sheet.tflops * 1e12,
        bytes_per_s=memory * sheet.gb_per_s * 1e9,
        weight_bytes=2,
    )
