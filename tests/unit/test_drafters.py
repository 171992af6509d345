"""Prompt lookup, alone and beside a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import CombinedDrafter, LookupDrafter, Proposal
from models.decoding.engine import Engine
from models.decoding.length import StopBelow
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from tests.families import tiny_family

VOCAB_SIZE = 64
AT_ONE = Sampling(1.0)


def lookup(shortest: int = 2, longest: int = 4) -> LookupDrafter:
    return LookupDrafter(device=torch.device("cpu"), shortest=shortest, longest=longest)


def found(drafter: LookupDrafter, tokens: Sequence[int], gamma: int) -> list[int]:
    proposal = drafter.draft([tokens], [gamma], AT_ONE, torch.empty(1, 0))
    assert proposal.num_steps == 0
    assert proposal.laws is None  # certain
    ids: list[int] = proposal.ids_BN[0].tolist()
    return ids


def searched(tokens: Sequence[int], gamma: int, shortest: int, longest: int) -> list[int]:
    """The same by plain search."""
    for length in range(min(longest, len(tokens)), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[end - length : end]) == list(tokens[-length:]):
                text = list(tokens)
                for i in range(gamma):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 6), st.integers(1, 3))
def test_it_follows_the_latest_longest_match(tokens: list[int], gamma: int, shortest: int) -> None:
    drafter = lookup(shortest, shortest + 2)
    drafter.start([tokens[:1]])
    for length in range(1, len(tokens) + 1):  # as the text grows
        want = searched(tokens[:length], gamma, shortest, shortest + 2)
        assert found(drafter, tokens[:length], gamma) == want


def test_a_loop_is_drafted_as_a_loop() -> None:
    assert found(lookup(), [9, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]


def test_another_text_starts_afresh() -> None:
    drafter = lookup()
    assert found(drafter, [1, 2, 3, 1, 2], 1) == [3]
    drafter.start([[5]])
    assert found(drafter, [5, 1, 2], 1) == []
    assert found(drafter, [5, 1, 2, 7, 1, 2], 1) == [7]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 2), (3, 2)])
def test_impossible_lengths_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match="shortest"):
        lookup(shortest, longest)


class Watched(ModelDrafter):
    """Notes what it is asked for."""

    asked: list[int]

    def draft(self, texts: object, most: Sequence[int], *rest: object) -> Proposal:
        self.asked += most
        return super().draft(texts, most, *rest)  # type: ignore[arg-type]


@pytest.fixture
def model() -> Watched:
    drafter = Watched(
        Engine(tiny_family("gpt2"), num_rows=1, capacity=96, compiled=False), vocab_size=VOCAB_SIZE
    )
    drafter.asked = []
    return drafter


def test_the_model_drafts_where_nothing_matches(model: Watched) -> None:
    drafter = CombinedDrafter(model, lookup(), model_gamma=2)
    prompt = [1, 2, 3]
    drafter.start([prompt])
    uniform_BG = torch.full((1, 5), 0.5)
    own = drafter.draft([prompt], [5], AT_ONE, uniform_BG)
    assert (own.num_steps, own.ids_BN.shape) == (2, (1, 2))
    looked_up = drafter.draft([[1, 2, 3, 1, 2]], [5], AT_ONE, uniform_BG)
    assert (looked_up.num_steps, looked_up.ids_BN.tolist()) == (0, [[3, 1, 2, 3, 1]])
    assert model.asked == [2]


def test_after_lookups_the_model_knows_the_whole_text(model: Watched) -> None:
    """What was committed while the model was not asked is read when it is asked again."""
    drafter = CombinedDrafter(model, lookup(), model_gamma=2)
    prompt, later = [1, 2, 1], [1, 2, 1, 2, 1, 2, 1, 4, 5]
    drafter.start([prompt])
    uniform_BG = torch.tensor([[0.3, 0.7]])
    # of the first two drafts none is accepted: the target goes on with 2
    for tokens in (prompt, [1, 2, 1, 2], later):
        last = drafter.draft([tokens], [2], AT_ONE, uniform_BG)
    fresh = ModelDrafter(
        Engine(tiny_family("gpt2"), num_rows=1, capacity=96, compiled=False), vocab_size=VOCAB_SIZE
    )
    fresh.start([later])
    want = fresh.draft([later], [2], AT_ONE, uniform_BG)
    assert torch.equal(last.ids_BN, want.ids_BN)
    torch.testing.assert_close(last.laws, want.laws, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["lookup", "combined"])
def test_greedy_output_is_the_targets(kind: str, model: Watched) -> None:
    target = Engine(tiny_family("llama"), num_rows=1, capacity=96, compiled=False)
    one = lookup(shortest=1)
    drafter = one if kind == "lookup" else CombinedDrafter(model, one, model_gamma=1)
    outputs = []
    for gamma in (0, 4):
        tokens, counts = Decoder(target, drafter, frozenset()).decode(
            [5, 17, 5],
            gamma=gamma,
            max_new_tokens=60,
            sampling=Sampling(0.0),
            rng=torch.Generator(),
        )
        outputs.append(tokens)
    assert outputs[0] == outputs[1]
    assert counts.num_accepted > 0
    assert counts.num_draft_steps == sum(model.asked)
    assert counts.num_target_calls < 60


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_ends_with_its_first_doubtful_token(temperature: float) -> None:
    """The same tokens and laws as without stopping, up to where the product falls below."""
    model = tiny_family("llama")
    text = [5, 17, 3]
    uniform_BG = torch.rand(1, 6, generator=torch.Generator().manual_seed(0))

    def drafted(stop_below: float) -> Proposal:
        engine = Engine(model, num_rows=1, capacity=64, compiled=False)
        drafter = ModelDrafter(
            engine, vocab_size=VOCAB_SIZE, rule=StopBelow(stop_below) if stop_below else None
        )
        drafter.start([text])
        return drafter.draft([text], [6], Sampling(temperature), uniform_BG)

    whole = drafted(0.0)
    ids = whole.ids_BN[0].tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([text + ids])).logits[0, len(text) - 1 : -1]
    chances = logits.softmax(-1).gather(-1, whole.ids_BN.T)[:, 0].cumprod(0).tolist()
    assert whole.num_steps == len(ids) == 6
    for kept in range(1, 6):
        proposal = drafted((chances[kept - 1] + (chances[kept - 2] if kept > 1 else 1.0)) / 2)
        assert proposal.num_steps == proposal.ids_BN.shape[1] == kept
        assert proposal.ids_BN[0].tolist() == ids[:kept]
        if whole.laws is None:
            assert temperature == 0 and proposal.laws is None
        else:
            torch.testing.assert_close(proposal.laws, whole.laws[:, :kept])


def test_the_model_must_draft_something(model: Watched) -> None:
    with pytest.raises(ValueError, match="model_gamma=0"):
        CombinedDrafter(model, lookup(), model_gamma=0)
