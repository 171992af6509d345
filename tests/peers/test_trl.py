"""Divergences against trl's generalised JSD, where it is installed: pip install -e '.[peers]'."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from train.objectives import forward_kl, jsd, reverse_kl

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("default"),  # those of its imports are its own
]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_value_and_gradient_are_trls(theirs: Any, beta: float) -> None:
    rng = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(5, 17, generator=rng, dtype=torch.float64) * 2 for _ in range(2))
    draft.requires_grad_()

    def ours(log_p: Tensor, log_q: Tensor) -> Tensor:
        if beta == 0:
            return forward_kl(log_p, log_q)
        return reverse_kl(log_p, log_q) if beta == 1 else jsd(log_p, log_q, beta=beta)

    expected = theirs(draft, target, beta=beta, reduction="none").sum(-1)
    value = ours(target.log_softmax(-1), draft.log_softmax(-1))
    torch.testing.assert_close(value, expected)
    (wanted,) = torch.autograd.grad(expected.sum(), draft)
    (gradient,) = torch.autograd.grad(value.sum(), draft)
    torch.testing.assert_close(gradient, wanted)
