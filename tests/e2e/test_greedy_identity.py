"""Greedy decoding in float32 gives the target's own tokens, one for one, whatever the draft."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.decoding.counts import Counts
from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine, narrow_head
from models.decoding.sampling import NonFiniteLogits, Sampling
from models.decoding.speculative import Decoder
from tests.families import FAMILIES, tiny_family

VOCAB_SIZE = 64
CAPACITY = 72  # more than one step of the window that attention reads
GREEDY = Sampling(0.0)
HOT_IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:40]


def engine_of(model: PreTrainedModel) -> Engine:
    return Engine(model, num_rows=1, capacity=CAPACITY, compiled=False)


def drafter_of(kind: str, family: str) -> ModelDrafter:
    """A draft of the target itself, of other weights, or of another family and vocabulary size."""
    other = "gpt2" if family == "llama" else "llama"
    hot_ids: Tensor | None = None
    if kind == "perfect":
        model = tiny_family(family)
    elif kind == "related":
        # the target with a weaker second layer: agrees sometimes
        model = tiny_family(family)
        for name, parameter in model.named_parameters():
            if ".1." in name:
                parameter.data.mul_(0.5)
    elif kind == "hot":
        model, hot_ids = tiny_family(family), HOT_IDS
        narrow_head(model, HOT_IDS)
    else:
        sizes = {"random": VOCAB_SIZE, "padded": VOCAB_SIZE + 8, "smaller": VOCAB_SIZE - 8}
        model = tiny_family(other, seed=5, vocab_size=sizes[kind])
    return ModelDrafter(engine_of(model), vocab_size=VOCAB_SIZE, hot_ids=hot_ids)


def greedy(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, stop_ids: list[int]
) -> list[int]:
    """What transformers itself generates, with the model's own attention and cache."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_ids or None,
    )
    return out[0, len(prompt) :].tolist()


def decode(
    decoder: Decoder, prompt: list[int], gamma: int, max_new_tokens: int
) -> tuple[list[int], Counts]:
    return decoder.decode(
        prompt,
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        sampling=GREEDY,
        rng=torch.Generator().manual_seed(0),
    )


