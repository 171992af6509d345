"""The two models whose decoding is checked, their laws computed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import CombinedDrafter, Drafter, LookupDrafter
from models.decoding.engine import narrow_head
from models.decoding.length import StopBelow
from tests.families import tiny_family
from tests.laws import (
    DEPTH,
    HOT_IDS,
    SPREAD,
    VOCAB_SIZE,
    LookupEngine,
    lookup,
)


@pytest.fixture(scope="module")
def target() -> LookupEngine:
    return lookup(
        tiny_family("llama", vocab_size=VOCAB_SIZE, seed=3, initializer_range=SPREAD), DEPTH
    )


@pytest.fixture(scope="module")
def draft() -> LookupEngine:
    """Of another family than the target, with laws of its own."""
    return lookup(
        tiny_family("gpt2", vocab_size=VOCAB_SIZE, seed=2, initializer_range=SPREAD), DEPTH
    )


@pytest.fixture(scope="module")
def hot_draft() -> LookupEngine:
    model = tiny_family("gpt2", vocab_size=VOCAB_SIZE, seed=2, initializer_range=SPREAD)
    narrow_head(model, HOT_IDS)
    return lookup(model, DEPTH)


@pytest.fixture(scope="module")
def drafter_of(draft: LookupEngine, hot_draft: LookupEngine) -> Callable[[str], Drafter]:
    def make(kind: str) -> Drafter:
        model = ModelDrafter(draft, vocab_size=VOCAB_SIZE)
        # in six ids nearly every token has been seen before
        found = LookupDrafter(device=torch.device("cpu"), shortest=1, longest=2)
        return {
            "model": model,
            "hot ids": ModelDrafter(hot_draft, vocab_size=VOCAB_SIZE, hot_ids=HOT_IDS),
            "stopping": ModelDrafter(draft, vocab_size=VOCAB_SIZE, rule=StopBelow(0.3)),
            "lookup": found,
            "combined": CombinedDrafter(model, found, model_gamma=2),
        }[kind]

    return make
