"""One round emits the target's law: its rule's decisions probed and its output law enumerated, then
the rule with real uniforms over every sampling setting.
"""

# B drafts, G drafted positions (gamma), V vocabulary

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from models.decoding import verify
from models.decoding.sampling import Sampling, draw, law, likeliest
from models.decoding.verify import Verdict, block, chain
from tests.laws import (
    GAMMAS,
    HOT_IDS,
    SIGNIFICANCE,
    TEMPERATURES,
    TRUNCATIONS,
    law_p_value,
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
    assert found == verify.on_host(want, drafted_BG)


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
