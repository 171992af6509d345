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
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from conf.choices import Divergence
from data.batches import Batch
from models.draft import DraftModel
from train.objectives import Objective, lump, overlap

# log-probability of an id that a law leaves out; finite, so that gradients stay finite
ABSENT = -1e4


def features_of(model: DraftModel, batch: Batch, dtype: torch.dtype) -> Tensor:
    """What the head reads at the supervised positions, NE."""
    device_type = batch.tokens_T.device.type
    with torch.autocast(device_type, dtype, enabled=dtype is not torch.float32):
        features: Tensor = model(batch)[0, batch.supervised_N]
    return features


@dataclass
class Sums:
    """Sums over supervised positions; means are taken where they are shown."""

    loss: float = 0.0
    acceptance: float = 0.0
    count: int = 0
    # of a loss of several divergences each by itself, unweighted
    parts: dict[Divergence, float] = field(default_factory=dict)

    def __add__(self, other: Sums) -> Sums:
        names = {**self.parts, **other.parts}
        return Sums(
            self.loss + other.loss,
            self.acceptance + other.acceptance,
            self.count + other.count,
            {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names},
        )


@dataclass
class TargetLaws:
    """Whole laws of the target at the supervised positions, made a chunk at a time from what its
    head reads.
    """

    features_NE: Tensor
    head: nn.Module

    def log_p(self, part: slice | Tensor) -> Tensor:
        """Log-probabilities of some positions, float32, nV."""
        logits: Tensor = self.head(self.features_NE[part])
        return logits.float().log_softmax(-1)

    def at(self, kept: Tensor) -> TargetLaws:
        """The same at some positions only."""
        return TargetLaws(self.features_NE[kept], self.head)


