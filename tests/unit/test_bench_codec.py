"""What a draft that learns from recorded laws is drawn towards."""

from __future__ import annotations

import pytest
import torch

from data.codec import UNRECORDED
from eval.bench_codec import completed
from train.objectives import forward_kl, lump

VOCAB_SIZE = 12


def test_a_completed_law_gives_the_gradient_of_the_recorded_one() -> None:
    """q - p in the logits, as autograd finds it through ids and rest; also of a shorter law."""
    rng = torch.Generator().manual_seed(0)
    top = torch.randn(5, VOCAB_SIZE, generator=rng).mul(2).log_softmax(-1).topk(4, -1)
    ids_NK, log_p_NK = top.indices, top.values.clone()
    ids_NK[2, 2:], log_p_NK[2, 2:] = 0, UNRECORDED
    logits_NV = torch.randn(5, VOCAB_SIZE, generator=rng).requires_grad_()
    log_q_NV = logits_NV.log_softmax(-1)
    there = log_p_NK > UNRECORDED
    log_q_NK = log_q_NV.gather(-1, ids_NK).where(there, -1e4)
    loss = forward_kl(lump(log_p_NK.where(there, -1e4)), lump(log_q_NK)).sum()
    (expected,) = torch.autograd.grad(loss, logits_NV)
    q_NV = log_q_NV.detach().exp()
    law_NV = completed(ids_NK, log_p_NK, q_NV)
    assert law_NV.sum(-1).tolist() == pytest.approx([1.0] * 5)
    torch.testing.assert_close(q_NV - law_NV, expected, rtol=1e-4, atol=1e-6)
