"""Batched generation: every answer as if alone, with the target's distribution at each token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.schema import Config
from models.decoding.autoregressive import Answer, Generator, Request
from models.decoding.engine import Engine
from models.decoding.sampling import NonFiniteLogits, Sampling, law
from models.generate import open_generator
from models.jobs import Job
from tests.families import tiny_family

VOCAB_SIZE = 64
TOP_K = 7
MAX_NEW_TOKENS = 12
STOP_IDS = frozenset({2, 11, 30, 47, 51})
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32, summed in another order


def requests(num: int, max_new_tokens: int = MAX_NEW_TOKENS) -> list[Request]:
    """Prompts of 1 to 19 tokens at different temperatures; every second keeps hidden states, every
    third is recorded itself.
    """
    choose = random.Random(num)
    rng = torch.Generator().manual_seed(num)
    return [
        Request(
            index=index,
            prompt=[
                choose.randrange(VOCAB_SIZE)
                for _ in range(1 if index == 2 else choose.randrange(2, 20))
            ],
            temperature=[0.0, 0.6, 1.0, 1.7][index % 4],
            uniforms=torch.rand(max_new_tokens, generator=rng),
            keep_hidden=index % 2 == 0,
            record_prompt=index % 3 == 0,
        )
        for index in range(num)
    ]


def answers(
    model: PreTrainedModel,
    asked: list[Request],
    num_rows: int,
    *,
    stop_ids: frozenset[int] = STOP_IDS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    top_k: int = TOP_K,
) -> list[Answer]:
    engine = Engine(model, num_rows=num_rows, capacity=40, compiled=False)
    generator = Generator(engine, stop_ids=stop_ids, max_new_tokens=max_new_tokens, top_k=top_k)
    found = sorted(generator.answer(asked), key=lambda answer: answer.index)
    generator.close()
    assert [answer.index for answer in found] == [request.index for request in asked]
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3"])
def test_an_answer_does_not_depend_on_its_batch(family: str) -> None:
    asked = requests(13)
    alone = answers(tiny_family(family), asked, 1)
    assert len({len(answer.tokens) for answer in alone}) > 3  # rows end at different times
    for num_rows in (5, 20):  # rows are replaced; more rows than requests
        for one, other in zip(alone, answers(tiny_family(family), asked, num_rows), strict=True):
            assert other.tokens == one.tokens
            assert (other.prompt, other.temperature) == (one.prompt, one.temperature)
            torch.testing.assert_close(
                other.log_probabilities_MK, one.log_probabilities_MK, **CLOSE
            )
            assert torch.equal(other.ids_MK, one.ids_MK)
            assert (other.hidden_ND is None) is (one.hidden_ND is None)
            if one.hidden_ND is not None:
                torch.testing.assert_close(other.hidden_ND, one.hidden_ND, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_family("llama")


@pytest.fixture(scope="module")
def found(model: PreTrainedModel) -> list[Answer]:
    return answers(model, requests(9), 3)


def uncached(model: PreTrainedModel, answer: Answer) -> Tensor:
    """Logits before each token of prompt and answer but the first, in one pass."""
    ids = torch.tensor([answer.prompt + answer.tokens[:-1]])
    with torch.inference_mode():
        return model(ids, use_cache=False).logits[0]


def test_recorded_distributions_are_the_models_at_temperature_one(
    model: PreTrainedModel, found: list[Answer]
) -> None:
    for answer, request in zip(found, requests(9), strict=True):
        num_laws = len(answer.tokens) + (len(answer.prompt) - 1) * request.record_prompt
        log_p_MV = uncached(model, answer)[-num_laws:].log_softmax(-1)
        assert answer.log_probabilities_MK.shape == answer.ids_MK.shape == (num_laws, TOP_K)
        top_MK = log_p_MV.topk(TOP_K, -1)
        assert torch.equal(answer.ids_MK.long(), top_MK.indices)
        torch.testing.assert_close(answer.log_probabilities_MK, top_MK.values, **CLOSE)
        assert (answer.log_probabilities_MK.exp().sum(-1) <= 1 + 1e-5).all()


def test_tokens_are_the_draws_of_their_uniforms(
    model: PreTrainedModel, found: list[Answer]
) -> None:
    """The law at the request's temperature, cumulated in falling order, inverted at the uniform."""
    for answer, request in zip(found, requests(9), strict=True):
        logits_NV = uncached(model, answer)[-len(answer.tokens) :]
        law_NV = law(logits_NV, Sampling(request.temperature)).double()
        for token, law_V, uniform in zip(answer.tokens, law_NV, request.uniforms, strict=False):
            assert law_V[token] > 0
            ordered = law_V.sort(descending=True, stable=True)
            place = ordered.indices.tolist().index(token)
            if place < TOP_K:  # beyond, the ids follow in their own order
                below = ordered.values[:place].sum()
                assert (
                    below - 1e-5 <= uniform < below + law_V[token] + 1e-5
                    or request.temperature == 0
                )


def test_sampled_first_tokens_have_the_law_of_their_temperature(model: PreTrainedModel) -> None:
    """Uniforms on an even grid: frequencies are exact but for one point of it per id."""
    grid = (torch.arange(200) + 0.5) / 200
    for temperature in (0.7, 1.4):
        asked = [Request(i, [5, 6], temperature, grid[i : i + 1]) for i in range(200)]
        tokens = [a.tokens[0] for a in answers(model, asked, 1, max_new_tokens=1, top_k=2)]
        with torch.inference_mode():
            law_V = law(model(torch.tensor([[5, 6]])).logits, Sampling(temperature))[0, -1]
        frequency_V = torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE) / 200
        assert (frequency_V - law_V).abs().max() <= 2 / 200


