"""The check that the decoder passes must reject each planted bug."""

# B drafts, G drafted positions (gamma), V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.choices import Verification
from models.decoding import draft_model, speculative, verify
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import Drafter
from models.decoding.sampling import Sampling, draw, law, penalise
from models.decoding.speculative import Decoder
from models.decoding.verify import chain
from tests.laws import (
    SIGNIFICANCE,
    LookupEngine,
    decoder_p_value,
    exact_law,
)

NUM_SAMPLES = 1200
Plant = Callable[[pytest.MonkeyPatch, Decoder, Sampling], None]


def no_residual(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    patch.setattr(verify, "residual", lambda p_BV, *_: p_BV)


def draft_temperature(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    """Drawn at twice the temperature that q is reported at."""
    patch.setattr(draft_model, "draw", lambda q, uniform: draw(q.sqrt(), uniform))


def target_temperature(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    """Accepted by the untempered ratio."""

    def untempered(logits: Tensor, sampling: Sampling, **rest: Any) -> Tensor:
        return law(logits, replace(sampling, temperature=1.0), **rest)

    patch.setattr(speculative, "law", untempered)


def reused_uniform(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    """The uniform that drew a token also judges it."""
    used: list[Tensor] = []
    original = ModelDrafter.draft

    def draft(
        self: ModelDrafter, texts: Any, most: Any, sampling: Sampling, uniform_BG: Tensor
    ) -> Any:
        used[:] = [uniform_BG]
        return original(self, texts, most, sampling, uniform_BG)

    def judged(p: Tensor, q: Tensor, drafted: Tensor, uniform_BG: Tensor, uniform_B: Tensor) -> Any:
        return chain(p, q, drafted, used[0] if drafted.shape[1] else uniform_BG, uniform_B)

    patch.setattr(ModelDrafter, "draft", draft)
    patch.setattr(speculative, "chain", judged)


def dropped_token(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    """A drafted token of low confidence is not verified. (Stopping behind it would be right.)"""

    def shortened(
        p: Tensor, q: Tensor, drafted: Tensor, uniform_BG: Tensor, uniform_B: Tensor
    ) -> Any:
        confident = q.gather(-1, drafted.unsqueeze(-1)).squeeze(-1) >= 0.4
        keep = int(confident.int().cumprod(-1).sum())
        return chain(
            p[:, : keep + 1], q[:, :keep], drafted[:, :keep], uniform_BG[:, :keep], uniform_B
        )

    patch.setattr(speculative, "chain", shortened)


def bonus_from_draft(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    def confused(p: Tensor, q: Tensor, *rest: Tensor) -> Any:
        return chain(torch.cat([p[:, :-1], q[:, -1:]], 1) if q.shape[1] else p, q, *rest)

    patch.setattr(speculative, "chain", confused)


def late_target_cache(patch: pytest.MonkeyPatch, decoder: Decoder, _sampling: Sampling) -> None:
    original = decoder.target.forward

    def late(tokens_BT: Tensor, positions_BT: Tensor, *, longest: int, **rest: Any) -> Tensor:
        return original(tokens_BT, positions_BT + 1, longest=longest + 1, **rest)

    patch.setattr(decoder.target, "forward", late)


def residual_of_untruncated_p(
    patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling
) -> None:
    """The test reads the truncated p, the correction the untruncated one."""
    whole: list[Tensor] = []

    def remembered(logits: Tensor, sampling: Sampling, **rest: Any) -> Tensor:
        whole[:] = [law(logits, Sampling(sampling.temperature))]
        return law(logits, sampling, **rest)

    def mixed(p: Tensor, q: Tensor, drafted: Tensor, uniform_BG: Tensor, uniform_B: Tensor) -> Any:
        verdict = chain(p, q, drafted, uniform_BG, uniform_B)
        accepted = int(verdict.num_accepted_B)
        if accepted == drafted.shape[1]:
            return verdict
        excess = (whole[0][:, accepted] - q[:, accepted]).clamp(min=0).unsqueeze(1)
        return verdict._replace(next_token_B=draw(excess, uniform_B.unsqueeze(1)).squeeze(1))

    patch.setattr(speculative, "law", remembered)
    patch.setattr(speculative, "chain", mixed)


def q_reported_untruncated(
    patch: pytest.MonkeyPatch, _decoder: Decoder, sampling: Sampling
) -> None:
    """Drafts are drawn from the truncated law, p is truncated, and q is reported whole."""

    def whole(logits: Tensor, sampling: Sampling, **rest: Any) -> Tensor:
        return law(logits, Sampling(sampling.temperature), **rest)

    def truncated_draw(q: Tensor, uniform: Tensor) -> Tensor:
        return draw(law(q.log(), replace(sampling, temperature=1.0)), uniform)

    patch.setattr(draft_model, "law", whole)
    patch.setattr(draft_model, "draw", truncated_draw)


def wrong_hot_ids(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    """q lies at other ids than the tokens drawn from it."""
    original = ModelDrafter._spread
    patch.setattr(ModelDrafter, "_spread", lambda self, q: original(self, q).roll(1, -1))


def one_uniform_for_a_round(
    patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling
) -> None:
    def shared(p: Tensor, q: Tensor, drafted: Tensor, uniform_BG: Tensor, uniform_B: Tensor) -> Any:
        return chain(p, q, drafted, uniform_BG[:, :1].expand_as(uniform_BG), uniform_B)

    patch.setattr(speculative, "chain", shared)


def block_stops_early(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    """The block rule, but ended by the first prefix that is not kept."""
    patch.setattr(verify, "longest_kept", lambda kept_BG: kept_BG.int().cumprod(-1).sum(-1))


def drafted_not_counted(patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    """The target's penalties forget what was drafted in the same round."""

    def forgetful(logits: Tensor, sampling: Sampling, **rest: Any) -> Tensor:
        kept = [
            penalise(
                logits[:, i : i + 1], sampling, **rest | {"drafted_1G": rest["drafted_1G"][:, :0]}
            )
            for i in range(logits.shape[1])
        ]
        return torch.cat(kept, 1)

    patch.setattr(speculative, "penalise", forgetful)


def nothing(_patch: pytest.MonkeyPatch, _decoder: Decoder, _sampling: Sampling) -> None:
    """Not a bug: under the same settings the decoder as it is passes."""


CHAIN, BLOCK = Verification.chain, Verification.block
PENALISED = Sampling(
    1.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7, min_new_tokens=2
)
PLANTS: list[tuple[Plant, Sampling, int, str, Verification]] = [
    (no_residual, Sampling(1.0), 2, "model", CHAIN),
    (no_residual, Sampling(1.0), 2, "model", BLOCK),
    (draft_temperature, Sampling(1.0), 3, "model", CHAIN),
    (draft_temperature, Sampling(1.0), 3, "model", BLOCK),
    (target_temperature, Sampling(0.6), 2, "model", CHAIN),
    (reused_uniform, Sampling(1.0), 2, "model", CHAIN),
    (dropped_token, Sampling(1.0), 3, "model", CHAIN),
    (bonus_from_draft, Sampling(1.0), 2, "model", CHAIN),
    (late_target_cache, Sampling(1.0), 2, "model", BLOCK),
    (residual_of_untruncated_p, Sampling(1.0, top_p=0.7), 2, "model", CHAIN),
    (q_reported_untruncated, Sampling(1.0, top_p=0.7), 2, "model", BLOCK),
    (wrong_hot_ids, Sampling(1.0), 2, "hot ids", BLOCK),
    (one_uniform_for_a_round, Sampling(1.0), 3, "model", CHAIN),
    (block_stops_early, Sampling(1.0), 3, "model", BLOCK),
    (drafted_not_counted, PENALISED, 2, "model", BLOCK),
    (nothing, PENALISED, 2, "model", BLOCK),
    (nothing, PENALISED, 2, "hot ids", CHAIN),
    (nothing, PENALISED, 2, "combined", BLOCK),
    (nothing, Sampling(1.0), 2, "model", CHAIN),
    (nothing, Sampling(1.0), 3, "model", BLOCK),
    (nothing, Sampling(0.6), 2, "model", CHAIN),
    (nothing, Sampling(1.0, top_p=0.7), 2, "model", CHAIN),
    (nothing, Sampling(1.0), 2, "hot ids", BLOCK),
    (nothing, Sampling(1.0), 2, "combined", BLOCK),
]


@pytest.mark.parametrize(
    ("plant", "sampling", "gamma", "kind", "rule"),
    PLANTS,
    ids=[f"{plant.__name__}-{rule}" for plant, *_, rule in PLANTS],
)
def test_the_check_fails_on_a_planted_bug(
    plant: Plant,
    sampling: Sampling,
    gamma: int,
    kind: str,
    rule: Verification,
    target: LookupEngine,
    drafter_of: Callable[[str], Drafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops = frozenset({2}) if sampling.min_new_tokens else frozenset[int]()
    decoder = Decoder(target, drafter_of(kind), stops, rule)
    exact = exact_law(target, sampling, stops)
    plant(monkeypatch, decoder, sampling)
    p_value = decoder_p_value(
        decoder, exact, sampling=sampling, gamma=gamma, num_samples=NUM_SAMPLES, seed=1
    )
    assert (p_value > SIGNIFICANCE) is (plant is nothing)
