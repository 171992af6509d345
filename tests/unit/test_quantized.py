"""Int8 weights of a draft, and attention over packed answers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models.decoding.kernels import has_kernels, use_kernel
from models.decoding.quantized import Int8Linear, quantize
from models.packed import attend_packed
from tests.tiny import tiny_model


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert has_kernels(), "the tests need a C++ compiler"


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_product_is_that_of_rounded_weights(num_rows: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, dtype=torch.bfloat16)
    rounded = Int8Linear(plain)
    x = torch.randn(num_rows, 64, dtype=torch.bfloat16)
    weight = rounded.weight.float() * rounded.scale.unsqueeze(1)
    want = x.float() @ weight.T + plain.bias.float()
    assert torch.allclose(rounded(x).float(), want, rtol=0.02, atol=0.02)


def test_rounding_is_at_most_half_a_step() -> None:
    plain = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    rounded = Int8Linear(plain)
    largest = plain.weight.float().abs().amax(1, keepdim=True)
    error = (rounded.weight.float() * (largest / 127) - plain.weight.float()).abs()
    assert bool((error <= largest / 127 * 0.501).all())


def test_a_row_of_zeros_stays_zero() -> None:
    plain = nn.Linear(64, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight[2] = 0
    assert float(Int8Linear(plain)(torch.ones(1, 64, dtype=torch.bfloat16))[0, 2]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_model_keeps_its_law_nearly(dtype: torch.dtype) -> None:
    model = tiny_model(num_layers=2, hidden_size=64, intermediate_size=128).to(dtype).eval()
    small = copy.deepcopy(model)
    assert quantize(small) > 0
    assert not any(isinstance(module, nn.Linear) for module in small.modules())
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.inference_mode():
        p = model(ids).logits.float().softmax(-1)
        q = small(ids).logits.float().softmax(-1)
    assert float(torch.minimum(p, q).sum(-1).mean()) > 0.9


def test_widths_the_kernel_would_have_to_widen_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(40, 4), nn.Linear(96, 4))
    assert quantize(model) == 0
    assert use_kernel(model) == 1  # 96, not 40
    assert type(model[0]) is nn.Linear


def test_packed_attention_is_attention_inside_each_answer() -> None:
    torch.manual_seed(0)
    lengths = (5, 1, 9)
    total = sum(lengths)
    q = torch.randn(1, 6, total, 8)
    k, v = torch.randn(2, 1, 3, total, 8)
    positions = torch.cat([torch.arange(length) for length in lengths]).view(1, 1, 1, -1)
    ours, _ = attend_packed(nn.Module(), q, k, v, positions, scaling=0.3)
    starts = (positions.flatten() == 0).cumsum(0)
    mask = (starts.unsqueeze(1) == starts.unsqueeze(0)).tril()
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    theirs = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    assert torch.allclose(ours, theirs.transpose(1, 2), atol=1e-5)
