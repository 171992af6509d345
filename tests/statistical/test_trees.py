"""Trees of candidates drawn without replacement emit the target's law, and wrong rules do not."""

# B rows, N candidates, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.decoding import draft_model, verify
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import CombinedDrafter, LookupDrafter
from models.decoding.engine import narrow_head
from models.decoding.sampling import Sampling, draw, drawn_apart, law, likeliest
from models.decoding.speculative import Decoder
from tests.families import tiny_family
from tests.laws import (
    DEPTH,
    HOT_IDS,
    SIGNIFICANCE,
    SPREAD,
    VOCAB_SIZE,
    LookupEngine,
    decoder_p_value,
    exact_law,
    law_p_value,
    lookup,
)
from tests.shapes import Bushy

NUM_ROUNDS = 60_000
# two candidates after the text, two after the first of them, one after the second
PARENTS = (-1, -1, 0, 0, 1)


def sampled_round(
    p_VV: Tensor, q_VV: Tensor, rng: torch.Generator
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Many rounds over first-order models: what `verify.tree` is given, and two numbers more."""
    size = len(p_VV)
    uniform = torch.rand(2 * len(PARENTS) + 2, NUM_ROUNDS, generator=rng)
    ids: list[Tensor] = []
    left: dict[int, Tensor] = {}
    before = torch.zeros(NUM_ROUNDS, dtype=torch.long)  # every text ends with token 0
    for node, parent in enumerate(PARENTS):
        known = before if parent < 0 else ids[parent]
        left_BV = left.setdefault(parent, q_VV[known].clone())
        ids.append(draw(left_BV.unsqueeze(1), uniform[node, :, None]).squeeze(1))
        left_BV.scatter_(1, ids[-1].unsqueeze(1), 0.0)
    fed_BT = torch.stack([before, *ids], 1)
    parents_BN = torch.tensor(PARENTS).expand(NUM_ROUNDS, -1)
    accept_BN = uniform[len(PARENTS) : 2 * len(PARENTS)].T
    assert size > 3  # two siblings never use a law up
    given = (p_VV[fed_BT], q_VV[fed_BT], fed_BT[:, 1:], parents_BN, accept_BN, uniform[-2])
    return given, fed_BT, uniform[-1]


def tree_p_value(sampling: Sampling) -> float:
    """Of the first two tokens."""
    rng = torch.Generator().manual_seed(7)
    p_VV, q_VV = (
        law(2 * torch.randn(5, 5, generator=rng), each) for each in (sampling, Sampling(1.2))
    )
    given, fed_BT, last_B = sampled_round(p_VV, q_VV, rng)
    verdict = verify.tree(*given)
    assert verdict.kept_BN is not None
    emitted = torch.full((NUM_ROUNDS, 4), -1)
    num_B = torch.zeros(NUM_ROUNDS, dtype=torch.long)
    rows = torch.arange(NUM_ROUNDS)
    for node in range(len(PARENTS)):
        kept_B = verdict.kept_BN[:, node]
        emitted[rows[kept_B], num_B[kept_B]] = fed_BT[kept_B, node + 1]
        num_B += kept_B
    assert torch.equal(num_B, verdict.num_accepted_B)
    emitted[rows, num_B] = verdict.next_token_B
    # a round that ended at its first token is continued by the target
    first_B, second_B = emitted[:, 0], emitted[:, 1]
    second_B = second_B.where(second_B >= 0, draw(p_VV[first_B], last_B))
    expected = {
        (a, b): float(p_VV[0, a].double() * p_VV[a, b].double()) for a in range(5) for b in range(5)
    }
    return law_p_value(zip(first_B.tolist(), second_B.tolist(), strict=True), expected)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.6), Sampling(1.0), Sampling(1.5), Sampling(1.0, top_k=2), Sampling(0.0)],
    ids=["0.6", "1", "1.5", "top_k", "greedy"],
)
def test_a_round_emits_the_target_law(sampling: Sampling) -> None:
    assert tree_p_value(sampling) > SIGNIFICANCE


def without_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "residual", lambda p_BV, *_: p_BV)


def without_normalising(patch: pytest.MonkeyPatch) -> None:
    """What is left of p and q after a rejection is compared as it is."""
    patch.setattr(verify, "normalised", lambda law_BV: law_BV)


def independent_siblings(patch: pytest.MonkeyPatch) -> None:
    """Every sibling is tested against the whole q, as if each had been drawn from it."""

    def whole(law_BV: Tensor) -> Tensor:
        missing = (law_BV == 0).sum(-1, keepdim=True) == 1
        spread = law_BV.where(law_BV > 0, 1 - law_BV.sum(-1, keepdim=True).clamp(max=1))
        return spread.where(missing & (law_BV.sum(-1, keepdim=True) < 1), law_BV)

    patch.setattr(verify, "normalised", whole)


@pytest.mark.parametrize("plant", [without_residual, without_normalising, independent_siblings])
def test_the_check_fails_on_a_wrong_rule(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert tree_p_value(Sampling(1.0)) < SIGNIFICANCE


def test_the_greedy_rule_is_what_one_hot_laws_come_to() -> None:
    rng = torch.Generator().manual_seed(0)
    num = 500
    parents_BN = torch.tensor(PARENTS).expand(num, -1)
    logits = torch.randint(4, (num, 6, 5), generator=rng).float()
    p = law(logits, Sampling(0.0))
    drafted_BN = torch.stack([torch.randperm(5, generator=rng) for _ in range(num)])
    # of siblings one is often right
    right_BN = torch.rand(num, 5, generator=rng) < 0.4
    best_BN = p.argmax(-1).gather(1, parents_BN + 1)
    drafted_BN = drafted_BN.where(~right_BN, best_BN)
    for first, second in ((0, 1), (2, 3)):  # which are different tokens
        same_B = drafted_BN[:, first] == drafted_BN[:, second]
        drafted_BN[:, second] = drafted_BN[:, second].where(~same_B, verify.NOTHING)
    q = torch.ones(num, 6, 5)  # any law that holds the candidates
    uniform_BN = torch.rand(num, 5, generator=rng) * 0.999
    want = verify.tree(p, q / 5, drafted_BN, parents_BN, uniform_BN, uniform_BN[:, 0])
    found = verify.greedy(likeliest(logits), drafted_BN, [PARENTS] * num)
    assert set(want.num_accepted_B.tolist()) == {0, 1, 2}
    assert found == verify.on_host(want, drafted_BN)


def test_ids_drawn_apart_are_different_and_follow_the_law() -> None:
    law_V = torch.tensor([0.5, 0.3, 0.0, 0.2])
    rng = torch.Generator().manual_seed(1)
    samples = [tuple(drawn_apart(law_V, torch.rand(2, generator=rng))) for _ in range(4000)]
    expected = {
        (a, b): float(law_V[a] * law_V[b] / (1 - law_V[a]))
        for a in range(4)
        for b in range(4)
        if a != b
    }
    assert law_p_value(samples, expected) > SIGNIFICANCE
    assert len(drawn_apart(law_V, torch.rand(4, generator=rng))) == 3  # there are no more


# ---------------------------------------------------------------- whole decoder


@pytest.fixture(scope="module")
def target() -> LookupEngine:
    model = tiny_family("llama", vocab_size=VOCAB_SIZE, seed=3, initializer_range=SPREAD)
    return lookup(model, DEPTH)


@pytest.fixture(scope="module")
def drafts() -> dict[str, LookupEngine]:
    found = {}
    for kind in ("all ids", "hot ids"):
        model = tiny_family("gpt2", vocab_size=VOCAB_SIZE, seed=2, initializer_range=SPREAD)
        if kind == "hot ids":
            narrow_head(model, HOT_IDS)
        found[kind] = lookup(model, DEPTH)
    return found


def decoder_of(target: LookupEngine, drafts: dict[str, LookupEngine], kind: str) -> Decoder:
    hot_ids = HOT_IDS if kind == "hot ids" else None
    drafter = ModelDrafter(
        drafts["hot ids" if hot_ids is not None else "all ids"],
        vocab_size=VOCAB_SIZE,
        hot_ids=hot_ids,
        rule=Bushy((2, 2, 1)),
    )
    if kind != "combined":
        return Decoder(target, drafter, frozenset({2}))
    found = LookupDrafter(device=torch.device("cpu"), shortest=1, longest=2)
    return Decoder(
        target, CombinedDrafter(drafter, found, model_gamma=6, lookup_gamma=2), frozenset({2})
    )


SETTINGS = [
    (Sampling(1.0), "all ids"),
    (Sampling(0.6), "all ids"),
    (Sampling(1.5, top_k=4), "all ids"),
    (Sampling(1.0, top_p=0.8), "hot ids"),
    (Sampling(1.0), "combined"),
    (Sampling(1.0, repetition_penalty=1.5, presence_penalty=0.5), "all ids"),
]


def p_value_of(decoder: Decoder, target: LookupEngine, sampling: Sampling, num: int) -> float:
    exact = exact_law(target, sampling, decoder.stop_ids)
    return decoder_p_value(decoder, exact, sampling=sampling, gamma=6, num_samples=num, seed=5)


@pytest.mark.parametrize(("sampling", "kind"), SETTINGS)
def test_the_decoder_emits_the_target_law(
    sampling: Sampling, kind: str, target: LookupEngine, drafts: dict[str, LookupEngine]
) -> None:
    decoder = decoder_of(target, drafts, kind)
    assert p_value_of(decoder, target, sampling, 900) > SIGNIFICANCE


def test_the_decoders_check_fails_when_candidates_are_chosen_not_drawn(
    target: LookupEngine, drafts: dict[str, LookupEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest ids, judged as if they had been drawn."""
    monkeypatch.setattr(
        draft_model, "drawn_apart", lambda law_V, uniform_N: law_V.topk(len(uniform_N)).indices
    )
    decoder = decoder_of(target, drafts, "all ids")
    assert p_value_of(decoder, target, Sampling(1.0), 1500) < SIGNIFICANCE
