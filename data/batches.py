"""Recorded answers as packed batches, in an order that can be resumed.

Answers are packed one after another into lines of at most a given length. Positions restart at 0
with every answer and attention stays inside it, so a token is trained in the very context its
distribution was recorded in.
"""

# T packed positions, N supervised positions among them, K recorded ids

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.codec import join
from data.shards import Row


@dataclass
class Batch:
    """One packed line.

    A supervised position holds the token *before* one whose law was recorded: its output predicts
    that token.
    `segments_T` numbers the answers, so that attention can be kept inside each.
    """

    rows: list[int]  # numbers of the answers, to name them in errors
    tokens_T: Tensor
    positions_T: Tensor
    segments_T: Tensor
    supervised_N: Tensor  # indices into T
    next_N: Tensor  # ids that follow
    top_ids_NK: Tensor
    top_log_p_NK: Tensor  # -inf where a law has fewer than K ids

    @property
    def num_supervised(self) -> int:
        return len(self.supervised_N)

    def mask(self) -> Tensor:
        """True where attention may look, shape 11TT: the same answer, not the future."""
        same_TT = self.segments_T.unsqueeze(1) == self.segments_T.unsqueeze(0)
        return same_TT.tril().unsqueeze(0).unsqueeze(0)

    def supervise(self, kept: Tensor) -> Batch:
        """The same line, learned from at some of its supervised positions only."""
        names = ("supervised_N", "next_N", "top_ids_NK", "top_log_p_NK")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return Batch(rows=self.rows, **moved)


def num_positions(row: Row) -> int:
    """Packed positions an answer takes: the last generated token predicts nothing."""
    return len(row.prompt) + len(row.generated) - 1


def compact(row: Row) -> Row:
    """Drop what training does not read of an answer, and keep its ids in few bytes."""
    row.hidden = None
    is_small = not row.top_ids.numel() or int(row.top_ids.max()) < 2**16
    row.top_ids = row.top_ids.to(torch.uint16 if is_small else torch.int32)
    return row


def collate(rows: Sequence[Row]) -> Batch:
    """Pack answers into one line. Raises ValueError naming a row without a generated token."""
    tokens, positions, segments, supervised = [], [], [], []
    offset = 0
    for number, row in enumerate(rows):
        if not len(row.generated) or not len(row.prompt):
            raise ValueError(
                f"answer {row.index}: it has no supervised token, so nothing can be learned"
                " from it."
            )
        length = num_positions(row)
        tokens.append(torch.cat([row.prompt, row.generated[:-1]]))
        positions.append(torch.arange(length))
        segments.append(torch.full((length,), number))
        supervised.append(torch.arange(offset + length - row.num_laws, offset + length))
        offset += length
    top_ids_NK, top_log_p_NK = join([(row.top_ids.long(), row.top_log_p) for row in rows])
    return Batch(
        rows=[row.index for row in rows],
        tokens_T=torch.cat(tokens),
        positions_T=torch.cat(positions),
        segments_T=torch.cat(segments),
        supervised_N=torch.cat(supervised),
        next_N=torch.cat([torch.cat([row.prompt, row.generated])[-row.num_laws :] for row in rows]),
        top_ids_NK=top_ids_NK,
        top_log_p_NK=top_log_p_NK,
    )


def plan_epoch(
    lengths: Sequence[int], *, tokens_per_step: int, seed: int, epoch: int
) -> list[list[int]]:
    """Answers of each optimizer step of an epoch: a shuffle, cut whenever the next answer would not
    fit.

    Depends on nothing but its arguments, so a resumed run finds the same order. An answer longer
    than a step gets a step of its own.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    steps: list[list[int]] = []
    room = 0
    for index in order:
        if not steps or lengths[index] > room:
            steps.append([])
            room = tokens_per_step
        steps[-1].append(index)
        room -= lengths[index]
    return steps


def deal(step: Sequence[int], lengths: Sequence[int], num_processes: int) -> list[list[int]]:
    """The answers of one step, dealt to processes: the longest first, each to the process with the
    fewest tokens.

    With fewer answers than processes some get an empty list. Every process keeps its answers in the
    order of the step.
    """
    shares: list[list[int]] = [[] for _ in range(num_processes)]
    loads = [0] * num_processes
    for place in sorted(range(len(step)), key=lambda place: -lengths[step[place]]):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += lengths[step[place]]
    return [[step[place] for place in sorted(share)] for share in shares]


def plan_batches(
    lengths: Sequence[int],
    *,
    tokens_per_step: int,
    seed: int,
    num_epochs: float,
    num_processes: int = 1,
) -> Iterator[list[list[int]]]:
    """Optimizer steps: for each, one list of answers per process.

    Yields `num_epochs` passes; a fraction cuts the last one short. Which answers a step has does
    not depend on the number of processes, so neither does what is learned.
    """
    epoch = 0
    while epoch < num_epochs:
        steps = plan_epoch(lengths, tokens_per_step=tokens_per_step, seed=seed, epoch=epoch)
        share = min(1.0, num_epochs - epoch)
        for step in steps[: max(1, round(share * len(steps)))]:
            yield deal(step, lengths, num_processes)
        epoch += 1
