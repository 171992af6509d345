"""Speculative decoding emits the target's law: enumerated, sampled, and rejected when broken.

Three levels. `chain` alone, its decisions probed and its output law enumerated; `chain` with real
uniforms over every sampling setting; whole `Decoder.decode` outputs of random models. The last
check must reject each planted bug.
"""

# B drafts, G drafted positions (gamma), V vocabulary

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.choices import Verification
from models.decoding import draft_model, speculative, verify
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import CombinedDrafter, Drafter, LookupDrafter
from models.decoding.engine import Engine, narrow_head
from models.decoding.length import StopBelow
from models.decoding.sampling import Sampling, draw, law, likeliest, penalise
from models.decoding.speculative import Decoder
from models.decoding.verify import Verdict, block, chain
from tests.families import tiny_family
from tests.laws import (
    DEPTH,
    SIGNIFICANCE,
    SPREAD,
    VOCAB_SIZE,
    LookupEngine,
    decoder_p_value,
    exact_law,
    law_p_value,
    lookup,
)

verify_residual = verify.residual  # kept from those who replace it


# ---------------------------------------------------------------- exact: probing and enumerating


def supremum(holds: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """The largest u in [0, 1] that `holds`, row by row; it turns false once at most."""
    low, high = torch.zeros(size, dtype=dtype), torch.ones(size, dtype=dtype)
    for _ in range(60 if dtype == torch.float64 else 30):
        middle = (low + high) / 2
        true = holds(middle)
        low, high = low.where(~true, middle), high.where(true, middle)
    return high.double()


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Verdict]


def acceptance(p: Tensor, q: Tensor, drafted_BG: Tensor, rule: Rule = chain) -> Tensor:
    """P(position i is accepted | all before it are, none after it) over its uniform: BG, by probing
    the rule.
    """
    num_drafts, gamma = drafted_BG.shape
    any_B = torch.full((num_drafts,), 0.5, dtype=p.dtype)

    def accepts(position: int, u_B: Tensor) -> Tensor:
        uniform_BG = torch.zeros(num_drafts, gamma, dtype=p.dtype)
        uniform_BG[:, position] = u_B
        uniform_BG[:, position + 1 :] = 1
        return rule(p, q, drafted_BG, uniform_BG, any_B).num_accepted_B > position

    return torch.stack(
        [supremum(lambda u, i=i: accepts(i, u), num_drafts, p.dtype) for i in range(gamma)], 1
    )


def num_accepted_law(accepted_BG: Tensor, rule: Rule) -> Tensor:
    """Law of the number of accepted tokens, B G+1, from `acceptance`.

    `chain` stops at the first failure; `block` keeps the longest prefix that passes.
    """
    one_B1 = torch.ones_like(accepted_BG[:, :1])
    if rule is chain:
        return torch.cat([one_B1, accepted_BG.cumprod(-1)], 1) * torch.cat(
            [1 - accepted_BG, one_B1], 1
        )
    later_fail = (1 - accepted_BG).flip(1).cumprod(1).flip(1)
    return torch.cat([one_B1, accepted_BG], 1) * torch.cat([later_fail, one_B1], 1)


def emission(
    p: Tensor, q: Tensor, drafted_BG: Tensor, num_accepted: int, rule: Rule = chain
) -> Tensor:
    """Law of the token after `num_accepted` accepted ones: BV, found by probing the rule.

    Tokens are drawn by inversion: the token rises with the uniform, and passes v at P(token <= v).
    """
    num_drafts, gamma = drafted_BG.shape
    uniform_BG = (torch.arange(gamma) >= num_accepted).to(p.dtype).repeat(num_drafts, 1)

    def at_most(token: int, u_B: Tensor) -> Tensor:
        return rule(p, q, drafted_BG, uniform_BG, u_B).next_token_B <= token

    below = [
        supremum(lambda u, v=v: at_most(v, u), num_drafts, p.dtype) for v in range(p.shape[-1])
    ]
    return torch.stack(below, 1).diff(dim=1, prepend=torch.zeros(num_drafts, 1))


