"""The CPU kernels compute what torch computes, a row at a time as with others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.decoding import kernels
from models.decoding.engine import SHALLOW, Engine
from models.decoding.kernels import PackedLinear, has_kernels, use_kernel
from models.load import num_weights
from tests.families import FAMILIES, tiny_family

FLOATS = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert has_kernels(), "the tests need a C++ compiler"


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.draftsmith.linear(x, weight, scale, None)
    return y


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    y: Tensor = torch.ops.draftsmith.attention(q, k, v, mask, scaling)
    return y


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33])
@pytest.mark.parametrize("shape", [(64, 8), (192, 33), (576, 131), (40, 7)])  # 40 is for torch
@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_is_the_exact_one_but_for_rounding(
    num_rows: int, shape: tuple[int, int], kind: torch.dtype, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, shape[0], generator=rng).to(dtype)
    weight = torch.randn(shape[1], shape[0], generator=rng)
    scale = None
    if kind is torch.int8:
        scale, weight = torch.rand(shape[1], generator=rng), weight * 40
    weight = weight.to(kind)
    exact = x.double() @ weight.double().T * (1 if scale is None else scale.double())
    found = linear(x, weight, scale)
    assert found.dtype is dtype
    # terms as large as the largest sum may cancel; a bfloat16 result is rounded to 8 bits
    rounding = 2**-8 if dtype is torch.bfloat16 else 2**-20
    torch.testing.assert_close(
        found.double(), exact, rtol=rounding, atol=float(exact.abs().max()) * rounding
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_of_a_product_does_not_depend_on_the_others(
    kind: torch.dtype, dtype: torch.dtype
) -> None:
    x = torch.randn(16, 192).to(dtype)
    weight = (torch.randn(37, 192) * 40).to(kind)
    scale = torch.rand(37) if kind is torch.int8 else None
    alone = torch.cat([linear(row, weight, scale) for row in x.split(1)])
    for num_rows in range(1, 17):
        assert torch.equal(linear(x[:num_rows], weight, scale), alone[:num_rows])


@pytest.mark.parametrize("shape", [(64, 8), (192, 33), (576, 131)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_packed_layer_gives_what_the_plain_one_does(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Of any number of rows, and a row whatever the others."""
    plain = nn.Linear(*shape).to(dtype).requires_grad_(False)
    weight, x = plain.weight.bfloat16(), torch.randn(40, shape[0]).to(dtype)
    exact = x.double() @ weight.double().T + plain.bias.double()
    rounding = float(exact.abs().max()) * (2**-7 if dtype is torch.bfloat16 else 2**-18)
    PackedLinear.take_over(plain, weight)
    assert torch.equal(plain.weight, weight)
    for num_rows in (1, 2, 11, 12, 13, 24, 25, 40):
        found = plain(x[:num_rows].unsqueeze(0))
        torch.testing.assert_close(found[0].double(), exact[:num_rows], rtol=0, atol=rounding)
        assert torch.equal(found[0], torch.cat([plain(row) for row in x[:num_rows].split(1)]))
    with pytest.raises(RuntimeError, match=f"{shape[0]} inputs"):
        plain(x[:, :-2])


def test_the_layers_of_a_bfloat16_model_are_packed() -> None:
    model = tiny_family("llama", hidden_size=128, tie_word_embeddings=True).bfloat16()
    before, ids = num_weights(model), torch.arange(3, 13).unsqueeze(0)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.inference_mode():
        want = model(ids).logits.float().softmax(-1)
        use_kernel(model)
        gap = (model(ids).logits.float().softmax(-1) - want).abs().sum(-1)
    assert type(model.get_output_embeddings()) is PackedLinear
    assert float(gap.max()) < 0.05
    assert num_weights(model) == before
    saved = model.state_dict()  # is what it was
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [32, 64, 96])
@pytest.mark.parametrize("num_queries", [1, 2, 5, 16])
@pytest.mark.parametrize("num_groups", [1, 3, 4])
def test_attention_is_softmax_over_what_each_row_may_see(
    dtype: torch.dtype, head_dim: int, num_queries: int, num_groups: int
) -> None:
    rng = torch.Generator().manual_seed(head_dim + num_queries)
    lengths = torch.tensor([num_queries, 40, 71])  # the last row fills the cache
    size = (3, num_queries, 2 * num_groups, head_dim)
    q = (torch.randn(size, generator=rng) * 3).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, 3, 2, 71, head_dim, generator=rng).to(dtype)
    ends = (lengths - num_queries).unsqueeze(-1) + torch.arange(num_queries)
    places = torch.arange(71)
    causal = (places <= ends.unsqueeze(-1)).unsqueeze(1)
    for mask in (causal, causal & (places > ends.unsqueeze(-1) - 9).unsqueeze(1)):  # or sliding
        found = attention(q, k, v, mask, 0.2)
        repeated = (x.double().repeat_interleave(num_groups, 1) for x in (k, v))
        exact = nn.functional.scaled_dot_product_attention(
            q.double(), *repeated, attn_mask=mask, scale=0.2
        )
        rounding = 2**-8 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            found.double(), exact.transpose(1, 2), rtol=rounding, atol=rounding
        )
        for row in range(3):
            for t in range(num_queries):
                alone = attention(
                    q[row, :, t : t + 1].unsqueeze(0),
                    k[row].unsqueeze(0),
                    v[row].unsqueeze(0),
                    mask[row, :, t : t + 1].unsqueeze(0),
                    0.2,
                )
                assert torch.equal(alone[0, 0], found[row, t])


