"""Rows decoded together are what they are alone, whatever enters and leaves beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from models.decoding.counts import Counts
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import CombinedDrafter, Drafter, LookupDrafter
from models.decoding.engine import Engine
from models.decoding.length import StopBelow
from models.decoding.rows import Request
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from tests.families import tiny_family
from tests.shapes import Bushy

VOCAB_SIZE = 64
CAPACITY = 96
GAMMA = 5
STOPS = frozenset({11, 23})
KINDS = ["nobody", "chain", "stopping", "tree", "lookup", "combined", "short context"]


def engine_of(model: PreTrainedModel, num_rows: int, capacity: int = CAPACITY) -> Engine:
    return Engine(model, num_rows=num_rows, capacity=capacity, compiled=False)


def drafter_of(kind: str, num_rows: int) -> Drafter | None:
    if kind == "nobody":
        return None
    rule = {"stopping": StopBelow(0.4), "tree": Bushy((2, 1, 2)), "combined": Bushy((2, 1))}
    engine = engine_of(tiny_family("gpt2"), num_rows, 28 if kind == "short context" else CAPACITY)
    model = ModelDrafter(engine, vocab_size=VOCAB_SIZE, rule=rule.get(kind))
    found = LookupDrafter(device=torch.device("cpu"), shortest=1, longest=3)
    if kind == "combined":
        return CombinedDrafter(model, found, model_gamma=4)
    return found if kind == "lookup" else model


def requests() -> list[Request]:
    """Of 1 to 20 prompt tokens and 1 to 30 new ones."""
    choose = random.Random(0)
    return [
        Request(
            [choose.randrange(VOCAB_SIZE) for _ in range(length)],
            choose.choice([1, 7, 20, 30]),
            torch.Generator().manual_seed(length),
        )
        for length in (9, 1, 20, 3, 14, 2, 6)
    ]


def outputs(
    family: str, kind: str, num_rows: int, sampling: Sampling, asked: list[Request]
) -> dict[int, tuple[list[int], Counts]]:
    decoder = Decoder(engine_of(tiny_family(family), num_rows), drafter_of(kind, num_rows), STOPS)
    rows = decoder.decode_all(asked, gamma=0 if kind == "nobody" else GAMMA, sampling=sampling)
    return {row.index: (row.new_tokens, row.counts) for row in rows}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_is_what_it_is_alone(family: str, temperature: float, kind: str) -> None:
    sampling = Sampling(temperature)
    alone = {
        index: outputs(family, kind, 1, sampling, [request])[0]
        for index, request in enumerate(requests())
    }
    together = outputs(family, kind, 3, sampling, requests())
    assert sorted(together) == list(range(len(alone)))
    for index, (tokens, counts) in alone.items():
        assert together[index][0] == tokens
        if kind in ("nobody", "lookup"):  # a draft model's steps are those of the longest draft
            assert together[index][1] == counts
        assert together[index][1].num_accepted == counts.num_accepted
        assert together[index][1].tested_at == counts.tested_at


@pytest.mark.parametrize("kind", ["chain", "combined"])
def test_penalties_are_those_of_the_row(kind: str) -> None:
    sampling = Sampling(0.8, repetition_penalty=1.4, presence_penalty=0.3, min_new_tokens=2)
    alone = [outputs("llama", kind, 1, sampling, [request])[0][0] for request in requests()]
    together = outputs("llama", kind, 4, sampling, requests())
    assert [together[index][0] for index in range(len(alone))] == alone


def test_requests_are_taken_as_rows_become_free() -> None:
    taken: list[int] = []

    def asked() -> Iterator[Request]:
        for index, request in enumerate(requests()):
            taken.append(index)
            yield request

    decoder = Decoder(engine_of(tiny_family("llama"), 2), None, frozenset())
    next(decoder.decode_all(asked(), gamma=0, sampling=Sampling(0.0)))
    assert taken == [0, 1]
    assert len(list(decoder.decode_all(asked(), gamma=0, sampling=Sampling(0.0)))) == 7
    assert list(decoder.decode_all([], gamma=0, sampling=Sampling(0.0))) == []


def test_a_request_that_does_not_fit_is_refused() -> None:
    decoder = Decoder(engine_of(tiny_family("llama"), 2), drafter_of("chain", 2), frozenset())
    rng = torch.Generator()
    fits = Request([1, 2], CAPACITY - 2 - GAMMA, rng)
    assert len(list(decoder.decode_all([fits], gamma=GAMMA, sampling=Sampling(0.0)))) == 1
    with pytest.raises(ValueError, match="exceed the context"):
        list(
            decoder.decode_all(
                [Request([1, 2, 3], CAPACITY - 2 - GAMMA, rng)],
                gamma=GAMMA,
                sampling=Sampling(0.0),
            )
        )
