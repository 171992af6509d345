"""What the target's head reads in its answers, which the warm start of a draft is fitted to: as it
was recorded, or computed anew where a server answered, which does not show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.contracts import Lessons
from conf.schema import Config
from data.batches import Batch, collate
from data.shards import Row
from models.load import Target, device_of, load_model
from models.packed import hidden_states, pack_attention

PER_BATCH = 8


def recorded_or_computed(
    config: Config, target: Target, lessons: Lessons, rows: Sequence[Row]
) -> Iterator[tuple[Batch, Tensor]]:
    """Answers of a recording, packed, and what the target's head read in them, ND."""
    device = device_of(config.runtime)
    if lessons.engine["kind"] == "builtin":
        return recorded_states(rows, device)
    # other engines show none
    reader = load_model(target, config.target, device)
    return computed_states(rows, reader, config.generate.warm_start_tokens)


def recorded_states(rows: Sequence[Row], device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
    """Answers that keep their hidden states, packed, and these, ND."""
    kept = [row.of_answer() for row in rows if row.hidden is not None]
    for start in range(0, len(kept), PER_BATCH):
        part = kept[start : start + PER_BATCH]
        hidden = [row.hidden for row in part if row.hidden is not None]
        yield collate(part).to(device), torch.cat(hidden).to(device)


@torch.no_grad()
def computed_states(
    rows: Sequence[Row], target: PreTrainedModel, num_positions: int
) -> Iterator[tuple[Batch, Tensor]]:
    """The same of the first answers that have about so many positions, read by the target."""
    pack_attention(target)
    for start in range(0, len(rows), PER_BATCH):
        if num_positions <= 0:
            return
        batch = collate([row.of_answer() for row in rows[start : start + PER_BATCH]])
        batch = batch.to(target.device)
        yield batch, hidden_states(target, batch)[0, batch.supervised_N]
        num_positions -= batch.num_supervised