def test_attention_reads_tensors_in_any_layout() -> None:
    q, k, v = torch.randn(1, 4, 3, 32), *torch.randn(2, 1, 2, 20, 32)
    mask = torch.rand(1, 1, 3, 20) > 0.3
    scattered = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, mask)]
    assert torch.equal(attention(*scattered, 0.2), attention(q, k, v, mask, 0.2))


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_attention_hands_on_what_is_no_number(where: str) -> None:
    given = {name: torch.randn(1, 2, 1 if name == "q" else 20, 32) for name in "qkv"}
    given[where][0, 0, 0, 0] = torch.nan
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    assert attention(given["q"], given["k"], given["v"], mask, 0.2).isnan().any()


def test_float32_weights_that_are_bfloat16_numbers_are_kept_as_such() -> None:
    exact, other = nn.Linear(64, 8), nn.Linear(64, 8)
    with torch.no_grad():
        exact.weight.copy_(exact.weight.bfloat16().float())
    model = nn.Sequential(exact, other, nn.Embedding(8, 8))
    x = torch.randn(3, 64)
    want = [exact(x), other(x)]
    assert use_kernel(model) == 2
    assert [module.weight.dtype for module in model] == [torch.bfloat16, *[torch.float32] * 2]
    for module, plain in zip((exact, other), want, strict=True):
        torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-5)
    assert use_kernel(model) == 0  # once is enough


def test_weights_are_counted_once_though_a_tied_head_got_its_own() -> None:
    model = tiny_family("llama", tie_word_embeddings=True)
    before = num_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    use_kernel(model)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert num_weights(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_the_kernels_gives_the_logits_of_the_plain_one(family: str) -> None:
    plain, fast = (tiny_family(family) for _ in range(2))
    use_kernel(fast)
    ids = torch.arange(3, 13).unsqueeze(0)
    with torch.inference_mode():
        torch.testing.assert_close(fast(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.parametrize(
    ("num_layers", "dtype"), [(2, torch.float32), (SHALLOW + 1, torch.bfloat16)], ids=str
)
def test_compiled_steps_with_the_kernels_are_right(num_layers: int, dtype: torch.dtype) -> None:
    settings = {"num_hidden_layers": num_layers, "initializer_range": 0.1, "hidden_size": 128}
    settings |= {"intermediate_size": 192}  # and heads of 32 features
    plain, fast = (tiny_family("phi3", **settings).to(dtype) for _ in range(2))
    assert use_kernel(fast)
    text = list(range(3, 33))
    engine = Engine(fast, num_rows=1, capacity=64, compiled=True)
    for width in (1, 3, 1):
        engine.prefill(text[:10])
        ids, places = torch.tensor([text[10 : 10 + width]]), torch.arange(10, 10 + width)
        found = engine.forward(ids, places.unsqueeze(0), longest=10 + width)
        want = plain(torch.tensor([text[: 10 + width]])).logits[:, 10:]
        laws = [logits.float().softmax(-1) for logits in (found, want)]
        tolerance = 0.03 if dtype is torch.bfloat16 else 1e-4
        assert float((laws[0] - laws[1]).abs().sum(-1).max()) / 2 < tolerance


@pytest.mark.parametrize("compiler", [None, "false"], ids=["none", "one that fails"])
def test_without_a_compiler_layers_stay_as_they_are(
    compiler: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "find_compiler", lambda: compiler)
    monkeypatch.setattr(kernels, "_is_loaded", False)
    monkeypatch.setattr(kernels, "has_kernels", has_kernels.__wrapped__)
    model = nn.Sequential(nn.Linear(64, 8))
    assert use_kernel(model) == 0
    assert type(model[0]) is nn.Linear
    assert not kernels.can_attend(torch.ones(1, 2, 1, 32), torch.ones(1, 1, 1, 4) > 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_the_library_is_made_of_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor, as on a shared folder, gets a library of its own."""
    path = kernels._library()
    assert path is not None and path.is_file()
    monkeypatch.setattr(kernels, "_processor", lambda: "another")
    monkeypatch.setattr(kernels, "_build", _refuse)
    assert kernels._library() is None


def _refuse(*_: object, **__: object) -> None:
    raise OSError("no")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 15, 256, 257, 1000])
def test_the_largest_are_found_in_order_and_the_first_of_equal_ones_first(
    size: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(size)
    x = (torch.randn(3, 2, size, generator=rng) * 3).to(dtype)
    x[0, 0] = x[0, 0].round()  # many are equal
    for num in {1, min(5, size), min(40, size), min(300, size)}:
        check_largest(x, num)
    x[1] = -torch.inf  # blocks without anything, and one with a number
    x[1, 0, size // 2] = 1.0
    check_largest(x, min(300, size))


def check_largest(x: Tensor, num: int) -> None:
    values, places = kernels.largest(x, num)
    want = torch.sort(x.float(), dim=-1, descending=True, stable=True)
    assert torch.equal(values, want.values[..., :num])
    assert torch.equal(places, want.indices[..., :num])
    laws, again = kernels.largest(x, num, is_law=True)
    assert torch.equal(again, places)
    exact = x.double().log_softmax(-1).gather(-1, places)
    torch.testing.assert_close(laws.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_no_number_is_the_largest() -> None:
    x = torch.randn(2, 600)
    x[0, 3], x[1, 599] = torch.inf, torch.nan
    values, places = kernels.largest(x, 2)
    assert values[0, 0] == torch.inf and values[0, 1].isfinite()
    assert values[1].isnan().all() and places[1].tolist() == [599, 599]
    x[0] = -torch.inf
    x[0, 500] = 1.0
    assert kernels.largest(x, 1, is_law=True)[0][0] == 0
    assert kernels.largest(x, 3)[1][0].unique().numel() == 3
