"""Every divergence against an independent implementation, its gradient against the closed form."""

# C outcomes, N positions, K recorded ids, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr
from torch import Tensor

from conf.choices import Divergence
from conf.groups import ObjectiveConfig
from train.objectives import (
    SMALLEST,
    cross_entropy,
    forward_kl,
    jsd,
    lk_alpha,
    lk_lambda,
    lump,
    objective,
    overlap,
    reverse_kl,
    tv,
    tvd_plus_plus,
)

Law = Callable[[Tensor, Tensor], Tensor]

ALL: dict[str, Law] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": lambda p, q: jsd(p, q, beta=0.3),
    "tv": tv,
    "lk_alpha": lk_alpha,
    "lk_lambda": lambda p, q: lk_lambda(p, q, eta=3.0),
    "tvd_plus_plus": tvd_plus_plus,
}
each = pytest.mark.parametrize("name", ALL)


def some_laws(n: int = 7, c: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two sets of log-probabilities in float64."""
    rng = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(n, c, generator=rng, dtype=torch.float64) * 2 for _ in range(2))
    return p.log_softmax(-1), q.log_softmax(-1)


def by_numpy(name: str, log_p: Tensor, log_q: Tensor) -> np.ndarray:
    """The definitions of science.md section 5, from probabilities, by scipy."""
    p, q = np.exp(log_p.numpy()), np.exp(log_q.numpy())
    alpha = np.minimum(p, q).sum(-1)
    kl = rel_entr(p, q).sum(-1)
    if name == "forward_kl":
        return kl
    if name == "reverse_kl":
        return rel_entr(q, p).sum(-1)
    if name == "jsd":
        m = 0.3 * p + 0.7 * q
        return 0.3 * rel_entr(p, m).sum(-1) + 0.7 * rel_entr(q, m).sum(-1)
    if name == "tv":
        return np.abs(p - q).sum(-1) / 2
    if name == "lk_alpha":
        return -np.log(alpha)
    if name == "tvd_plus_plus":
        reward = (q > p).astype(float)
        mean = (q * reward).sum(-1, keepdims=True)
        return (1 - alpha) / np.sqrt((q * (reward - mean) ** 2).sum(-1))
    lam = np.exp(-3.0 * alpha)
    return lam * kl + (1 - lam) * (1 - alpha)


# ---------------------------------------------------------------- values


@each
def test_value_is_the_definition(name: str) -> None:
    log_p, log_q = some_laws()
    np.testing.assert_allclose(
        ALL[name](log_p, log_q).numpy(), by_numpy(name, log_p, log_q), rtol=1e-11, atol=1e-13
    )


@pytest.mark.parametrize(("name", "swap"), [("forward_kl", False), ("reverse_kl", True)])
def test_kl_is_torchs(name: str, swap: bool) -> None:
    log_p, log_q = some_laws()
    of, against = (log_q, log_p) if swap else (log_p, log_q)
    theirs = F.kl_div(against, of, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(ALL[name](log_p, log_q), theirs)


@each
def test_float32_is_close_to_float64(name: str) -> None:
    log_p, log_q = some_laws()
    ours = ALL[name](log_p.float(), log_q.float())
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours.double(), ALL[name](log_p, log_q), rtol=2e-6, atol=2e-6)


@each
def test_equal_laws_have_no_divergence_and_no_gradient(name: str) -> None:
    log_p, _ = some_laws()
    logits = log_p.clone().requires_grad_()
    value = ALL[name](log_p, logits.log_softmax(-1))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    torch.testing.assert_close(value.detach(), torch.zeros_like(value), rtol=0, atol=1e-11)
    if name in ("forward_kl", "reverse_kl", "jsd"):  # TV has a corner there
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_jsd_becomes_a_kl_at_its_ends() -> None:
    """JSD(beta) / beta -> KL(p || q) as beta -> 0 and / (1 - beta) -> KL(q || p) as beta -> 1."""
    log_p, log_q = some_laws()
    small = 1e-7
    torch.testing.assert_close(
        jsd(log_p, log_q, beta=small) / small, forward_kl(log_p, log_q), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        jsd(log_p, log_q, beta=1 - small) / small, reverse_kl(log_p, log_q), rtol=1e-4, atol=1e-6
    )
    half = jsd(log_p, log_q, beta=0.5)
    torch.testing.assert_close(half, jsd(log_q, log_p, beta=0.5))
    assert bool((half < math.log(2)).all())


def test_overlap_is_the_acceptance_of_sampled_drafts() -> None:
    """Accept x ~ q with probability min(1, p/q): the share that is accepted is sum min(p, q)."""
    log_p, log_q = some_laws(n=3)
    rng = torch.Generator().manual_seed(1)
    num_draws = 200_000
    drawn = torch.multinomial(log_q.exp(), num_draws, replacement=True, generator=rng)
    ratio = (log_p - log_q).exp().gather(-1, drawn)
    uniforms = torch.rand(3, num_draws, generator=rng, dtype=torch.float64)
    share = (uniforms <= ratio).double().mean(-1)
    alpha = overlap(log_p, log_q)
    error = (alpha * (1 - alpha) / num_draws).sqrt()
    assert bool(((share - alpha).abs() < 5 * error).all())


# ---------------------------------------------------------------- gradients


def closed_form(name: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Gradient in the draft's logits as science.md section 5 gives it."""
    p, q = log_p.exp(), log_q.exp()
    if name == "forward_kl":
        return q - p
    if name == "reverse_kl":
        return q * (log_q - log_p - reverse_kl(log_p, log_q).unsqueeze(-1))
    above = (q > p).double()
    of_tv = q * (above - (q * above).sum(-1, keepdim=True))
    if name == "tv":
        return of_tv
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    if name == "lk_alpha":
        return of_tv / alpha
    if name == "tvd_plus_plus":
        reward = (above - (q * above).sum(-1, keepdim=True)) ** 2
        return of_tv / (q * reward).sum(-1, keepdim=True).sqrt()
    lam = torch.exp(-3.0 * alpha)
    return lam * (q - p) + (1 - lam) * of_tv


@pytest.mark.parametrize("name", [name for name in ALL if name != "jsd"])
def test_gradient_is_the_closed_form(name: str) -> None:
    log_p, logits = some_laws()
    logits = logits.requires_grad_()
    (ours,) = torch.autograd.grad(ALL[name](log_p, logits.log_softmax(-1)).sum(), logits)
    torch.testing.assert_close(ours, closed_form(name, log_p, logits.detach().log_softmax(-1)))


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("lk_lambda", "tvd_plus_plus")])
def test_gradient_is_the_finite_difference(name: str) -> None:
    """Not of lk_lambda and TVD++: their weights are constants for the gradient, not for a
    difference.
    """
    log_p, logits = some_laws(n=3, c=5, seed=4)
    assert torch.autograd.gradcheck(
        lambda z: ALL[name](log_p, z.log_softmax(-1)), logits.requires_grad_()
    )


