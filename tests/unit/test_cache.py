"""Cached logits are uncached logits, after none, some and all drafted tokens were accepted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from models.decoding.cache import WINDOW_STEP
from models.decoding.compiled import has_compiler
from models.decoding.engine import SHALLOW, Engine, narrow_head
from models.decoding.routing import FEW_QUERIES, UnsupportedModel, attend
from tests.families import FAMILIES, tiny_family

VOCAB_SIZE = 64
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


def text(length: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(VOCAB_SIZE) for _ in range(length)]


def uncached(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits after each token, shape TV."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


class Rows:
    """Rows of texts, extended through an engine and compared with a model without a cache."""

    def __init__(self, engine: Engine, reference: PreTrainedModel, lengths: list[int]):
        self.engine, self.reference = engine, reference
        self.texts = [text(length, seed) for seed, length in enumerate(lengths)]
        for row, tokens in enumerate(self.texts):
            last_V = engine.prefill(tokens, row)
            torch.testing.assert_close(last_V, uncached(reference, tokens)[-1], **TOLERANCE)

    def extend(self, width: int, seed: int) -> None:
        """Every row gets `width` new tokens at its own positions."""
        new = [text(width, seed + row) for row in range(len(self.texts))]
        starts = torch.tensor([len(tokens) for tokens in self.texts]).unsqueeze(1)
        longest = max(len(tokens) for tokens in self.texts) + width
        logits_BTV = self.engine.forward(
            torch.tensor(new), starts + torch.arange(width), longest=longest
        )
        for row, tokens in enumerate(self.texts):
            tokens += new[row]
            want_TV = uncached(self.reference, tokens)[-width:]
            torch.testing.assert_close(logits_BTV[row], want_TV, **TOLERANCE)

    def take_back(self, nums: list[int]) -> None:
        """The last tokens of each row were rejected."""
        for tokens, num in zip(self.texts, nums, strict=True):
            del tokens[len(tokens) - num :]


def engine_of(model: PreTrainedModel, num_rows: int, capacity: int = 96) -> Engine:
    return Engine(model, num_rows=num_rows, capacity=capacity, compiled=False)


@pytest.mark.parametrize(
    "lengths", [[9, 1, 14], [WINDOW_STEP - 3, 2, WINDOW_STEP + 5]], ids=["short", "long"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_are_uncached_logits(family: str, lengths: list[int]) -> None:
    rows = Rows(engine_of(tiny_family(family), len(lengths)), tiny_family(family), lengths)
    rows.extend(5, seed=10)
    rows.take_back([4, 0, 2])  # none of 4 drafted tokens accepted, all, some
    rows.extend(5, seed=20)
    rows.take_back([0, 3, 4])
    rows.extend(1, seed=30)
    rows.extend(3, seed=40)


def test_many_new_positions_take_the_other_attention() -> None:
    rows = Rows(engine_of(tiny_family("llama"), 2), tiny_family("llama"), [6, 3])
    rows.extend(FEW_QUERIES, seed=1)
    rows.extend(FEW_QUERIES + 1, seed=2)
    rows.extend(2, seed=3)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_a_row_starts_afresh_beside_running_ones(family: str) -> None:
    rows = Rows(engine_of(tiny_family(family), 3), tiny_family(family), [12, 7, 9])
    rows.extend(2, seed=10)
    rows.texts[1] = text(4, seed=99)  # shorter than what the row held
    rows.engine.prefill(rows.texts[1], 1)
    rows.extend(3, seed=20)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_storage_follows_the_longest_row_down_and_up(family: str) -> None:
    engine = engine_of(tiny_family(family), 2, capacity=4 * WINDOW_STEP)
    rows = Rows(engine, tiny_family(family), [3 * WINDOW_STEP, 9])
    rows.extend(2, seed=10)
    assert engine.cache.layers[0].keys.shape[2] == 4 * WINDOW_STEP
    rows.texts[0] = text(5, seed=99)
    engine.prefill(rows.texts[0], 0)
    rows.extend(2, seed=20)
    assert engine.cache.layers[0].keys.shape[2] == WINDOW_STEP
    rows.texts[0] = text(WINDOW_STEP + 1, seed=98)
    engine.prefill(rows.texts[0], 0)  # grows while the other row is under way
    rows.extend(3, seed=30)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_rows_start_in_one_padded_call(family: str) -> None:
    """Lines padded on the right: what padding wrote is overwritten before anything reads it."""
    rows = Rows(engine_of(tiny_family(family), 4), tiny_family(family), [12, 7, 9, 3])
    prompts = {2: text(5, seed=50), 0: text(8, seed=51), 3: text(5, seed=52)}
    logits_BUV, own_B = rows.engine.prefill_together(list(prompts.values()), list(prompts))
    assert logits_BUV.shape == (3, 2, VOCAB_SIZE)  # two different ends
    for line, (row, tokens) in enumerate(prompts.items()):
        want_V = uncached(rows.reference, tokens)[-1]
        torch.testing.assert_close(logits_BUV[line, own_B[line]], want_V, **TOLERANCE)
        rows.texts[row] = tokens
    rows.extend(3, seed=20)
    rows.extend(2, seed=30)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_beginning_is_read_once(family: str) -> None:
    rows = Rows(engine_of(tiny_family(family), 4), tiny_family(family), [12, 7, 9, 3])
    beginning = text(6, seed=60)
    prompts = {2: beginning + text(5, seed=61), 0: beginning + text(1, seed=62)}
    rows.engine.share(list(prompts.values()))
    rows.texts[0] = list(beginning)
    read: list[int] = []
    hook = rows.engine.model.register_forward_pre_hook(
        lambda _model, _args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    logits_BUV, own_B = rows.engine.prefill_together(list(prompts.values()), list(prompts))
    hook.remove()
    assert read == [5]  # of 11
    for line, (row, tokens) in enumerate(prompts.items()):
        want_V = uncached(rows.reference, tokens)[-1]
        torch.testing.assert_close(logits_BUV[line, own_B[line]], want_V, **TOLERANCE)
        rows.texts[row] = tokens
    rows.extend(3, seed=20)
    # prompts that begin otherwise, or are no longer than that, are read whole
    rows.texts[1], rows.texts[3] = text(9, seed=63), list(beginning)
    rows.engine.prefill_together([rows.texts[1], rows.texts[3]], [1, 3])
    rows.extend(2, seed=30)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_kept_rows_go_on_without_the_others(family: str) -> None:
    rows = Rows(engine_of(tiny_family(family), 4), tiny_family(family), [12, 7, 9, 3])
    rows.engine.cache.keep([3, 1])
    rows.texts = [rows.texts[3], rows.texts[1]]
    rows.extend(2, seed=10)
    rows.take_back([1, 0])
    rows.extend(3, seed=20)
    assert rows.engine.cache.num_rows == 2


def test_reading_the_cache_of_some_rows_only_is_refused() -> None:
    engine = engine_of(tiny_family("llama"), 2)
    with pytest.raises(AssertionError, match="all of its rows"):
        engine.forward(
            torch.ones(1, 1, dtype=torch.long),
            torch.zeros(1, 1, dtype=torch.long),
            longest=1,
            rows_B=torch.tensor([1]),
        )


def test_more_tokens_than_capacity_are_refused() -> None:
    engine = engine_of(tiny_family("llama"), 1, capacity=8)
    engine.prefill(text(8, seed=0))
    with pytest.raises(ValueError, match="9 tokens do not fit a cache of 8"):
        engine.prefill(text(9, seed=0))


def test_last_only_is_the_last_position() -> None:
    engine = engine_of(tiny_family("llama"), 1)
    engine.prefill(text(4, seed=0))
    tokens, positions = torch.tensor([text(3, seed=1)]), torch.arange(4, 7).unsqueeze(0)
    whole = engine.forward(tokens, positions, longest=7)
    last = engine.forward(tokens, positions, longest=7, last_only=True)
    torch.testing.assert_close(last, whole[:, -1:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_model_with_an_engine_still_runs_without_it(family: str) -> None:
    model = tiny_family(family)
    tokens = text(11, seed=0)
    before = uncached(model, tokens)
    ids = torch.tensor([tokens])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    generated = model.generate(ids, **options)
    engine_of(model, 2).prefill(tokens)
    torch.testing.assert_close(uncached(model, tokens), before, **TOLERANCE)
    assert torch.equal(model.generate(ids, **options), generated)


def test_two_engines_share_a_model_but_no_cache() -> None:
    model, reference = tiny_family("llama"), tiny_family("llama")
    one, two = (
        Rows(engine_of(model, 1), reference, [5]),
        Rows(engine_of(model, 2), reference, [8, 3]),
    )
    one.extend(2, seed=1)
    two.extend(2, seed=2)
    one.extend(2, seed=3)


@pytest.mark.parametrize("num_queries", [1, 3, FEW_QUERIES])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_grouped_attention_is_torchs(num_queries: int, num_key_value_heads: int) -> None:
    rng = torch.Generator().manual_seed(num_queries)
    module = nn.Module()
    module.num_key_value_groups = 4 // num_key_value_heads
    q = torch.randn(2, 4, num_queries, 8, generator=rng)
    k = torch.randn(2, num_key_value_heads, 20, 8, generator=rng)
    v = torch.randn(2, num_key_value_heads, 20, 8, generator=rng)
    mask = torch.rand(2, 1, num_queries, 20, generator=rng) < 0.5
    mask[..., 0] = True  # a query always sees something
    with torch.inference_mode():
        for scaling in (None, 0.3):
            ours, _ = attend(module, q, k, v, mask, scaling=scaling)
            theirs, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
        ),
        GptOssConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ],
    ids=["gemma2: softcap", "gpt-oss: sinks"],
)
def test_attention_with_terms_of_its_own_is_refused(config: Gemma2Config | GptOssConfig) -> None:
    """Leaving the term out would give wrong logits and no error."""
    engine = engine_of(AutoModelForCausalLM.from_config(config), 1)
    with pytest.raises(UnsupportedModel, match=r"Attention: its attention uses (softcap|s_aux)"):
        engine.prefill(text(4, seed=0))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_a_narrow_head_gives_the_columns_of_its_ids(changes: dict[str, bool]) -> None:
    model, reference = tiny_family("llama", **changes), tiny_family("llama", **changes)
    ids_H = torch.tensor([40, 3, 17])
    narrow_head(model, ids_H)
    tokens = text(6, seed=0)
    torch.testing.assert_close(uncached(model, tokens), uncached(reference, tokens)[:, ids_H])


# importing inductor imports TorchScript: https://github.com/pytorch/pytorch/pull/189914
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.parametrize("num_layers", [2, SHALLOW + 1], ids=["whole model", "layer by layer"])
def test_compiled_logits_are_uncached_logits(num_layers: int) -> None:
    # weights of the usual size: with larger ones, the rounding of many layers adds up to more than
    # the tolerance
    settings = {"num_hidden_layers": num_layers, "initializer_range": 0.1}
    engine = Engine(tiny_family("llama", **settings), num_rows=2, capacity=96, compiled=True)
    assert engine.compiled == has_compiler()  # without one it runs eagerly, to the same result
    rows = Rows(engine, tiny_family("llama", **settings), [9, 5])
    rows.extend(3, seed=10)
    rows.take_back([2, 0])
    rows.extend(3, seed=20)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.parametrize(
    ("family", "num_layers"),
    [(family, size) for family in ("llama", "qwen2-mixed") for size in (2, SHALLOW + 1)],
)
def test_steps_that_skip_the_checks_of_compiled_code_are_right(
    family: str, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, widths in turn, over windows that grow, shrink and grow again: every kind of step
    and window meets the code of all the others.
    """
    settings = {"num_hidden_layers": num_layers, "initializer_range": 0.1}
    engine = Engine(tiny_family(family, **settings), num_rows=1, capacity=256, compiled=True)
    skipped: list[bool] = []
    stance = torch.compiler.set_stance

    def counted(*args: Any, **kwargs: Any) -> Any:
        skipped.append(bool(kwargs["skip_guard_eval_unsafe"]))
        return stance(*args, **kwargs)

    monkeypatch.setattr(torch.compiler, "set_stance", counted)
    num_steps = 0
    for length in (50, 100, 5, 120):
        rows = Rows(engine, tiny_family(family, **settings), [length])
        for seed, width in enumerate((1, 3, 1, 2, 8, 1, 9, 2, 3, 30, 1)):
            rows.extend(width, seed)
            num_steps += 1
    assert not has_compiler() or num_steps // 3 < len(skipped) < num_steps
