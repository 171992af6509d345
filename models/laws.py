"""The target's laws as other programs tell them: the likeliest ids and their log-probabilities."""

# M positions, K recorded ids

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from conf.errors import require
from data.codec import UNRECORDED

MOVED = 0.25  # nats by which a law may differ between two calls of one program


def as_tensors(laws: Sequence[Mapping[int, float]], top_k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities, MK in falling order, at most `top_k`; shorter laws end in id 0 and
    UNRECORDED.
    """
    ranked = [sorted(law.items(), key=lambda entry: -entry[1])[:top_k] for law in laws]
    longest = max(map(len, ranked), default=0)
    ids_MK = torch.zeros(len(ranked), longest, dtype=torch.int)
    log_p_MK = torch.full((len(ranked), longest), UNRECORDED)
    for place, law in enumerate(ranked):
        if law:
            ids_MK[place, : len(law)] = torch.tensor([number for number, _ in law])
            log_p_MK[place, : len(law)] = torch.tensor([value for _, value in law])
    return ids_MK, log_p_MK


def require_same_law(
    at_one: Mapping[int, float],
    law: Mapping[int, float],
    temperature: float,
    temperatures: Sequence[float],
    *,
    whose: str,
    way_out: str,
) -> None:
    """Lessons hold laws at temperature 1, whatever an answer is sampled at. Raises ConfigError
    where a law changes with the temperature of its request.
    """
    shared = at_one.keys() & law.keys()
    moved = max((abs(at_one[number] - law[number]) for number in shared), default=99)
    require(
        moved <= MOVED,
        "generate.temperatures",
        list(temperatures),
        f"{whose} log-probabilities at {temperature} are not those at 1, which are what a draft"
        " learns",
        f"Use generate.temperatures=[1.0], or {way_out}",
    )
