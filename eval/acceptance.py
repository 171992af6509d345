"""Expected acceptance, teacher-forced: what a draft is worth on given text, exactly and without
sampling noise.
"""

# N positions, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.contracts import Acceptance
from data.statistics import pooled
from models.decoding.sampling import Sampling, law


@dataclass(frozen=True)
class Text:
    """A prompt, an answer of the target, and what it belongs to."""

    prompt: list[int]
    answer: list[int]
    category: str
    temperature: float  # the answer was sampled at


@dataclass(frozen=True)
class Overlap:
    """Sum of sum min(p, q) over the positions of one answer."""

    total: float
    count: int


@torch.inference_mode()
def overlaps(
    target: PreTrainedModel,
    drafts: Sequence[tuple[PreTrainedModel, Tensor | None]],
    text: Text,
    sampling: Sampling,
) -> list[Overlap]:
    """sum min(p, q) summed over the answer's positions, for each draft (a model and the ids it
    proposes).

    p and q are the laws that decoding uses, over the target's whole vocabulary; an id that a draft
    does not propose has q = 0.
    """
    p_NV = _laws(target, text, sampling, side="target")
    found = []
    for draft, hot_ids in drafts:
        q_NH = _laws(draft, text, sampling, side="draft")
        shared = p_NV if hot_ids is None else p_NV[:, hot_ids.to(p_NV.device)]
        width = min(shared.shape[-1], q_NH.shape[-1])
        total = torch.minimum(shared[:, :width], q_NH[:, :width]).sum()
        found.append(Overlap(float(total), len(text.answer)))
    return found


@torch.inference_mode()
def overlap(target: PreTrainedModel, q_NV: Tensor, text: Text) -> Overlap:
    """The same at temperature 1 for a draft's laws over the target's ids."""
    p_NV = _laws(target, text, Sampling(1.0), side="target")
    return Overlap(float(torch.minimum(p_NV, q_NV).sum()), len(text.answer))


def _laws(model: PreTrainedModel, text: Text, sampling: Sampling, side: str) -> Tensor:
    ids = torch.tensor([text.prompt + text.answer[:-1]], device=model.device)
    logits = model(ids, logits_to_keep=len(text.answer), use_cache=False).logits[0]
    return law(logits, sampling, side=side, at=len(text.prompt) - 1)


def mean_overlap(found: Sequence[Overlap], confidence: float) -> Acceptance:
    """Expected acceptance over all positions of some answers, with its interval."""
    return pooled([one.total for one in found], [one.count for one in found], confidence)