@dataclass
class Laws:
    """Of n positions over the same C outcomes. The last outcome is the rest of the vocabulary,
    unless there is none.
    """

    log_p: Tensor
    log_q: Tensor
    log_z: Tensor  # of the draft's logits, n
    has_rest: bool

    def overlap(self) -> Tensor:
        """sum min(p, q) over the outcomes that are single ids."""
        count = self.log_p.shape[-1] - self.has_rest
        return overlap(self.log_p[:, :count], self.log_q[:, :count])


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

    def logits(self, features_nE: Tensor) -> Tensor:
        """Of the hot ids, float32, nH."""
        return (features_nE.to(self.dtype) @ self.weight_HE.T).float()

    def laws(
        self,
        features_nE: Tensor,
        batch: Batch,
        part: slice,
        cold: Tensor | None,
        target: TargetLaws | None = None,
    ) -> Laws:
        """log p and log q over the recorded ids and the rest of the vocabulary, or, with whole laws
        of the `target`, over the hot ids and the rest.

        Recorded ids that are not hot count as rest. Without a `cold` sample q is the law of our
        decoder, which proposes hot ids only.
        """
        logits_nH = self.logits(features_nE)
        log_z = logits_nH.logsumexp(-1)
        log_cold = None
        if cold is not None:
            weight = math.log(len(self.cold_ids) / len(cold))
            log_cold = (features_nE.to(self.dtype) @ cold.T).float().logsumexp(-1) + weight
            log_z = torch.logaddexp(log_z, log_cold)
        if target is None:
            slots = self.slot_V[batch.top_ids_NK[part]]
            # not the ids that fill up a shorter law
            hot = (slots >= 0) & (batch.top_log_p_NK[part] != -math.inf)
            log_p = batch.top_log_p_NK[part].where(hot, ABSENT)
            log_q = logits_nH.gather(-1, slots.clamp(min=0)) - log_z.unsqueeze(-1)
            return Laws(lump(log_p), lump(log_q.where(hot, ABSENT)), log_z, has_rest=True)
        log_p, log_q = target.log_p(part), logits_nH - log_z.unsqueeze(-1)
        if not len(self.cold_ids):
            return Laws(log_p, log_q, log_z, has_rest=False)
        rest_p = log_p[:, self.cold_ids].logsumexp(-1, keepdim=True)
        rest_q = torch.full_like(rest_p, ABSENT)
        if log_cold is not None:
            rest_q = (log_cold - log_z).unsqueeze(-1)
        return Laws(
            torch.cat([log_p[:, self.hot_ids_H], rest_p], -1),
            torch.cat([log_q, rest_q], -1),
            log_z,
            has_rest=True,
        )

    def log_q_next(self, features_nE: Tensor, batch: Batch, part: slice, log_z_n: Tensor) -> Tensor:
        """log q of the tokens that follow, hot or not, shape n."""
        rows_nE = self.weight_VE[batch.next_N[part]].to(self.dtype)
        return (features_nE.to(self.dtype) * rows_nE).float().sum(-1) - log_z_n

    def backward(
        self,
        features_NE: Tensor,
        batch: Batch,
        objective: Objective,
        *,
        scale: float,
        rng: torch.Generator,
        target: TargetLaws | None = None,
    ) -> tuple[Sums, Tensor]:
        """Loss sums, and the gradient of `scale` * (summed loss) in the features. p is the recorded
        law, or the `target`'s whole one.
        """
        cold = self.sample_cold(rng)
        gradient = torch.empty_like(features_NE)
        sums = Sums()
        for part in self._chunks(len(features_NE)):
            features = features_NE[part].detach().requires_grad_()
            laws = self.laws(features, batch, part, cold, target)
            values = self._values(laws, features, batch, part, objective)
            loss = objective.total(values).sum()
            (gradient[part],) = torch.autograd.grad(loss * scale, features)
            accepted = laws.overlap().detach().sum()
            several = values if len(values) > 1 else {}
            by_part = {name: float(several[name].detach().sum()) for name in several}
            sums += Sums(float(loss.detach()), float(accepted), len(features), by_part)
        return sums, gradient

    def _values(
        self, laws: Laws, features_nE: Tensor, batch: Batch, part: slice, objective: Objective
    ) -> dict[Divergence, Tensor]:
        log_q_next = None
        if objective.reads_tokens:
            log_q_next = self.log_q_next(features_nE, batch, part, laws.log_z)
        return objective.parts(laws.log_p, laws.log_q, log_q_next)

    @torch.no_grad()
    def divergences(
        self,
        features_NE: Tensor,
        batch: Batch,
        objective: Objective,
        *,
        rng: torch.Generator,
        target: TargetLaws | None = None,
    ) -> Tensor:
        """The objective at each position, without gradients: N values."""
        cold = self.sample_cold(rng)
        values = []
        for part in self._chunks(len(features_NE)):
            laws = self.laws(features_NE[part], batch, part, cold, target)
            parts = self._values(laws, features_NE[part], batch, part, objective)
            values.append(objective.total(parts))
        return torch.cat(values)

    @torch.no_grad()
    def acceptance(
        self, features_NE: Tensor, batch: Batch, *, target: TargetLaws | None = None
    ) -> Tensor:
        """sum of min(p, q) at each position, q the law over the hot ids: N values.

        With the `target`'s whole laws it is the probability that a token drafted at temperature 1
        is accepted. With recorded laws it is a lower bound of that: what p and q share beyond the
        recorded ids is left out.
        """
        return torch.cat(
            [
                self.laws(features_NE[part], batch, part, None, target).overlap()
                for part in self._chunks(len(features_NE))
            ]
        )

    @torch.no_grad()
    def agreement(self, features_NE: Tensor, batch: Batch) -> Tensor:
        """q(y), y the target's token, q the law over the hot ids: N values.

        Where y was drawn from p its mean is sum p q, a lower bound of sum min(p, q), and it needs
        no distribution of the target's.
        """
        values = []
        for part in self._chunks(len(features_NE)):
            logits_nH = self.logits(features_NE[part])
            slots = self.slot_V[batch.next_N[part]]
            q = logits_nH.softmax(-1).gather(-1, slots.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            values.append(q.where(slots >= 0, 0.0))
        return torch.cat(values)

    def _chunks(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.chunk):
            yield slice(start, start + self.chunk)
