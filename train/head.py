"""The vocabulary head and the loss, a chunk of positions at a time: memory is flat in positions
times vocabulary.

The gradient of the features is taken chunk by chunk in the forward pass, while the chunk's logits
are still there, so nothing is recomputed and nothing of size N x V ever exists.

The normaliser of q over a large vocabulary is the most expensive sum in distilling a small draft.
It is computed exactly over the hot ids (which carry nearly all of the target's mass), and estimated
over the cold ones from a fresh uniform sample of them at every step, weighted by (number of cold
ids) / (sample size): unbiased for the sum.
"""

# N supervised positions, n positions of a chunk, H hot ids, E features, K recorded ids

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batches import Batch
from train.objectives import lump, overlap

Divergence = Callable[[Tensor, Tensor], Tensor]
# log-probability of an id that a law leaves out; finite, so that gradients stay finite
ABSENT = -1e4


@dataclass
class Sums:
    """Sums over supervised positions; means are taken where they are shown."""

    loss: float = 0.0
    acceptance: float = 0.0
    count: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.loss + other.loss, self.acceptance + other.acceptance, self.count + other.count
        )


class Head:
    """The frozen head of a draft, split into hot and cold rows.

    Args:
        weight_VE: the whole head.
        hot_ids_H: ids with an exact share in the normaliser; None: all.
        num_cold: cold ids sampled per step.
        dtype: of the matrix products; logits and everything after them are float32.
        chunk: positions whose logits are alive at once.
    """

    def __init__(
        self,
        weight_VE: Tensor,
        hot_ids_H: Tensor | None,
        *,
        num_cold: int,
        dtype: torch.dtype,
        chunk: int,
    ):
        size = len(weight_VE)
        device = weight_VE.device
        self.weight_VE, self.dtype, self.chunk = weight_VE, dtype, chunk
        self.hot_ids_H = (
            torch.arange(size, device=device) if hot_ids_H is None else hot_ids_H.to(device)
        )
        self.weight_HE = weight_VE[self.hot_ids_H].to(dtype)
        self.slot_V = torch.full((size,), -1, dtype=torch.long, device=device)
        self.slot_V[self.hot_ids_H] = torch.arange(len(self.hot_ids_H), device=device)
        self.cold_ids = (self.slot_V < 0).nonzero().squeeze(-1)
        self.num_cold = min(num_cold, len(self.cold_ids))

    def sample_cold(self, rng: torch.Generator) -> Tensor | None:
        """Head rows of a fresh uniform sample of cold ids, of all when they are as few; None when
        there are none.
        """
        if not self.num_cold:
            return None
        if self.num_cold == len(self.cold_ids):
            return self.weight_VE[self.cold_ids].to(self.dtype)
        pick = torch.randint(len(self.cold_ids), (self.num_cold,), generator=rng)
        return self.weight_VE[self.cold_ids[pick.to(self.cold_ids.device)]].to(self.dtype)

    def laws(
        self, features_nE: Tensor, batch: Batch, part: slice, cold: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """log p and log q of the recorded ids and the rest of the vocabulary, n K+1 each.

        Recorded ids that are not hot count as rest. Without a `cold` sample q is the law of our
        decoder, which proposes hot ids only.
        """
        features = features_nE.to(self.dtype)
        logits_nH = (features @ self.weight_HE.T).float()
        log_z = logits_nH.logsumexp(-1)
        if cold is not None:
            weight = math.log(len(self.cold_ids) / len(cold))
            log_z = torch.logaddexp(log_z, (features @ cold.T).float().logsumexp(-1) + weight)
        slots = self.slot_V[batch.top_ids_NK[part]]
        # not the ids that fill up a shorter law
        hot = (slots >= 0) & (batch.top_log_p_NK[part] != -math.inf)
        log_p = batch.top_log_p_NK[part].where(hot, ABSENT)
        log_q = (logits_nH.gather(-1, slots.clamp(min=0)) - log_z.unsqueeze(-1)).where(hot, ABSENT)
        return lump(log_p), lump(log_q)

    def backward(
        self,
        features_NE: Tensor,
        batch: Batch,
        divergence: Divergence,
        *,
        scale: float,
        rng: torch.Generator,
    ) -> tuple[Sums, Tensor]:
        """Loss sums, and the gradient of `scale` * (summed loss) in the features."""
        cold = self.sample_cold(rng)
        gradient = torch.empty_like(features_NE)
        sums = Sums()
        for start in range(0, len(features_NE), self.chunk):
            part = slice(start, start + self.chunk)
            features = features_NE[part].detach().requires_grad_()
            log_p, log_q = self.laws(features, batch, part, cold)
            loss = divergence(log_p, log_q).sum()
            (gradient[part],) = torch.autograd.grad(loss * scale, features)
            accepted = overlap(log_p[:, :-1], log_q[:, :-1].detach())
            sums += Sums(float(loss.detach()), float(accepted.sum()), len(features))
        return sums, gradient

    @torch.no_grad()
    def acceptance(self, features_NE: Tensor, batch: Batch) -> Tensor:
        """sum over recorded ids of min(p, q) at each position, q the law over the hot ids: N
        values.

        A lower bound of the probability that a token drafted at temperature 1 is accepted: what p
        and q share beyond the recorded ids is left out.
        """
        values = []
        for start in range(0, len(features_NE), self.chunk):
            part = slice(start, start + self.chunk)
            log_p, log_q = self.laws(features_NE[part], batch, part, None)
            values.append(overlap(log_p[:, :-1], log_q[:, :-1]))
        return torch.cat(values)
