"""What a draft that learns from recorded laws is drawn towards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.batches import collate
from data.codec import UNRECORDED
from eval.bench_codec import Student, completed
from tests.lessons import made_up_row
from tests.tiny import tiny_model
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


def test_a_student_whose_head_is_kept_in_bfloat16_learns(tmp_path: Path) -> None:
    """From its recorded laws: more of what they say is accepted."""
    tiny_model().bfloat16().float().save_pretrained(tmp_path / "draft" / "initial")
    student = Student.load(tmp_path, torch.device("cpu"))
    assert student.model.head.dtype is torch.bfloat16
    batch = collate([made_up_row(0, 4, 6)])
    q_NV = student.laws(student.features(batch)).detach()
    p_NV = completed(batch.top_ids_NK, batch.top_log_p_NK, q_NV)
    before = student.acceptance(batch, p_NV)
    for _ in range(10):
        student.learn(batch, None)
    assert student.acceptance(batch, p_NV) > before + 0.01
