"""Trees on real caches: greedy output is the target's own, whatever is drafted and accepted."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from models.decoding.counts import Counts
from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from tests.families import FAMILIES, tiny_family
from tests.shapes import Bushy

VOCAB_SIZE = 64
GREEDY = Sampling(0.0)
SHAPES = [Bushy((2, 2, 1)), Bushy((3, 1)), Bushy((1, 3, 2))]


def engine_of(model: PreTrainedModel, capacity: int = 96) -> Engine:
    return Engine(model, num_rows=1, capacity=capacity, compiled=False)


def nearly(family: str, *, noise: float = 0.02) -> PreTrainedModel:
    """The same model, its weights disturbed: often, but not always, of the same opinion."""
    model = tiny_family(family)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=rng)
    return model


def decode(decoder: Decoder, prompt: list[int], gamma: int, num: int) -> tuple[list[int], Counts]:
    return decoder.decode(
        prompt, gamma=gamma, max_new_tokens=num, sampling=GREEDY, rng=torch.Generator()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of sliding attention too; some accepted tokens come from other than first branches."""
    target = engine_of(tiny_family(family))
    moved: list[int] = []
    original = target.cache.move
    monkeypatch.setattr(
        target.cache, "move", lambda *given: (moved.append(given[0]), original(*given))
    )
    choose = random.Random(family)
    total = Counts()
    for shape in SHAPES:
        drafter = ModelDrafter(engine_of(nearly(family)), vocab_size=VOCAB_SIZE, rule=shape)
        decoder = Decoder(target, drafter, frozenset())
        for _ in range(2):
            prompt = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(1, 20))]
            want, _ = decode(decoder, prompt, 0, 40)
            got, counts = decode(decoder, prompt, 9, 40)
            assert got == want
            total += counts
    assert moved
    assert 0.1 < total.acceptance_rate < 1
    assert total.num_drafted > total.num_tested  # several candidates are one test


def test_without_the_move_outputs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above sees an accepted branch that stays where it was drafted."""
    target = engine_of(tiny_family("llama"))
    drafter = ModelDrafter(engine_of(nearly("llama")), vocab_size=VOCAB_SIZE, rule=SHAPES[0])
    decoder = Decoder(target, drafter, frozenset())
    prompt = [5, 17, 3]
    want, _ = decode(decoder, prompt, 0, 60)
    assert decode(decoder, prompt, 9, 60)[0] == want
    monkeypatch.setattr(target.cache, "move", lambda *_: None)
    assert decode(decoder, prompt, 9, 60)[0] != want


def test_a_perfect_draft_is_accepted_along_its_first_branch() -> None:
    drafter = ModelDrafter(
        engine_of(tiny_family("llama")), vocab_size=VOCAB_SIZE, rule=Bushy((2, 2, 2))
    )
    decoder = Decoder(engine_of(tiny_family("llama")), drafter, frozenset())
    _, counts = decode(decoder, [7, 33], 15, 41)
    assert counts.acceptance_rate == 1
    # 2 + 4 + 8 candidates of three places; the last round has fewer to go
    assert counts.num_target_calls == 11
    assert counts.drafted_at[0] > 0 and counts.tested_at == counts.accepted_at


def test_a_fixed_width_holds_trees_too() -> None:
    target = engine_of(tiny_family("llama"))
    drafter = ModelDrafter(engine_of(nearly("llama")), vocab_size=VOCAB_SIZE, rule=SHAPES[1])
    decoder = Decoder(target, drafter, frozenset(), fixed_width=12)
    widths: list[int] = []
    original = target.forward

    def forward(tokens_BT: torch.Tensor, *given: object, **rest: object) -> torch.Tensor:
        widths.append(tokens_BT.shape[1])
        return original(tokens_BT, *given, **rest)  # type: ignore[arg-type]

    target.forward = forward  # type: ignore[method-assign]
    want, _ = decode(decoder, [5, 6, 7], 0, 30)
    got, _ = decode(decoder, [5, 6, 7], 9, 30)
    assert got == want
    assert set(widths[2:]) <= {12, 2}  # all but the reading of the prompt


def test_a_text_may_outgrow_the_drafts_context() -> None:
    """From there on the target decodes alone."""
    for rule in (None, SHAPES[0]):
        drafter = ModelDrafter(
            engine_of(nearly("llama"), capacity=24), vocab_size=VOCAB_SIZE, rule=rule
        )
        decoder = Decoder(engine_of(tiny_family("llama")), drafter, frozenset())
        for prompt in ([5, 6, 7], list(range(30))):
            want, _ = decode(decoder, prompt, 0, 40)
            got, counts = decode(decoder, prompt, 4, 40)
            assert got == want
            assert (counts.num_drafted > 0) is (len(prompt) < 24)