def joint(laws: Sequence[Tensor]) -> Tensor:
    """Law of a sequence from one conditional law per position, indexed by the tokens before."""
    whole = torch.ones((), dtype=torch.float64)
    for conditional in laws:
        whole = whole.unsqueeze(-1) * conditional.double()
    return whole


def exact_output_law(
    p_tree: Sequence[Tensor], q_tree: Sequence[Tensor], rule: Rule = chain
) -> Tensor:
    """Law of the next G+1 tokens: a round, continued by the target where the round was shorter."""
    gamma, vocab_size = len(q_tree), p_tree[0].shape[-1]
    drafts = list(itertools.product(range(vocab_size), repeat=gamma))
    p = torch.stack([torch.stack([p_tree[i][d[:i]] for i in range(gamma + 1)]) for d in drafts])
    q = torch.stack([torch.stack([q_tree[i][d[:i]] for i in range(gamma)]) for d in drafts])
    drafted_BG = torch.tensor(drafts)
    ends_BG = num_accepted_law(acceptance(p, q, drafted_BG, rule), rule)
    weight_B = joint(q_tree).flatten()
    out = torch.zeros([vocab_size] * (gamma + 1), dtype=torch.float64)
    for num_accepted in range(gamma + 1):
        ends_B = weight_B * ends_BG[:, num_accepted]
        chance_BV = ends_B.unsqueeze(1) * emission(p, q, drafted_BG, num_accepted, rule)
        for draft, chance_V in zip(drafts, chance_BV, strict=True):
            prefix = draft[:num_accepted]
            rest = torch.ones(vocab_size, dtype=torch.float64)
            for conditional in p_tree[num_accepted + 1 :]:
                rest = rest.unsqueeze(-1) * conditional[prefix].double()
            out[prefix] += chance_V.view(-1, *[1] * (rest.ndim - 1)) * rest
    return out


def random_tree(vocab_size: int, depth: int, kind: str, rng: torch.Generator) -> list[Tensor]:
    """Conditional laws of `depth` positions, float64."""
    laws = []
    for position in range(depth):
        shape = [vocab_size] * (position + 1)
        logits = 2 * torch.randn(shape, generator=rng, dtype=torch.float64)
        if kind == "sparse":
            logits[torch.rand(shape, generator=rng) < 0.5] = -torch.inf
            logits[..., 0] = logits[..., 0].clamp(min=-3)
        if kind == "one-hot":
            logits = torch.where(logits == logits.amax(-1, keepdim=True), 0.0, -torch.inf)
        if kind in ("low half", "high half"):
            ids = torch.arange(vocab_size) < vocab_size // 2
            logits = logits.where(ids if kind == "low half" else ~ids, -torch.inf)
        laws.append(torch.softmax(logits, -1))
    return laws


KINDS = [
    ("dense", "dense"),
    ("sparse", "sparse"),
    ("dense", "one-hot"),
    ("one-hot", "dense"),
    ("one-hot", "one-hot"),
    ("low half", "high half"),
    ("dense", "low half"),
    ("dense", "equal"),
    ("one-hot", "equal"),
    ("dense", "nearly equal"),
]


def tree_pair(vocab_size: int, gamma: int, p_kind: str, q_kind: str, dtype: torch.dtype) -> Any:
    rng = torch.Generator().manual_seed(vocab_size * 10 + gamma)
    p_tree = random_tree(vocab_size, gamma + 1, p_kind, rng)
    if q_kind == "equal":
        q_tree = [conditional.clone() for conditional in p_tree[:gamma]]
    elif q_kind == "nearly equal":
        q_tree = [
            torch.softmax(x.log() + 1e-7 * torch.randn(x.shape, generator=rng), -1)
            for x in p_tree[:gamma]
        ]
    else:
        q_tree = random_tree(vocab_size, gamma, q_kind, rng)
    return [x.to(dtype) for x in p_tree], [x.to(dtype) for x in q_tree]