KINDS = ["perfect", "related", "hot", "random", "padded"]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(family: str) -> None:
    """Ten prompts per family, 110 in all; lengths, gammas, drafts and stop ids vary."""
    reference = tiny_family(family)
    engine = engine_of(tiny_family(family))
    choose = random.Random(family)
    drafters = {kind: drafter_of(kind, family) for kind in KINDS}
    for number, kind in enumerate(2 * KINDS):
        length = 1 if number == 0 else choose.randrange(2, 24)
        prompt = [choose.randrange(3, VOCAB_SIZE) for _ in range(length)]
        gamma, max_new_tokens = 1 + (number + number // 5) % 5, choose.randrange(12, 20)
        stop_ids = choose.sample(range(VOCAB_SIZE), 2)
        want = greedy(reference, prompt, max_new_tokens, stop_ids)
        decoder = Decoder(engine, drafters[kind], frozenset(stop_ids))
        got, counts = decode(decoder, prompt, gamma, max_new_tokens)
        assert got == want, (kind, gamma, length)
        assert decode(decoder, prompt, 0, max_new_tokens)[0] == want
        if kind == "perfect":
            assert counts.num_accepted == counts.num_tested


@pytest.mark.parametrize("kind", KINDS)
def test_penalties_are_those_of_transformers(kind: str) -> None:
    """Greedy with a repetition penalty, which the prompt counts for, and a least length."""
    reference, engine = tiny_family("llama"), engine_of(tiny_family("llama"))
    choose = random.Random(kind)
    for number in range(6):
        prompt = [choose.randrange(3, VOCAB_SIZE) for _ in range(choose.randrange(1, 24))]
        sampling = Sampling(
            0.0, repetition_penalty=choose.choice([0.8, 1.3, 2.0]), min_new_tokens=4 * number
        )
        stop_ids = choose.sample(range(VOCAB_SIZE), 20)
        ids = torch.tensor([prompt])
        want = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=stop_ids,
            repetition_penalty=sampling.repetition_penalty,
            min_new_tokens=sampling.min_new_tokens,
        )[0, len(prompt) :].tolist()
        got, _ = Decoder(engine, drafter_of(kind, "llama"), frozenset(stop_ids)).decode(
            prompt,
            gamma=3,
            max_new_tokens=24,
            sampling=sampling,
            rng=torch.Generator().manual_seed(0),
        )
        assert got == want
        assert len(got) > sampling.min_new_tokens or got == want[:24]


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return tiny_family("llama")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(tiny_family("llama"))


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["perfect", "random", "smaller"])
def test_an_output_ends_with_its_first_stop_id(
    kind: str, gamma: int, reference: PreTrainedModel, engine: Engine
) -> None:
    """Every token of an output in turn is the stop id: at any place of a draft, or after it."""
    prompt = [7, 33, 21]
    whole = greedy(reference, prompt, 12, [])
    drafter = drafter_of(kind, "llama")
    for stop in dict.fromkeys(whole):
        got, counts = decode(Decoder(engine, drafter, frozenset({stop})), prompt, gamma, 12)
        assert got == whole[: whole.index(stop) + 1]
        assert counts.num_tokens == len(got)
        assert counts.num_accepted <= counts.num_tested <= counts.num_drafted
        if kind == "perfect":  # ended inside a draft: what follows the stop id is not tested
            assert counts.num_accepted == counts.num_tested
            assert counts.num_target_calls == math.ceil(len(got) / (gamma + 1))


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_the_length_limit_need_not_be_a_multiple_of_a_round(
    max_new_tokens: int, reference: PreTrainedModel, engine: Engine
) -> None:
    prompt = [40, 5]
    decoder = Decoder(engine, drafter_of("perfect", "llama"), frozenset())
    got, counts = decode(decoder, prompt, 3, max_new_tokens)
    assert got == greedy(reference, prompt, max_new_tokens, [])
    assert counts.num_target_calls == math.ceil(max_new_tokens / 4)
    # nothing is drafted that could not be committed
    assert counts.num_drafted == max_new_tokens - counts.num_target_calls


def test_an_output_may_fill_the_cache(reference: PreTrainedModel, engine: Engine) -> None:
    prompt = [9, 8, 7, 6, 5, 4, 3]
    room = CAPACITY - len(prompt)
    decoder = Decoder(engine, drafter_of("related", "llama"), frozenset())
    got, counts = decode(decoder, prompt, 4, room)
    assert got == greedy(reference, prompt, room, [])
    assert 0 < counts.num_accepted < counts.num_drafted  # both outcomes occurred


def test_a_drafter_serves_one_prompt_after_another(
    reference: PreTrainedModel, engine: Engine
) -> None:
    """Longer, shorter, longer: nothing of the earlier prompt is read again."""
    decoder = Decoder(engine, drafter_of("related", "llama"), frozenset())
    for length in (20, 1, 3, 30):
        prompt = [3 + i % 50 for i in range(length)]
        assert decode(decoder, prompt, 2, 10)[0] == greedy(reference, prompt, 10, [])


