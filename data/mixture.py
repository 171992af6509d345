"""How many prompts each source gives, and which are kept for validation. Pure arithmetic."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from conf.contracts import Prompt

Key = TypeVar("Key")


def apportion(total: int, weights: Mapping[Key, float]) -> dict[Key, int]:
    """Whole numbers that add up to `total` and are within one of the exact shares (largest
    remainder).

    Ties go to the key that comes first; weights that are all zero give nothing.
    """
    whole = sum(weights.values())
    if whole <= 0:
        return dict.fromkeys(weights, 0)
    exact = {key: total * weight / whole for key, weight in weights.items()}
    shares = {key: int(share) for key, share in exact.items()}
    by_remainder = sorted(
        (k for k in weights if weights[k] > 0), key=lambda k: shares[k] - exact[k]
    )
    for key in by_remainder[: total - sum(shares.values())]:
        shares[key] += 1
    return shares


def split(
    prompts: list[Prompt], *, num_train: int, num_validation: int, rng: random.Random
) -> tuple[list[Prompt], list[Prompt]]:
    """Train and validation prompts in random order: disjoint, the same share of each category in
    both.

    Of fewer prompts than asked for, both get less in proportion, validation at least one.
    """
    if len(prompts) < num_train + num_validation:
        share = len(prompts) * num_validation / (num_train + num_validation)
        num_validation = max(1, round(share))
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    kept = apportion(num_validation, {c: len(by_category[c]) for c in sorted(by_category)})
    train, validation = [], []
    for category, number in kept.items():
        members = by_category[category]
        rng.shuffle(members)
        validation += members[:number]
        train += members[number:]
    rng.shuffle(train)
    rng.shuffle(validation)
    return train, validation
