"""AdaSPEC (2510.19779): a small draft cannot learn everything, so it learns the positions that a
reference of its own size shows it can learn.
"""

# N supervised positions, E features

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import require
from conf.groups import ObjectiveConfig
from data.batches import Batch
from models.draft import DraftModel
from models.load import load_folder
from train.head import Head, TargetLaws, features_of
from train.objectives import objective

FORWARD_KL = objective(ObjectiveConfig(), 0.0)


def num_selected(count: int, share: float) -> int:
    """How many of so many positions are learned from, at least one of any."""
    # the margin is for rounding: 0.07 * 100 is above 7
    return math.ceil(share * count - 1e-9)


def select(gap_N: Tensor, counts: Sequence[int], share: float) -> Tensor:
    """Positions with the largest gaps, the given share of each answer's, in their order.

    gap = KL(p || draft) - KL(p || reference): what the draft has yet to learn and the reference
    could. Choosing inside each answer, where the paper chooses inside a batch, keeps the choice the
    same however answers are packed and dealt to processes. Of equal gaps the first are taken.

    Args:
        counts: positions of each answer, one after another in N.
    """
    kept, offset = [], 0
    for gap_n in gap_N.split(list(counts)):
        order = gap_n.sort(descending=True, stable=True).indices
        kept.append(order[: num_selected(len(gap_n), share)].sort().values + offset)
        offset += len(gap_n)
    return torch.cat(kept)


@dataclass(frozen=True)
class Selection:
    """Selects by a reference draft, whose head has the same hot ids as the trained one's."""

    reference: DraftModel
    head: Head
    share: float

    @torch.no_grad()
    def choose(
        self,
        batch: Batch,
        counts: Sequence[int],
        features_NE: Tensor,
        head: Head,
        target: TargetLaws | None,
        seed: int,
    ) -> Tensor:
        """Positions of a packed line to learn from, as indices into N.

        Args:
            features_NE: what the trained draft's `head` reads.
            seed: of the sample of cold ids, the same for both drafts.
        """
        of_reference = features_of(self.reference, batch, self.head.dtype)
        draft_N, reference_N = (
            each.divergences(
                features, batch, FORWARD_KL, rng=torch.Generator().manual_seed(seed), target=target
            )
            for each, features in ((head, features_NE), (self.head, of_reference))
        )
        return select(draft_N - reference_N, counts, self.share)


def open_selection(
    config: ObjectiveConfig, folder: Path, head: Head, device: torch.device
) -> Selection | None:
    """Selection by the exported draft in a folder, None when the configuration has no reference.
    Raises ConfigError unless it is of the same vocabulary as the trained draft's `head`.
    """
    if not config.reference:
        return None
    reference = DraftModel(load_folder(folder, dtype=torch.float32, device=device))
    reference.requires_grad_(False)
    require(
        len(reference.head) == len(head.weight_VE),
        "objective.reference",
        config.reference,
        f"its draft has {len(reference.head)} tokens, the target {len(head.weight_VE)}",
        "Name a run with the same target",
    )
    hot_ids = head.hot_ids_H if len(head.cold_ids) else None
    its_head = Head(
        reference.head, hot_ids, num_cold=head.num_cold, dtype=head.dtype, chunk=head.chunk
    )
    return Selection(reference, its_head, config.select_share)