def test_a_draft_cache_one_position_late_shows_in_acceptance(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs acceptance, not exactness: a perfect draft is no longer accepted throughout."""
    drafter = drafter_of("perfect", "llama")
    decoder = Decoder(engine, drafter, frozenset())
    _, counts = decode(decoder, [7, 33, 21], 3, 40)
    assert counts.acceptance_rate == 1
    original = drafter.engine.forward

    def late(tokens_BT: Tensor, positions_BT: Tensor, *, longest: int, **rest: Any) -> Tensor:
        shift = 0 if rest.get("fresh") else 1
        return original(tokens_BT, positions_BT + shift, longest=longest + shift, **rest)

    monkeypatch.setattr(drafter.engine, "forward", late)
    assert decode(decoder, [7, 33, 21], 3, 40)[1].acceptance_rate < 1


def test_rounds_are_what_was_committed(engine: Engine) -> None:
    decoder = Decoder(engine, drafter_of("related", "llama"), frozenset({11}))
    sampling = Sampling(0.8)
    tokens, counts = decoder.decode(
        [5, 6], gamma=3, max_new_tokens=30, sampling=sampling, rng=torch.Generator().manual_seed(3)
    )
    rounds = list(
        decoder.stream(
            [5, 6],
            gamma=3,
            max_new_tokens=30,
            sampling=sampling,
            rng=torch.Generator().manual_seed(3),
        )
    )
    assert [
        token for step in rounds for token in step.tokens
    ] == tokens  # equal seeds, equal outputs
    assert len(rounds) == counts.num_target_calls
    assert sum(step.num_accepted for step in rounds) == counts.num_accepted
    assert sum(step.num_drafted for step in rounds) == counts.num_drafted


@pytest.mark.parametrize(
    ("prompt", "gamma", "max_new_tokens", "complaint"),
    [
        ([], 1, 5, "empty"),
        ([3], -1, 5, "gamma=-1"),
        ([3] * 60, 1, 13, f"context of {CAPACITY}"),
    ],
)
def test_bad_input_is_refused_with_the_reason(
    prompt: list[int], gamma: int, max_new_tokens: int, complaint: str, engine: Engine
) -> None:
    decoder = Decoder(engine, drafter_of("perfect", "llama"), frozenset())
    with pytest.raises(ValueError, match=complaint):
        decode(decoder, prompt, gamma, max_new_tokens)


def test_a_draft_length_needs_a_draft(engine: Engine) -> None:
    with pytest.raises(ValueError, match="gamma=2"):
        decode(Decoder(engine, None, frozenset()), [3], 2, 5)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_nan_logits_name_the_side_and_the_position(side: str, engine: Engine) -> None:
    broken = tiny_family("llama")
    with torch.no_grad():
        broken.get_input_embeddings().weight[9] = torch.nan
    target = engine_of(broken) if side == "target" else engine
    draft = engine_of(broken) if side == "draft" else engine_of(tiny_family("llama"))
    decoder = Decoder(target, ModelDrafter(draft, vocab_size=VOCAB_SIZE), frozenset())
    with pytest.raises(NonFiniteLogits, match=f"{side}: logits are NaN at row 0, position 3"):
        decode(decoder, [3, 4, 5, 9], 2, 5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_at_a_fixed_width_bfloat16_outputs_are_identical_too(family: str) -> None:
    """Calls of one shape round alike, whether or not a draft is behind them."""
    choose = random.Random(0)
    target, draft = (tiny_family(family, seed=seed).bfloat16() for seed in (0, 1))
    draft.load_state_dict(target.state_dict())
    for name, parameter in draft.named_parameters():
        if ".1." in name:
            parameter.data.mul_(0.5)
    gamma, accepted = 3, 0
    decoder = Decoder(
        engine_of(target),
        ModelDrafter(engine_of(draft), vocab_size=VOCAB_SIZE),
        frozenset(),
        fixed_width=gamma + 1,
    )
    for length in range(1, 13):
        prompt = [choose.randrange(VOCAB_SIZE) for _ in range(length)]
        alone, _ = decode(decoder, prompt, 0, CAPACITY - 16)
        together, counts = decode(decoder, prompt, gamma, CAPACITY - 16)
        assert together == alone
        accepted += counts.num_accepted
    assert accepted > 50


def test_a_fixed_width_needs_room_for_itself() -> None:
    decoder = Decoder(engine_of(tiny_family("llama")), None, frozenset(), fixed_width=4)
    assert len(decode(decoder, [1, 2], 0, CAPACITY - 5)[0]) == CAPACITY - 5
    with pytest.raises(ValueError, match="exceed the context"):
        decode(decoder, [1, 2], 0, CAPACITY - 4)
