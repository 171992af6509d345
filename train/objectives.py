"""Divergences between the target's law p and the draft's law q, one value per position.

All take log-probabilities over the same C outcomes (last dimension), in float32, and return nats of
the leading shape. They serve dense laws (C = V) and recorded ones alike: `lump` turns the recorded
top-k ids of a position and all the rest of the vocabulary into C = K + 1 outcomes. Merging outcomes
can only lower a divergence (data processing inequality), so on lumped laws each value is a lower
bound of the dense one, and 1 - TV an upper bound of acceptance.
"""

# N positions, K recorded ids, C outcomes

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from conf.choices import Divergence
from conf.groups import ObjectiveConfig

SMALLEST = 1e-7  # probability below which the rest of the vocabulary counts as this


def lump(log_p_NK: Tensor) -> Tensor:
    """Recorded log-probabilities and the log of the mass they leave over: NK -> NC, C = K + 1."""
    rest_N1 = (1 - log_p_NK.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST)
    return torch.cat([log_p_NK, rest_N1.log()], -1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q). Gradient in a draft logit: q_j - p_j."""
    return _sum_p_log(log_p, log_p - log_q)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) = sum q log(q / p). Gradient in a logit: q_j (log(q_j / p_j) - KL(q || p))."""
    return _sum_p_log(log_q, log_q - log_p)


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (GKD, 2306.13649)."""
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum min(p, q): the probability that a token drafted from q is accepted (2211.17192, section
    3.2).
    """
    return torch.minimum(log_p, log_q).exp().sum(-1)


def tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation, 1 - sum min(p, q)."""
    return 1 - overlap(log_p, log_q)


def lk_alpha(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log sum min(p, q): the gradient of TV divided by the acceptance, so that it does not vanish
    where q is far off.
    """
    return -overlap(log_p, log_q).clamp(min=SMALLEST).log()


def lk_lambda(log_p: Tensor, log_q: Tensor, *, eta: float) -> Tensor:
    """lam KL(p || q) + (1 - lam) TV, lam = exp(-eta * acceptance), no gradient through lam."""
    total_variation = tv(log_p, log_q)
    weight = torch.exp(-eta * (1 - total_variation.detach()))
    return weight * forward_kl(log_p, log_q) + (1 - weight) * total_variation


def tvd_plus_plus(log_p: Tensor, log_q: Tensor) -> Tensor:
    """TV / sigma, no gradient through sigma: the reward 1[q > p] of a token drawn from q is
    standardised, sigma^2 = Q (1 - Q) with Q = sum q 1[q > p] (2403.00858, section 3).

    The paper estimates it from sampled tokens of a batch; here both moments are expectations at
    each position. Gradient in a draft logit: q_j (1[q_j > p_j] - Q) / sigma. On lumped laws it is
    no bound.
    """
    above = (log_q.exp() * (log_q > log_p)).sum(-1).detach()
    return tv(log_p, log_q) / (above * (1 - above)).clamp(min=SMALLEST).sqrt()


def cross_entropy(log_q_next: Tensor) -> Tensor:
    """-log q(y), y the token the target wrote: forward KL from the one-hot law of y, hence in
    expectation over y ~ p forward KL plus the entropy of p. Gradient in a logit: q_j - 1[j = y].
    """
    return -log_q_next


def _sum_p_log(log_p: Tensor, log_ratio: Tensor) -> Tensor:
    # an id that the law excludes has log p = -inf and adds 0, not nan
    return (log_p.exp() * log_ratio.where(log_p > -math.inf, 0.0)).sum(-1)


@dataclass(frozen=True)
class Objective:
    """A weighted sum of divergences, per position."""

    weights: Mapping[Divergence, float]
    of_laws: Mapping[Divergence, Callable[[Tensor, Tensor], Tensor]]

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs the log-probability of the token that follows."""
        return Divergence.cross_entropy in self.weights

    def parts(
        self, log_p: Tensor, log_q: Tensor, log_q_next: Tensor | None = None
    ) -> dict[Divergence, Tensor]:
        """Each divergence by itself, unweighted, in nats, shape N. `log_q_next`: log q of the token
        that follows, for the cross-entropy.
        """
        values = {name: self.of_laws[name](log_p, log_q) for name in self.of_laws}
        if self.reads_tokens:
            assert log_q_next is not None
            values[Divergence.cross_entropy] = cross_entropy(log_q_next)
        return values

    def total(self, parts: Mapping[Divergence, Tensor]) -> Tensor:
        """What is minimised: the parts by their weights, shape N."""
        return torch.stack([self.weights[name] * parts[name] for name in parts]).sum(0)

    def __call__(self, log_p: Tensor, log_q: Tensor, log_q_next: Tensor | None = None) -> Tensor:
        """The total of the parts."""
        return self.total(self.parts(log_p, log_q, log_q_next))


def objective(config: ObjectiveConfig, progress: float) -> Objective:
    """What to minimise after a share `progress` (0 to 1) of the steps."""
    weights = config.weights()
    # the margin is for rounding: 3/10 is below 1 - 0.7
    if config.finish is not None and progress >= 1 - config.finish_share - 1e-9:
        weights = {config.finish: 1.0}
    functions: dict[Divergence, Callable[[Tensor, Tensor], Tensor]] = {
        Divergence.forward_kl: forward_kl,
        Divergence.reverse_kl: reverse_kl,
        Divergence.jsd: partial(jsd, beta=config.beta),
        Divergence.tv: tv,
        Divergence.lk_alpha: lk_alpha,
        Divergence.lk_lambda: partial(lk_lambda, eta=config.eta),
        Divergence.tvd_plus_plus: tvd_plus_plus,
    }
    return Objective(weights, {name: functions[name] for name in functions if name in weights})
