"""The chunked head against a dense computation over the whole vocabulary."""

# N positions, E features, V vocabulary, K recorded ids

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from conf.choices import Divergence
from conf.groups import ObjectiveConfig
from data.batches import Batch, collate
from tests.lessons import made_up_row
from train.head import Head, TargetLaws
from train.objectives import forward_kl, lump, objective

VOCAB, FEATURES, TOP_K = 97, 12, 6
ALL_AT_ONCE = 1000
FORWARD_KL = objective(ObjectiveConfig(), 0.0)
chunks = pytest.mark.parametrize("chunk", [1, 3, ALL_AT_ONCE])
HOT = torch.tensor([*range(0, 60, 2), 61, 80, 96])


@pytest.fixture
def batch() -> Batch:
    lengths = [(2, 7), (4, 3), (1, 9)]
    return collate(
        [made_up_row(i, p, g, vocab_size=VOCAB, top_k=TOP_K) for i, (p, g) in enumerate(lengths)]
    )


def weights(seed: int = 0) -> Tensor:
    return torch.randn(VOCAB, FEATURES, generator=torch.Generator().manual_seed(seed))


def features(batch: Batch, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(batch.num_supervised, FEATURES, generator=rng)


def head(
    hot: Tensor | None = None, *, num_cold: int = 0, chunk: int = ALL_AT_ONCE, **options: Any
) -> Head:
    settings: dict[str, Any] = {"dtype": torch.float32, **options}
    return Head(weights(), hot, num_cold=num_cold, chunk=chunk, **settings)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense_laws(batch: Batch, logits_NV: Tensor, hot: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Recorded ids and the rest, position by position, from a softmax over the whole vocabulary."""
    allowed = set(range(VOCAB)) if hot is None else set(hot.tolist())
    log_p, log_q = [], []
    for n, log_q_V in enumerate(logits_NV.log_softmax(-1)):
        kept = [k for k in range(TOP_K) if int(batch.top_ids_NK[n, k]) in allowed]
        gone = torch.full((TOP_K - len(kept),), -1e4)
        log_p.append(lump(torch.cat([batch.top_log_p_NK[n, kept], gone])))
        log_q.append(lump(torch.cat([log_q_V[batch.top_ids_NK[n, kept]], gone])))
    return torch.stack(log_p), torch.stack(log_q)


# ---------------------------------------------------------------- the whole vocabulary


@chunks
@pytest.mark.parametrize("name", list(Divergence))
def test_gradient_is_autograds_through_a_dense_head(
    batch: Batch, name: Divergence, chunk: int
) -> None:
    chosen = objective(ObjectiveConfig(divergence=name), 0.0)
    x = features(batch).requires_grad_()
    logits = x @ weights().T
    log_q_next = logits.log_softmax(-1).gather(-1, batch.next_N.unsqueeze(-1)).squeeze(-1)
    loss = chosen(*dense_laws(batch, logits), log_q_next).sum()
    (expected,) = torch.autograd.grad(loss * 0.25, x)
    sums, ours = head(chunk=chunk).backward(x.detach(), batch, chosen, scale=0.25, rng=rng())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert sums.loss == pytest.approx(float(loss.detach()), rel=1e-5)  # not scaled: it is shown
    assert sums.count == batch.num_supervised


@pytest.mark.parametrize("hot", [None, HOT], ids=["all hot", "some hot"])
@pytest.mark.parametrize("name", list(Divergence))
def test_ids_that_fill_up_a_law_change_nothing(
    batch: Batch, name: Divergence, hot: Tensor | None
) -> None:
    """Laws of fewer ids end in id 0 of no probability, where q has some, and a recorded one too."""
    chosen = objective(ObjectiveConfig(divergence=name), 0.0)
    x, of = features(batch), head(hot)
    num = batch.num_supervised
    batch.top_ids_NK[: num // 2, 0] = 0
    longer = dataclasses.replace(
        batch,
        top_ids_NK=pad(batch.top_ids_NK, (0, 3)),
        top_log_p_NK=pad(batch.top_log_p_NK, (0, 3), value=-torch.inf),
    )
    (sums, ours), (expected_sums, expected) = (
        of.backward(x, each, chosen, scale=1.0, rng=rng()) for each in (longer, batch)
    )
    torch.testing.assert_close(ours, expected)
    assert sums.loss == pytest.approx(expected_sums.loss)
    assert sums.acceptance == pytest.approx(expected_sums.acceptance)
    torch.testing.assert_close(of.acceptance(x, longer), of.acceptance(x, batch))


def test_forward_kl_at_full_support_is_kl_over_the_vocabulary(batch: Batch) -> None:
    """With every id recorded, nothing is lumped: gradient (q - p) W of the textbook."""
    x = features(batch)
    whole = torch.randn(batch.num_supervised, VOCAB, generator=rng(5)).log_softmax(-1)
    top = whole.sort(-1, descending=True)
    batch.top_ids_NK, batch.top_log_p_NK = top.indices, top.values
    _, ours = head().backward(x, batch, FORWARD_KL, scale=1.0, rng=rng())
    expected = ((x @ weights().T).softmax(-1) - whole.exp()) @ weights()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_half_precision_products_stay_close(batch: Batch) -> None:
    x = features(batch)
    sums, ours = head(dtype=torch.bfloat16).backward(x, batch, FORWARD_KL, scale=1.0, rng=rng())
    exact, expected = head().backward(x, batch, FORWARD_KL, scale=1.0, rng=rng())
    assert ours.dtype is torch.float32
    assert sums.loss == pytest.approx(exact.loss, rel=0.02)
    assert float((ours - expected).norm() / expected.norm()) < 0.02


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        self.numel = max([self.numel, *(x.numel() for x in made if isinstance(x, Tensor))])
        return out


def test_nothing_of_the_size_of_all_logits_ever_exists(batch: Batch) -> None:
    small = head(chunk=2)
    with _Largest() as largest:
        small.backward(features(batch), batch, FORWARD_KL, scale=1.0, rng=rng())
        small.acceptance(features(batch), batch)
    assert largest.numel <= VOCAB * FEATURES < batch.num_supervised * VOCAB
    with _Largest() as largest:
        head().backward(features(batch), batch, FORWARD_KL, scale=1.0, rng=rng())
    assert largest.numel == batch.num_supervised * VOCAB  # the measurement sees it where it is


# ---------------------------------------------------------------- hot and cold ids


def normaliser(of: Head, batch: Batch, x: Tensor, seed: int) -> Tensor:
    """What the head takes for sum exp(logit), read off a recorded id's log q."""
    log_q = of.laws(x, batch, slice(None), of.sample_cold(rng(seed))).log_q
    slot = (of.slot_V[batch.top_ids_NK] >= 0).int().argmax(-1, keepdim=True)  # a hot one
    logit = (x @ of.weight_VE.T).gather(-1, batch.top_ids_NK.gather(-1, slot))
    return (logit - log_q.gather(-1, slot)).squeeze(-1).double().exp()


def test_the_sampled_normaliser_is_unbiased(batch: Batch) -> None:
    batch.top_ids_NK[:, 0] = HOT[3]
    x, of = features(batch) / 4, head(HOT, num_cold=8)
    exact = (x.double() @ weights().double().T).exp().sum(-1)
    estimates = torch.stack([normaliser(of, batch, x, seed) for seed in range(3000)])
    error = estimates.std(0) / len(estimates) ** 0.5
    assert bool((error > 0).all())
    assert bool(((estimates.mean(0) - exact).abs() < 5 * error).all())


def test_a_fresh_sample_is_taken_every_step_and_repeats_with_its_seed() -> None:
    of = head(HOT, num_cold=8)
    first, again, other = (of.sample_cold(rng(seed)) for seed in (0, 0, 1))
    assert first is not None and again is not None and other is not None
    assert first.shape == (8, FEATURES)
    assert torch.equal(first, again) and not torch.equal(first, other)
    cold = {tuple(row) for row in weights()[of.cold_ids].tolist()}
    assert {tuple(row) for row in first.tolist()} <= cold
    assert sorted([*of.cold_ids.tolist(), *HOT.tolist()]) == list(range(VOCAB))


@chunks
def test_with_every_cold_id_in_the_sample_the_result_is_exact(batch: Batch, chunk: int) -> None:
    """And recorded ids that are not hot count as rest, in value and gradient."""
    assert bool((torch.isin(batch.top_ids_NK, HOT).sum(-1) < TOP_K).any())
    x = features(batch).requires_grad_()
    loss = forward_kl(*dense_laws(batch, x @ weights().T, HOT)).sum()
    (expected,) = torch.autograd.grad(loss, x)
    of = head(HOT, num_cold=VOCAB, chunk=chunk)
    sums, ours = of.backward(x.detach(), batch, FORWARD_KL, scale=1.0, rng=rng())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert sums.loss == pytest.approx(float(loss.detach()), rel=1e-5)


@chunks
def test_the_sample_is_the_same_for_every_chunk(batch: Batch, chunk: int) -> None:
    x = features(batch)
    whole = head(HOT, num_cold=8).backward(x, batch, FORWARD_KL, scale=1.0, rng=rng(3))
    cut = head(HOT, num_cold=8, chunk=chunk).backward(x, batch, FORWARD_KL, scale=1.0, rng=rng(3))
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-4, atol=1e-5)
    assert cut[0].loss == pytest.approx(whole[0].loss, rel=1e-6)
    assert cut[0].acceptance == pytest.approx(whole[0].acceptance, rel=1e-6)


def test_a_position_whose_recorded_ids_are_all_cold_is_finite(batch: Batch) -> None:
    batch.top_ids_NK[0] = torch.tensor([1, 3, 5, 7, 9, 11])
    of = head(HOT, num_cold=8)
    for name in Divergence:
        chosen = objective(ObjectiveConfig(divergence=name), 0.0)
        sums, gradient = of.backward(features(batch), batch, chosen, scale=1.0, rng=rng())
        assert np.isfinite(sums.loss) and bool(torch.isfinite(gradient).all()), name
    assert float(of.acceptance(features(batch), batch)[0]) == 0.0


# ---------------------------------------------------------------- whole laws of the target


def whole_laws(batch: Batch) -> TargetLaws:
    """A target of other weights that reads other features."""
    its_head = torch.nn.Linear(5, VOCAB, bias=True)
    with torch.no_grad():
        its_head.weight.copy_(torch.randn(VOCAB, 5, generator=rng(11)))
        its_head.bias.copy_(torch.randn(VOCAB, generator=rng(12)))
    states = torch.randn(batch.num_supervised, 5, generator=rng(13))
    return TargetLaws(states, its_head.requires_grad_(False))


def over_hot_ids(logits_NV: Tensor) -> Tensor:
    """Log-probabilities of the hot ids and of all others together, from a whole softmax."""
    log_V = logits_NV.log_softmax(-1)
    cold = sorted({*range(VOCAB)} - {*HOT.tolist()})
    return torch.cat([log_V[:, HOT], log_V[:, cold].logsumexp(-1, keepdim=True)], -1)


@chunks
@pytest.mark.parametrize("hot", [None, HOT], ids=["all", "hot"])
@pytest.mark.parametrize("name", list(Divergence))
def test_whole_laws_have_autograds_gradient(
    batch: Batch, name: Divergence, hot: Tensor | None, chunk: int
) -> None:
    chosen = objective(ObjectiveConfig(divergence=name), 0.0)
    target = whole_laws(batch)
    x = features(batch).requires_grad_()
    logits, of_target = x @ weights().T, target.head(target.features_NE)
    if hot is None:
        laws = (of_target.log_softmax(-1), logits.log_softmax(-1))
    else:
        laws = (over_hot_ids(of_target), over_hot_ids(logits))
    log_q_next = logits.log_softmax(-1).gather(-1, batch.next_N.unsqueeze(-1)).squeeze(-1)
    loss = chosen(*laws, log_q_next).sum()
    (expected,) = torch.autograd.grad(loss, x)
    sums, ours = head(hot, num_cold=VOCAB, chunk=chunk).backward(
        x.detach(), batch, chosen, scale=1.0, rng=rng(), target=target
    )
    # TVD++ divides by a deviation that may be small
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
    assert sums.loss == pytest.approx(float(loss.detach()), rel=2e-4)


@pytest.mark.parametrize("name", list(Divergence))
def test_recorded_laws_of_every_id_are_whole_laws(batch: Batch, name: Divergence) -> None:
    chosen = objective(ObjectiveConfig(divergence=name), 0.0)
    target, x = whole_laws(batch), features(batch)
    whole, gradient = head().backward(x, batch, chosen, scale=1.0, rng=rng(), target=target)
    top = target.log_p(slice(None)).sort(-1, descending=True)
    batch.top_ids_NK, batch.top_log_p_NK = top.indices, top.values
    sums, recorded = head().backward(x, batch, chosen, scale=1.0, rng=rng())
    torch.testing.assert_close(recorded, gradient, rtol=1e-4, atol=1e-4)
    assert sums.loss == pytest.approx(whole.loss, rel=1e-4)
    assert sums.acceptance == pytest.approx(whole.acceptance, rel=1e-4)


@chunks
@pytest.mark.parametrize("hot", [None, HOT], ids=["all", "hot"])
def test_acceptance_by_whole_laws_is_exact(batch: Batch, hot: Tensor | None, chunk: int) -> None:
    target, x = whole_laws(batch), features(batch)
    ids = torch.arange(VOCAB) if hot is None else hot
    p = target.head(target.features_NE).softmax(-1)[:, ids]
    q = (x @ weights()[ids].T).softmax(-1)
    ours = head(hot, num_cold=8, chunk=chunk).acceptance(x, batch, target=target)
    torch.testing.assert_close(ours, torch.minimum(p, q).sum(-1))


# ---------------------------------------------------------------- acceptance


@chunks
def test_agreement_is_the_probability_of_the_next_token(batch: Batch, chunk: int) -> None:
    batch.next_N[:4] = torch.tensor([1, 0, 96, 3])  # cold, hot, hot, cold
    q = (features(batch) @ weights()[HOT].T).softmax(-1)
    place = {int(token): slot for slot, token in enumerate(HOT)}
    expected = [
        float(q[n, place[token]]) if token in place else 0.0
        for n, token in enumerate(batch.next_N.tolist())
    ]
    ours = head(HOT, num_cold=8, chunk=chunk).agreement(features(batch), batch)
    torch.testing.assert_close(ours, torch.tensor(expected))


@chunks
@pytest.mark.parametrize("hot", [None, HOT], ids=["all", "hot"])
def test_acceptance_is_the_sum_over_recorded_ids_by_hand(
    batch: Batch, hot: Tensor | None, chunk: int
) -> None:
    ids = list(range(VOCAB)) if hot is None else hot.tolist()
    logits = (features(batch).double() @ weights().double().T).numpy()
    expected = []
    for n in range(batch.num_supervised):
        mass = {i: float(np.exp(logits[n, i])) for i in ids}
        total = sum(mass.values())
        p = dict(
            zip(batch.top_ids_NK[n].tolist(), batch.top_log_p_NK[n].exp().tolist(), strict=True)
        )
        expected.append(sum(min(p[i], mass[i] / total) for i in p if i in mass))
    ours = head(hot, num_cold=8, chunk=chunk).acceptance(features(batch), batch)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_acceptance_is_below_the_true_one_and_reaches_it_with_all_ids(batch: Batch) -> None:
    x = features(batch)
    whole = torch.randn(batch.num_supervised, VOCAB, generator=rng(5)).log_softmax(-1)
    true = torch.minimum(whole.exp(), (x @ weights().T).softmax(-1)).sum(-1)
    top = whole.sort(-1, descending=True)
    for k in (3, 20, VOCAB):
        batch.top_ids_NK, batch.top_log_p_NK = top.indices[:, :k], top.values[:, :k]
        bound = head().acceptance(x, batch)
        assert bool((bound <= true + 1e-6).all())
    torch.testing.assert_close(bound, true)


def test_acceptance_in_training_counts_what_acceptance_gives(batch: Batch) -> None:
    sums, _ = head().backward(features(batch), batch, FORWARD_KL, scale=1.0, rng=rng())
    values = head().acceptance(features(batch), batch)
    assert sums.acceptance == pytest.approx(float(values.sum()), rel=1e-6)