@pytest.mark.parametrize("rule", [chain, block])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("p_kind", "q_kind"), KINDS)
@pytest.mark.parametrize(("vocab_size", "gamma"), [(2, 1), (5, 1), (3, 2), (5, 2), (3, 3), (5, 3)])
def test_a_round_emits_exactly_the_target_law(
    vocab_size: int, gamma: int, p_kind: str, q_kind: str, dtype: torch.dtype, rule: Rule
) -> None:
    p_tree, q_tree = tree_pair(vocab_size, gamma, p_kind, q_kind, dtype)
    error = (exact_output_law(p_tree, q_tree, rule) - joint(p_tree)).abs().max()
    # below RESIDUAL_FLOOR a rejection is answered from p itself
    exact = dtype == torch.float64 and q_kind != "nearly equal"
    assert error < (1e-12 if exact else 1e-6)


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    p_tree, q_tree = tree_pair(5, 1, "dense", "dense", torch.float64)
    ids = torch.arange(5).unsqueeze(1)
    p = torch.stack([torch.stack([p_tree[0], p_tree[1][token]]) for token in range(5)])
    accepted_BG = acceptance(p, q_tree[0].expand(5, 1, 5), ids)
    overlap = torch.minimum(p_tree[0], q_tree[0]).sum()
    torch.testing.assert_close((q_tree[0] * accepted_BG[:, 0]).sum(), overlap)


def mean_num_accepted(p_tree: Sequence[Tensor], q_tree: Sequence[Tensor], rule: Rule) -> float:
    gamma, vocab_size = len(q_tree), p_tree[0].shape[-1]
    drafts = list(itertools.product(range(vocab_size), repeat=gamma))
    p = torch.stack([torch.stack([p_tree[i][d[:i]] for i in range(gamma + 1)]) for d in drafts])
    q = torch.stack([torch.stack([q_tree[i][d[:i]] for i in range(gamma)]) for d in drafts])
    ends_BG = num_accepted_law(acceptance(p, q, torch.tensor(drafts), rule), rule)
    mean_B = (ends_BG * torch.arange(gamma + 1)).sum(-1)
    return float((joint(q_tree).flatten() * mean_B).sum())


