"""Packed weights compute what plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.decoding.engine import SHALLOW, Engine
from models.decoding.packed import PackedLinear, can_pack, pack
from models.load import num_weights
from tests.families import FAMILIES, tiny_family

# without such products nothing is packed, and then these compare a model with itself
TOLERANCE = {"atol": 0.02, "rtol": 0.02}


@pytest.mark.parametrize("shape", [(64, 96), (48, 40), (33, 7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 32])
def test_a_packed_product_is_the_plain_one(
    shape: tuple[int, int], bias: bool, num_tokens: int
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(*shape, bias=bias).bfloat16()
    inputs = [torch.randn(*size, shape[0]).bfloat16() for size in ((1, 1), (1, 3), (4, 50), (2,))]
    want = [linear(x) for x in inputs]
    model = nn.Sequential(linear)
    assert pack(model, num_tokens) == int(can_pack())
    assert linear.weight.numel() == shape[0] * shape[1]
    for x, plain in zip(inputs, want, strict=True):
        torch.testing.assert_close(model(x), plain, **TOLERANCE)


def test_only_bfloat16_layers_are_packed() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), nn.Embedding(8, 8).bfloat16()
    )
    assert pack(model) == int(can_pack())
    assert [type(module) for module in model] == [
        nn.Linear,
        PackedLinear if can_pack() else nn.Linear,
        nn.Embedding,
    ]
    assert pack(model) == 0  # once is enough


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_gives_the_logits_of_the_plain_one(family: str) -> None:
    plain, packed = (tiny_family(family).bfloat16() for _ in range(2))
    pack(packed)
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.inference_mode():
        want, found = plain(ids).logits.float(), packed(ids).logits.float()
    difference = (want.softmax(-1) - found.softmax(-1)).abs().sum(-1) / 2
    assert float(difference.mean()) < 0.02


def test_weights_are_counted_once_though_a_tied_head_is_packed() -> None:
    model = tiny_family("llama", tie_word_embeddings=True).bfloat16()
    before = num_weights(model)
    pack(model)
    assert (
        num_weights(model)
        == before
        == sum(p.numel() for p in tiny_family("llama", tie_word_embeddings=True).parameters())
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.parametrize("num_layers", [2, SHALLOW + 1], ids=["whole model", "layer by layer"])
def test_compiled_steps_of_a_packed_model_are_right(num_layers: int) -> None:
    settings = {"num_hidden_layers": num_layers, "initializer_range": 0.1}
    plain, packed = (tiny_family("llama", **settings).bfloat16() for _ in range(2))
    pack(packed)
    text = list(range(3, 33))
    engines = [
        Engine(model, num_rows=1, capacity=64, compiled=compiled)
        for model, compiled in ((plain, False), (packed, True))
    ]
    for width in (1, 3, 1):
        laws = []
        for engine in engines:
            engine.prefill(text[:10])
            ids, places = torch.tensor([text[10 : 10 + width]]), torch.arange(10, 10 + width)
            logits = engine.forward(ids, places.unsqueeze(0), longest=10 + width)
            laws.append(logits.float().softmax(-1))
        assert float((laws[0] - laws[1]).abs().sum(-1).max()) / 2 < 0.03
