"""Speculative decoding emits the target's law: whole outputs of random models over settings and
drafters. `test_planted_bugs` shows that the check would notice.
"""

# B drafts, G drafted positions (gamma), V vocabulary

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from conf.choices import Verification
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import Drafter
from models.decoding.engine import Engine
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from tests.laws import (
    GAMMAS,
    SIGNIFICANCE,
    TEMPERATURES,
    TRUNCATIONS,
    VOCAB_SIZE,
    LookupEngine,
    decoder_p_value,
    exact_law,
)

DRAFTERS = ["model", "hot ids", "stopping", "lookup", "combined"]
SETTINGS = [
    # every temperature with every gamma and drafter; truncations, stop ids and rules in turn
    (temperature, truncation, gamma, kind, stops, rule)
    for (temperature, gamma, kind), truncation, stops, rule in zip(
        itertools.product(TEMPERATURES, GAMMAS, DRAFTERS),
        itertools.cycle(TRUNCATIONS),
        itertools.cycle([frozenset(), frozenset({2}), frozenset()]),
        itertools.cycle([*Verification, *reversed(Verification)]),
        strict=False,
    )
]


@pytest.mark.parametrize(("temperature", "truncation", "gamma", "kind", "stops", "rule"), SETTINGS)
def test_the_decoder_emits_the_target_law(
    temperature: float,
    truncation: str,
    gamma: int,
    kind: str,
    stops: frozenset[int],
    rule: Verification,
    target: LookupEngine,
    drafter_of: Callable[[str], Drafter],
) -> None:
    sampling = Sampling(temperature, **TRUNCATIONS[truncation])
    decoder = Decoder(target, drafter_of(kind), stops, rule)
    exact = exact_law(target, sampling, stops)
    assert (
        decoder_p_value(decoder, exact, sampling=sampling, gamma=gamma, num_samples=800)
        > SIGNIFICANCE
    )


class OwnSampling(ModelDrafter):
    """Draws its drafts from a law of its own, whatever the target's sampling is; q is that law."""

    own = Sampling()

    def draft(self, texts: Any, most: Any, sampling: Sampling, uniform_BG: Tensor) -> Any:  # noqa: ARG002
        return super().draft(texts, most, self.own, uniform_BG)


@pytest.mark.parametrize(
    "own",
    [Sampling(0.0), Sampling(1.5), Sampling(0.7, top_k=2)],
    ids=["greedy", "hotter, not truncated", "truncated more"],
)
def test_a_draft_may_be_drawn_from_any_law_that_it_reports(
    own: Sampling, target: LookupEngine, draft: LookupEngine
) -> None:
    sampling = Sampling(0.9, top_p=0.8)
    drafter = OwnSampling(draft, vocab_size=VOCAB_SIZE)
    drafter.own = own
    decoder = Decoder(target, drafter, frozenset())
    exact = exact_law(target, sampling, frozenset())
    assert (
        decoder_p_value(decoder, exact, sampling=sampling, gamma=2, num_samples=1200) > SIGNIFICANCE
    )


def test_the_decoder_on_real_caches_emits_the_target_law(
    target: LookupEngine, draft: LookupEngine
) -> None:
    engines = [
        Engine(one.model, num_rows=1, capacity=16, compiled=False) for one in (target, draft)
    ]
    decoder = Decoder(engines[0], ModelDrafter(engines[1], vocab_size=VOCAB_SIZE), frozenset({2}))
    sampling = Sampling(1.0, top_k=5)
    exact = exact_law(target, sampling, frozenset({2}))
    assert (
        decoder_p_value(decoder, exact, sampling=sampling, gamma=2, num_samples=500) > SIGNIFICANCE
    )