@pytest.mark.parametrize("rule", [chain, block])
def test_the_greedy_rule_is_what_one_hot_laws_come_to(rule: Rule) -> None:
    """With ties among the logits, and drafts that are right for a while."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randint(3, (400, 5, 4), generator=rng).float()
    p = law(logits, Sampling(0.0))
    drafted_BG = torch.randint(4, (400, 4), generator=rng)
    right_BG = torch.rand(400, 4, generator=rng) < 0.7
    drafted_BG = drafted_BG.where(~right_BG, p[:, :4].argmax(-1))
    q = torch.nn.functional.one_hot(drafted_BG, 4).float()
    want = rule(p, q, drafted_BG, torch.rand(400, 4, generator=rng), torch.rand(400, generator=rng))
    found = verify.greedy(likeliest(logits), drafted_BG)
    assert set(want.num_accepted_B.tolist()) == set(range(5))
    assert torch.equal(found.num_accepted_B, want.num_accepted_B)
    assert torch.equal(found.next_token_B, want.next_token_B)


@pytest.mark.parametrize(("p_kind", "q_kind"), KINDS)
def test_a_block_accepts_at_least_what_a_chain_does(p_kind: str, q_kind: str) -> None:
    trees = tree_pair(3, 3, p_kind, q_kind, torch.float64)
    by_chain, by_block = (mean_num_accepted(*trees, rule) for rule in (chain, block))
    assert by_block > by_chain - 1e-9
    if (p_kind, q_kind) == ("dense", "dense"):  # and here it gains
        assert by_block > 1.02 * by_chain


@pytest.mark.parametrize(
    ("name", "wrong", "rule"),
    [
        ("residual", lambda p, *_: p, chain),
        ("residual", lambda p, *_: p, block),
        ("residual", lambda p, q, rejected, *_: verify_residual(p, q, rejected), block),
    ],
    ids=["chain without residual", "block without", "block without b"],
)
def test_of_a_wrong_rule_the_enumerated_law_is_another(
    name: str, wrong: Callable[..., Tensor], rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    p_tree, q_tree = tree_pair(4, 3, "dense", "dense", torch.float32)
    monkeypatch.setattr(verify, name, wrong)
    assert (exact_output_law(p_tree, q_tree, rule) - joint(p_tree)).abs().max() > 1e-3


# ---------------------------------------------------------------- sampled


def test_the_checker_tells_laws_apart() -> None:
    rng = torch.Generator().manual_seed(0)
    expected = {(0,): 0.5, (1,): 0.3, (2,): 0.2, (3,): 0.0}
    laws = torch.tensor([list(expected.values()), [0.55, 0.25, 0.2, 0.0], [0.5, 0.3, 0.199, 0.001]])
    same, other, impossible = (
        [(int(token),) for token in torch.multinomial(one, 5000, replacement=True, generator=rng)]
        for one in laws
    )
    assert law_p_value(same, expected) > 1e-3
    assert law_p_value(other, expected) < SIGNIFICANCE
    assert law_p_value(impossible, expected) == 0


TRUNCATIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "top_k+top_p+min_p": {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
}
TEMPERATURES = [0.6, 1.0, 1.5]
GAMMAS = [1, 2, 4]
HOT_IDS = torch.tensor([4, 0, 3, 1])  # neither in order nor without gaps


@pytest.mark.parametrize("rule", [chain, block])
@pytest.mark.parametrize("hot", [False, True], ids=["all ids", "hot ids"])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_round_with_real_uniforms_emits_the_target_law(
    temperature: float, truncation: str, gamma: int, hot: bool, rule: Rule
) -> None:
    """The first two tokens of 50,000 rounds over random first-order models."""
    vocab_size, num_samples = 6, 50_000
    rng = torch.Generator().manual_seed(1000 + gamma)
    sampling = Sampling(temperature, **TRUNCATIONS[truncation])
    p_VV = law(2 * torch.randn(vocab_size, vocab_size, generator=rng), sampling)
    q_VV = law(2 * torch.randn(vocab_size, vocab_size, generator=rng), sampling)
    if hot:
        hot_VH = law(2 * torch.randn(vocab_size, len(HOT_IDS), generator=rng), sampling)
        q_VV = torch.zeros_like(q_VV).index_copy_(1, HOT_IDS, hot_VH)
    uniform = torch.rand(2 * gamma + 2, num_samples, generator=rng)
    tokens = [torch.zeros(num_samples, dtype=torch.long)]
    for position in range(gamma):
        tokens.append(draw(q_VV[tokens[-1]], uniform[position]))
    fed_BT = torch.stack(tokens, 1)
    verdict = rule(
        p_VV[fed_BT], q_VV[fed_BT[:, :-1]], fed_BT[:, 1:], uniform[gamma : 2 * gamma].T, uniform[-2]
    )
    first_B = fed_BT[:, 1].where(verdict.num_accepted_B > 0, verdict.next_token_B)
    second_B = fed_BT[:, min(2, gamma)].where(verdict.num_accepted_B > 1, verdict.next_token_B)
    # a round that ended at its first token is continued by the target
    second_B = second_B.where(verdict.num_accepted_B > 0, draw(p_VV[first_B], uniform[-1]))
    exact_VV = p_VV[0].unsqueeze(1).double() * p_VV.double()
    expected = {(a, b): float(exact_VV[a, b]) for a in range(vocab_size) for b in range(vocab_size)}
    samples = zip(first_B.tolist(), second_B.tolist(), strict=True)
    assert law_p_value(samples, expected) > SIGNIFICANCE


# ---------------------------------------------------------------- whole decoder


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


# ---------------------------------------------------------------- planted bugs

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