def test_tvd_plus_plus_is_the_policy_gradient_of_the_standardised_reward() -> None:
    """2403.00858: the mean over tokens x ~ q of grad log q(x) (r(x) - mean) / sigma."""
    log_p, logits = some_laws(n=3, c=6)
    logits.requires_grad_()
    (ours,) = torch.autograd.grad(tvd_plus_plus(log_p, logits.log_softmax(-1)).sum(), logits)
    log_q = logits.log_softmax(-1)
    for n in range(3):
        expected = torch.zeros(6, dtype=torch.float64)
        q, reward = log_q[n].detach().exp(), (log_q[n] > log_p[n]).double()
        mean = (q * reward).sum()
        sigma = (q * (reward - mean) ** 2).sum().sqrt()
        for x in range(6):
            (score,) = torch.autograd.grad(log_q[n, x], logits, retain_graph=True)
            expected += q[x] * score[n] * (reward[x] - mean) / sigma
        torch.testing.assert_close(ours[n], expected)


def test_cross_entropy_is_torchs_and_forward_kl_in_expectation() -> None:
    log_p, logits = some_laws()
    target = torch.tensor([0, 3, 10, 5, 5, 1, 2])
    log_q = logits.log_softmax(-1)
    ours = cross_entropy(log_q.gather(-1, target.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(ours, F.cross_entropy(logits, target, reduction="none"))
    p = log_p.exp()
    mean = (p * cross_entropy(log_q)).sum(-1)
    torch.testing.assert_close(mean, forward_kl(log_p, log_q) - (p * log_p).sum(-1))


def test_a_mixture_is_the_weighted_sum() -> None:
    log_p, log_q = some_laws()
    of_token = log_q[:, 2]
    mixture = {"forward_kl": 0.7, "tv": 0.2, "cross_entropy": 0.1}
    mixed = objective(ObjectiveConfig(mixture=mixture), 0.0)
    expected = 0.7 * forward_kl(log_p, log_q) + 0.2 * tv(log_p, log_q) - 0.1 * of_token
    torch.testing.assert_close(mixed(log_p, log_q, of_token), expected)


def test_lk_alpha_lifts_the_gradient_where_tv_has_none() -> None:
    log_p = torch.tensor([[0.0, -30.0, -30.0]], dtype=torch.float64).log_softmax(-1)
    logits = torch.tensor([[-9.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    log_q = logits.log_softmax(-1)
    (of_tv,) = torch.autograd.grad(tv(log_p, log_q).sum(), logits, retain_graph=True)
    (of_lk,) = torch.autograd.grad(lk_alpha(log_p, log_q).sum(), logits)
    torch.testing.assert_close(of_lk, of_tv / overlap(log_p, log_q.detach()))
    assert float(of_tv.abs().max()) < 1e-4 < 0.5 < float(of_lk.abs().max())


# ---------------------------------------------------------------- excluded ids


# KL(q || p) is infinite where p is 0 and q is not
EXCLUDED = [
    (name, of) for name in ALL for of in ("p", "p and q") if (name, of) != ("reverse_kl", "p")
]


@pytest.mark.parametrize(("name", "excluded_from"), EXCLUDED)
def test_ids_that_a_law_excludes_are_safe(name: str, excluded_from: str) -> None:
    """-inf is probability 0: values equal those on the remaining ids, gradients are finite."""
    log_p, _ = some_laws(n=2, c=4)
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits.requires_grad_()
    nothing = torch.full((2, 2), -math.inf, dtype=torch.float64)
    p = torch.cat([log_p, nothing], -1)
    if excluded_from == "p":
        wide = torch.cat([logits, torch.zeros(2, 2, dtype=torch.float64)], -1)
        value = ALL[name](p, wide.log_softmax(-1))
        expected = by_numpy(name, p, wide.detach().log_softmax(-1))
    else:
        value = ALL[name](p, torch.cat([logits.log_softmax(-1), nothing], -1))
        expected = by_numpy(name, log_p, logits.detach().log_softmax(-1))
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-10, atol=1e-13)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert bool(torch.isfinite(gradient).all())


# ---------------------------------------------------------------- recorded laws


def recorded(log_p_NV: Tensor, log_q_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What is left of two dense laws when p's top k are kept: lumped, N K+1."""
    top = log_p_NV.topk(k, -1)
    return lump(top.values), lump(log_q_NV.gather(-1, top.indices))


@given(st.integers(0, 2**31), st.integers(1, 11), st.floats(0.1, 5))
def test_lumping_only_lowers_a_divergence(seed: int, k: int, spread: float) -> None:
    """Data-processing inequality; for TV it means that lumping only raises the acceptance."""
    rng = torch.Generator().manual_seed(seed)
    log_p, log_q = (
        (torch.randn(3, 12, generator=rng, dtype=torch.float64) * spread).log_softmax(-1)
        for _ in range(2)
    )
    small_p, small_q = recorded(log_p, log_q, k)
    for name in ("forward_kl", "reverse_kl", "jsd", "tv", "lk_alpha"):
        dense, lumped = ALL[name](log_p, log_q), ALL[name](small_p, small_q)
        # a rest below SMALLEST is raised to it, and no longer sums to 1
        assert bool((lumped <= dense + 40 * SMALLEST).all()), name
    # without the rest's share it is the other bound
    assert bool((overlap(small_p[:, :-1], small_q[:, :-1]) <= overlap(log_p, log_q) + 1e-12).all())


@each
def test_lumped_with_every_id_is_the_dense_value(name: str) -> None:
    log_p, log_q = some_laws()
    lumped = ALL[name](*recorded(log_p, log_q, log_p.shape[-1]))
    torch.testing.assert_close(lumped, ALL[name](log_p, log_q), rtol=1e-5, atol=40 * SMALLEST)


def test_lumped_forward_kl_has_the_dense_gradient_on_kept_ids() -> None:
    """q_j - p_j on kept ids; elsewhere the q - p of the rest, shared out in proportion to q."""
    log_p, logits = some_laws(n=4, c=20)
    logits.requires_grad_()
    (ours,) = torch.autograd.grad(
        forward_kl(*recorded(log_p, logits.log_softmax(-1), 5)).sum(), logits
    )
    p, q = log_p.exp(), logits.detach().softmax(-1)
    kept = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, log_p.topk(5, -1).indices, True)
    rest_p, rest_q = (x.masked_fill(kept, 0).sum(-1, keepdim=True) for x in (p, q))
    torch.testing.assert_close(ours, torch.where(kept, q - p, q * (1 - rest_p / rest_q)))


def test_lump_appends_the_mass_that_is_left() -> None:
    log_p = torch.tensor(
        [[0.5, 0.25], [0.75, 0.25], [0.8, 0.2001]]
    ).log()  # the last: float16 rounding
    rest = lump(log_p)[:, -1].exp()
    torch.testing.assert_close(rest, torch.tensor([0.25, SMALLEST, SMALLEST]))
    torch.testing.assert_close(lump(log_p)[:, :-1], log_p)


# ---------------------------------------------------------------- schedule


@pytest.mark.parametrize("name", list(Divergence))
def test_every_configured_divergence_is_its_function(name: Divergence) -> None:
    log_p, log_q = some_laws()
    chosen = objective(ObjectiveConfig(divergence=name, beta=0.3, eta=3.0), 0.5)
    if name is Divergence.cross_entropy:
        expected = cross_entropy(log_q[:, 0])
    else:
        expected = ALL[str(name)](log_p, log_q)
    torch.testing.assert_close(chosen(log_p, log_q, log_q[:, 0]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_steps", [1, 3, 10, 77, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.4, 0.7, 1.0])
def test_finish_takes_over_for_its_share_of_the_steps(num_steps: int, share: float) -> None:
    log_p, log_q = some_laws(n=1)
    config = ObjectiveConfig(finish=Divergence.tv, finish_share=share)
    is_last = [
        bool(objective(config, step / num_steps)(log_p, log_q) == tv(log_p, log_q))
        for step in range(num_steps)
    ]
    assert is_last == sorted(is_last)  # never back
    assert sum(is_last) == math.floor(share * num_steps + 1e-9)
