"""Steps in one call of our own code compute what the model's modules do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.decoding.engine import Engine
from models.decoding.kernels import PackedLinear, has_kernels, use_kernel
from models.decoding.native import MOST_TOKENS, NativeSteps
from models.decoding.pages import LINE
from models.decoding.quantized import quantize
from models.decoding.tree import ROOT, Branches, Tree
from tests.families import FAMILIES, tiny_family

NATIVE = ("llama", "mistral", "qwen2", "qwen3")
WHOLE = {"mistral": {"sliding_window": None}}  # sliding windows are left to the modules
TEXT = [(7 * n) % 61 + 3 for n in range(60)]
CAPACITY = 96


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert has_kernels(), "the tests need a C++ compiler"


def wide(family: str, **changes: Any) -> PreTrainedModel:
    """Sizes the code takes, and no norm or bias that does nothing."""
    settings = {"hidden_size": 128, "intermediate_size": 192, "initializer_range": 0.15}
    settings |= {"head_dim": 32, **WHOLE.get(family, {})}
    model = tiny_family(family, **{**settings, **changes})
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            parameter.copy_(parameter.bfloat16().float())
    return model


def engines(model: PreTrainedModel, num_rows: int = 1) -> tuple[Engine, Engine]:
    """One that takes steps in one call, and one that goes through the modules."""
    native, plain = (
        Engine(model, num_rows=num_rows, capacity=CAPACITY, compiled=False) for _ in range(2)
    )
    assert native._native is not None
    plain._native = None
    return native, plain


@torch.inference_mode()
def steps(engine: Engine) -> list[Tensor]:
    """Logits of steps over rows of unequal lengths, of one and of several tokens."""
    lengths = [9, 30, 1][: engine.num_rows]
    prompts, rows = [TEXT[:length] for length in lengths], range(len(lengths))
    found = [engine.prefill_together(prompts, [*rows][::-1], ends_only=False)[0]]
    engine.start(prompts, rows)
    for width in (1, 3, 8, 1):
        ids = torch.tensor([TEXT[length : length + width] for length in lengths])
        places = torch.tensor([[*range(length, length + width)] for length in lengths])
        found.append(engine.forward(ids, places, longest=int(places.max()) + 1))
        lengths = [length + width for length in lengths]
    return found


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["bfloat16 numbers", "float32", "int8"])
@pytest.mark.parametrize("family", NATIVE)
def test_steps_of_ragged_rows_give_the_modules_logits(
    family: str, kind: str, num_rows: int
) -> None:
    model = wide(family)
    if kind == "float32":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.001
    if kind == "int8":
        quantize(model)
    use_kernel(model)
    native, plain = engines(model, num_rows)
    for found, want in zip(steps(native), steps(plain), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=2e-4)
    for one, other in zip(native.cache.ragged, plain.cache.ragged, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", NATIVE)
def test_bfloat16_models_get_the_law_of_their_float32_twins(family: str) -> None:
    """Up to what the rounded cache changes."""
    narrow, exact = wide(family).bfloat16(), wide(family)
    use_kernel(narrow)
    engine = Engine(narrow, num_rows=1, capacity=CAPACITY, compiled=False)
    assert engine._native is not None
    whole = Engine(exact, num_rows=1, capacity=CAPACITY, compiled=False)
    for found, want in zip(steps(engine), steps(whole), strict=True):
        assert found.dtype is torch.bfloat16
        gap = (found.float().softmax(-1) - want.softmax(-1)).abs().sum(-1) / 2
        assert float(gap.max()) < 0.05


def test_packed_weights_give_the_law_of_their_float32_twins() -> None:
    """On any processor, of a vocabulary that fills no whole panel."""
    packed, exact = wide("llama", vocab_size=99).bfloat16(), wide("llama", vocab_size=99)
    for module in packed.modules():
        if type(module) is nn.Linear:
            PackedLinear.take_over(module, module.weight)
    engine = Engine(packed, num_rows=3, capacity=CAPACITY, compiled=False)
    assert engine._native is not None
    whole = Engine(exact, num_rows=3, capacity=CAPACITY, compiled=False)
    for found, want in zip(steps(engine), steps(whole), strict=True):
        assert found.shape == want.shape
        gap = (found.float().softmax(-1) - want.softmax(-1)).abs().sum(-1) / 2
        assert float(gap.max()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_logits_do_not_depend_on_the_calls_other_tokens(dtype: torch.dtype) -> None:
    model = wide("llama").to(dtype)
    use_kernel(model)
    engine, _ = engines(model)
    alone = []
    with torch.inference_mode():
        engine.prefill(TEXT[:20])
        for place in range(20, 52):
            ids, places = torch.tensor([[TEXT[place]]]), torch.tensor([[place]])
            alone.append(engine.forward(ids, places, longest=place + 1)[0, 0])
        for width in (2, 3, 4, 5, 8, 9, 15, 32):
            ids, places = torch.tensor([TEXT[20 : 20 + width]]), torch.arange(20, 20 + width)
            found = engine.forward(ids, places.unsqueeze(0), longest=20 + width)
            assert torch.equal(found[0], torch.stack(alone[:width]))


@torch.inference_mode()
def test_candidates_of_a_tree_see_their_own_path() -> None:
    model = wide("llama")
    use_kernel(model)
    tree = Tree()
    for token, parent in ((5, ROOT), (6, ROOT), (7, 0), (8, 1), (9, 3)):
        tree.add(token, parent, 1.0)
    branches = Branches.of([tree], [12], [[ROOT, *range(5)]], torch.device("cpu"))
    ids = torch.tensor([[TEXT[11], *tree.ids]])
    found = []
    for engine in engines(model):
        engine.prefill(TEXT[:11])
        given = {"longest": 17, "branches": branches}
        found.append(engine.forward(ids, branches.positions_BT, **given))
        only = torch.tensor([0, 4])
        torch.testing.assert_close(
            engine.forward(ids, branches.positions_BT, only_T=only, **given), found[-1][:, only]
        )
        torch.testing.assert_close(
            engine.forward(ids, branches.positions_BT, last_only=True, **given), found[-1][:, -1:]
        )
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_candidate_has_the_logits_that_it_has_as_text(dtype: torch.dtype) -> None:
    """Bit for bit, wherever in the cache the candidates before it stand: greedy outputs do not
    depend on what was drafted.
    """
    model = wide("llama").to(dtype)
    use_kernel(model)
    engine = Engine(model, num_rows=1, capacity=CAPACITY, compiled=False)
    assert engine._native is not None
    rng = torch.Generator().manual_seed(0)
    for length in (3, 14, 15, 16, 30, 47):
        tree = Tree()
        for node in range(14):
            parent = int(torch.randint(-1, node, (), generator=rng)) if node else ROOT
            tree.add(3 + node, parent, 1.0)
        branches = Branches.of([tree], [length], [[ROOT, *range(14)]], torch.device("cpu"))
        engine.prefill(TEXT[: length - 1])
        ids = torch.tensor([[TEXT[length - 1], *tree.ids]])
        given = {"longest": length + 14, "branches": branches}
        found = engine.forward(ids, branches.positions_BT, **given)[0]
        for node in range(14):
            path = [tree.ids[n] for n in tree.path(node)]
            engine.prefill(TEXT[: length - 1])
            for place, token in enumerate([TEXT[length - 1], *path], length - 1):
                one, where = torch.tensor([[token]]), torch.tensor([[place]])
                alone = engine.forward(one, where, longest=place + 1)
            assert torch.equal(alone[0, 0], found[1 + node])


def test_scaled_angles_are_the_models_own() -> None:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    model = wide("llama", rope_parameters=scaled)
    use_kernel(model)
    native, plain = map(steps, engines(model))
    unscaled = wide("llama")
    use_kernel(unscaled)
    assert not torch.allclose(steps(engines(unscaled)[0])[0], native[0], atol=1e-2)
    for found, want in zip(native, plain, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=2e-4)


def test_no_number_stays_none() -> None:
    model = wide("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    use_kernel(model)
    assert all(logits.isnan().any() for logits in steps(engines(model)[0]))


@torch.inference_mode()
def test_what_the_head_reads_is_what_the_modules_give_it() -> None:
    """Statistics for the warm start are taken there, also behind a beginning that is read once."""
    model = wide("llama")
    use_kernel(model)
    found = []
    for engine in engines(model, num_rows=3):
        engine.share([TEXT[:6], [*TEXT[:5], 1]])
        engine.keep_features()
        logits, _ = engine.prefill_together([TEXT[:9], TEXT[:8]], [2, 0], ends_only=False)
        heard = [logits, engine.features_BUD]
        ids, places = torch.tensor([[5], [6], [7]]), torch.tensor([[8], [0], [9]])
        heard += [engine.forward(ids, places, longest=10)[[0, 2]], engine.features_BUD[[0, 2]]]
        found.append(heard)
        engine.drop_features()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)
    with pytest.MonkeyPatch.context() as patch:  # of calls in one the modules rest
        patch.setattr(model.model.layers[0].self_attn, "forward", None)
        Engine(model, num_rows=1, capacity=CAPACITY, compiled=False).prefill(TEXT[:9])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("token", "place", "named"),
    [(64, 20, "token 64"), (-1, 20, "token -1"), (5, -1, "position -1")],
)
def test_what_lies_outside_is_refused(token: int, place: int, named: str) -> None:
    model = wide("llama")
    use_kernel(model)
    engine, _ = engines(model)
    engine.prefill(TEXT[:20])
    with pytest.raises(RuntimeError, match=named):
        engine.forward(torch.tensor([[token]]), torch.tensor([[place]]), longest=21)


class Altered(type(tiny_family("llama"))):  # type: ignore[misc]
    """Not what its name says."""


Altered.__name__ = "LlamaForCausalLM"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"head_dim": 16},
        {"sliding_window": 7},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=str,
)
def test_other_models_go_through_their_modules(changes: dict[str, Any]) -> None:
    model = wide("llama", **changes)
    use_kernel(model)
    assert NativeSteps.of(model, CAPACITY) is None


def test_models_without_the_kernels_and_of_unknown_classes_go_through_their_modules() -> None:
    plain = wide("llama")
    assert NativeSteps.of(plain, CAPACITY) is None
    use_kernel(plain)
    assert NativeSteps.of(plain, CAPACITY) is not None
    plain.__class__ = Altered
    assert NativeSteps.of(plain, CAPACITY) is None
    for family in set(FAMILIES) - set(NATIVE):
        other = tiny_family(family)
        use_kernel(other)
        assert NativeSteps.of(other, CAPACITY) is None
    mixed = wide("llama")
    mixed.model.layers[1].self_attn.k_proj = nn.Linear(128, 64)  # one that use_kernel did not see
    use_kernel(mixed)
    assert NativeSteps.of(mixed, CAPACITY) is None


def test_calls_of_many_tokens_go_through_the_modules() -> None:
    model = wide("llama")
    use_kernel(model)
    native = NativeSteps.of(model, CAPACITY)
    assert native is not None
    most = MOST_TOKENS
    assert native.takes(torch.zeros(1, most)) and native.takes(torch.zeros(most, 1))
    assert not native.takes(torch.zeros(1, most + 1))


def test_weights_move_to_one_place_and_stay_what_they_are() -> None:
    model = wide("llama", tie_word_embeddings=True)
    quantize(model.model.layers[0])
    use_kernel(model)
    before = {name: value.clone() for name, value in held(model).items()}
    assert NativeSteps.of(model, CAPACITY) is not None
    layers = model.model.layers
    moved = [layers[0].mlp.up_proj, layers[1].mlp.up_proj, model.lm_head]
    places = [getattr(module, module.stored).data_ptr() for module in moved]
    assert len({getattr(m, m.stored).untyped_storage().data_ptr() for m in moved}) == 1
    assert all(place % LINE == 0 for place in places)
    assert NativeSteps.of(model, CAPACITY) is not None  # again: nothing moves
    assert places == [getattr(module, module.stored).data_ptr() for module in moved]
    assert held(model).keys() == before.keys()
    for name, value in held(model).items():
        assert torch.equal(value, before[name])


def held(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])