def test_hidden_states_are_what_the_head_read(model: PreTrainedModel, found: list[Answer]) -> None:
    head = model.get_output_embeddings()
    for answer, request in zip(found, requests(9), strict=True):
        assert (answer.hidden_ND is not None) is request.keep_hidden
        if answer.hidden_ND is None:
            continue
        with torch.inference_mode():
            logits_NV = head(answer.hidden_ND)
        want_NV = uncached(model, answer)[-len(answer.tokens) :]
        torch.testing.assert_close(logits_NV, want_NV, atol=1e-3, rtol=1e-4)


def test_an_answer_ends_with_its_stop_id_or_at_the_limit(found: list[Answer]) -> None:
    """The stop id is a generated token like any other: its distribution is recorded and learned."""
    ended = [answer for answer in found if answer.tokens[-1] in STOP_IDS]
    assert 0 < len(ended) < len(found)
    for answer in found:
        assert len(answer.tokens) == MAX_NEW_TOKENS or answer in ended
        assert not STOP_IDS.intersection(answer.tokens[:-1])


def test_an_answer_may_be_its_first_token_alone(model: PreTrainedModel) -> None:
    for limit, stops in ((1, frozenset[int]()), (MAX_NEW_TOKENS, frozenset(range(VOCAB_SIZE)))):
        asked = [replace(request, record_prompt=False) for request in requests(7, limit)]
        for answer in answers(model, asked, 3, stop_ids=stops, max_new_tokens=limit):
            assert len(answer.tokens) == len(answer.ids_MK) == 1


def test_of_a_shared_beginning_no_law_is_recorded(model: PreTrainedModel) -> None:
    asked = [
        Request(i, [7, 8, 9, *range(20, 22 + i)], 0.0, torch.rand(4), record_prompt=True)
        for i in range(3)
    ]
    engine = Engine(model, num_rows=2, capacity=40, compiled=False)
    engine.share([request.prompt for request in asked])
    num_shared = 4  # of the shortest, every prompt keeps a token of its own
    generator = Generator(engine, stop_ids=frozenset(), max_new_tokens=4, top_k=TOP_K)
    for answer in generator.answer(asked):
        num_laws = len(answer.prompt) - num_shared - 1 + 4
        assert len(answer.ids_MK) == num_laws
        want_MK = uncached(model, answer)[-num_laws:].topk(TOP_K, -1).indices
        assert torch.equal(answer.ids_MK.long(), want_MK)
    generator.close()


def test_nothing_asked_nothing_answered(model: PreTrainedModel) -> None:
    assert answers(model, [], 2) == []


def test_greedy_answers_are_the_models_own(model: PreTrainedModel) -> None:
    reference = tiny_family("llama")
    asked = [Request(i, [4 + i, 9], 0.0, torch.rand(8)) for i in range(4)]
    for answer in answers(model, asked, 3, stop_ids=frozenset(), max_new_tokens=8):
        ids = torch.tensor([answer.prompt])
        own = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        assert answer.tokens == own[0, 2:].tolist()


def test_requests_are_taken_when_a_row_is_free(model: PreTrainedModel) -> None:
    """A caller may stop asking once it has enough: nothing is taken in advance."""
    taken = 0

    def asked() -> Iterator[Request]:
        nonlocal taken
        for request in requests(9):
            taken += 1
            yield request

    engine = Engine(model, num_rows=2, capacity=40, compiled=False)
    generator = Generator(engine, stop_ids=STOP_IDS, max_new_tokens=MAX_NEW_TOKENS, top_k=TOP_K)
    for done, _ in enumerate(generator.answer(asked()), start=1):
        assert taken <= done + engine.cache.num_rows
    generator.close()


def test_a_closed_generator_leaves_the_model_alone() -> None:
    model = tiny_family("llama")
    generator = Generator(
        Engine(model, num_rows=1, capacity=8, compiled=False),
        stop_ids=STOP_IDS,
        max_new_tokens=1,
        top_k=2,
    )
    head = model.get_output_embeddings()
    assert len(head._forward_pre_hooks) == 1
    generator.close()
    assert len(head._forward_pre_hooks) == 0


def test_nan_logits_name_the_row_and_the_position() -> None:
    model = tiny_family("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = torch.nan
    asked = [Request(0, [3, 4], 1.0, torch.rand(4)), Request(1, [3, 4, 9], 1.0, torch.rand(4))]
    with pytest.raises(NonFiniteLogits, match="target: logits are NaN at row 0, position 2"):
        answers(model, asked, 1, max_new_tokens=4)


def test_a_recording_runs_in_our_own_steps() -> None:
    """On a CPU: what listens for hidden states does not keep it out of them."""
    model = tiny_family("llama", hidden_size=128, intermediate_size=192, head_dim=32)
    target: Any = SimpleNamespace(config=model.config, stop_ids=STOP_IDS)
    job = Job(0, "train", "", [3, 4, 5], 1.0, keep_hidden=True)
    config = Config()
    config.generate.max_new_tokens = MAX_NEW_TOKENS
    generator = open_generator(config, target, model, [job])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.layers[0].self_attn, "forward", None)
        (answer,) = generator.answer([requests(1)[0]])
    assert answer.hidden_ND is not None
    assert answer.hidden_ND.shape == (len(answer.tokens), 128)
