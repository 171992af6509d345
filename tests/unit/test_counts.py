"""Counts: what is summed over target calls, and the identities between the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.decoding.counts import Counts
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import Proposal
from models.decoding.engine import Engine
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from tests.families import tiny_family

Call = tuple[int, int, int, int]  # drafted, tested, accepted, committed


@st.composite
def calls(draw: st.DrawFn, cut_short: bool = True) -> Call:
    """One target call as a decoder counts it, possibly the one in which the output ended."""
    num_drafted = draw(st.integers(0, 5))
    num_accepted = draw(st.integers(0, num_drafted))
    if cut_short and num_accepted and draw(st.booleans()):  # the last accepted token is a stop id
        return num_drafted, num_accepted, num_accepted, num_accepted
    rejected = num_accepted < num_drafted
    return num_drafted, num_accepted + rejected, num_accepted, num_accepted + 1


def counted(rounds: list[Call]) -> Counts:
    counts = Counts()
    for call in rounds:
        counts.add_round(*call)
    return counts


@given(st.lists(calls(), max_size=20))
def test_sums_agree_with_each_other(rounds: list[Call]) -> None:
    counts = counted(rounds)
    assert counts.num_target_calls == len(rounds) == sum(counts.calls_by_length)
    assert counts.num_tokens == sum(
        length * n for length, n in enumerate(counts.calls_by_length, 1)
    )
    assert counts.num_tokens == sum(call[3] for call in rounds)
    assert counts.num_target_calls == sum(counts.calls_by_width)
    assert counts.num_drafted == sum(i * n for i, n in enumerate(counts.calls_by_width))
    assert (sum(counts.drafted_at), sum(counts.tested_at), sum(counts.accepted_at)) == (
        counts.num_drafted,
        counts.num_tested,
        counts.num_accepted,
    )
    for held in (counts.drafted_at, counts.tested_at, counts.accepted_at):
        assert held == sorted(held, reverse=True)  # a position is reached only through those before
        assert len(held) == max((call[0] for call in rounds), default=0)
    # position i + 1 is tested only where position i was accepted
    pairs = zip(counts.tested_at[1:], counts.accepted_at, strict=False)
    assert all(tested <= accepted for tested, accepted in pairs)


@given(st.lists(calls(), max_size=20))
def test_rates_are_never_above_one(rounds: list[Call]) -> None:
    counts = counted(rounds)
    rates = [counts.acceptance_rate, counts.draft_utilisation]
    rates += counts.position_acceptance + counts.conditional_acceptance
    assert all(0 <= rate <= 1 for rate in rates)
    assert counts.draft_utilisation <= counts.acceptance_rate
    assert all(
        position <= conditional
        for position, conditional in zip(
            counts.position_acceptance, counts.conditional_acceptance, strict=True
        )
    )


@given(st.lists(calls(cut_short=False), min_size=1, max_size=20))
def test_acceptance_length_is_one_and_the_prefix_survival(rounds: list[Call]) -> None:
    """tau = 1 + sum over i of P(at least i accepted), before an output is cut short."""
    counts = counted(rounds)
    survival = [
        sum(accepted >= position for _, _, accepted, _ in rounds) / len(rounds)
        for position in range(1, 6)
    ]
    assert counts.acceptance_length == pytest.approx(1 + sum(survival))
    if (
        len({drafted for drafted, *_ in rounds}) == 1
    ):  # then it is also what position_acceptance says
        assert counts.acceptance_length == pytest.approx(1 + sum(counts.position_acceptance))


@given(
    st.lists(calls(), max_size=12), st.lists(calls(), max_size=12), st.lists(calls(), max_size=12)
)
def test_adding_counts_is_counting_all_rounds(a: list[Call], b: list[Call], c: list[Call]) -> None:
    assert counted(a) + counted(b) == counted(a + b)
    assert counted(a) + counted(b) + counted(c) == sum((counted(b), counted(c)), counted(a))
    before = astuple(left := counted(a))
    _ = left + counted(b)
    assert astuple(left) == before  # neither operand is changed
    assert counted(a) + Counts() == counted(a)


def test_without_rounds_rates_are_zero() -> None:
    counts = Counts()
    assert (counts.acceptance_rate, counts.acceptance_length, counts.draft_utilisation) == (0, 0, 0)
    assert counts.position_acceptance == counts.conditional_acceptance == []


@pytest.mark.parametrize("call", [(2, 1, 2, 3), (2, 3, 2, 3), (2, 2, 2, 4), (2, 0, 0, 0)])
def test_impossible_rounds_are_refused(call: Call) -> None:
    with pytest.raises(AssertionError):
        Counts().add_round(*call)


# ---------------------------------------------------------------- as the decoder counts


class Scripted:
    """Proposes given tokens after given contexts lengths, with certainty."""

    def __init__(self, continuation: list[int]):
        self.continuation, self.start_length = continuation, 0

    def reset(self, num_rows: int) -> None:
        assert num_rows == 1

    def keep(self, rows: Sequence[int]) -> None:
        raise AssertionError(rows)  # one row only

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] = (0,)) -> None:
        assert list(rows) == [0]
        self.start_length = len(prompts[0])

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BN: Tensor,
    ) -> Proposal:
        del sampling, uniform_BN
        at = len(texts[0]) - self.start_length
        ids_1G = torch.tensor([self.continuation[at : at + most[0]]])
        return Proposal(ids_1G, torch.nn.functional.one_hot(ids_1G, 64).float(), 0)


PROMPT = [5, 17]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_family("llama"), num_rows=1, capacity=64, compiled=False)


@pytest.fixture(scope="module")
def greedy(engine: Engine) -> list[int]:
    """The target's own output of 12 tokens; the tests need its first ones to differ."""
    tokens, counts = decode(engine, None, gamma=0, max_new_tokens=12)
    assert counts == counted(12 * [(0, 0, 0, 1)])
    assert len(set(tokens[:6])) == 6
    return tokens


def decode(
    engine: Engine, drafter: Scripted | None, *, gamma: int, max_new_tokens: int, stop: int = -1
) -> tuple[list[int], Counts]:
    return Decoder(engine, drafter, frozenset({stop})).decode(
        PROMPT,
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(0.0),
        rng=torch.Generator(),
    )


def wrong_at(tokens: list[int], *places: int) -> list[int]:
    return [(token + 1) % 64 if place in places else token for place, token in enumerate(tokens)]


def test_an_accepted_stop_id_ends_the_counting(engine: Engine, greedy: list[int]) -> None:
    """What was drafted after it is neither tested nor committed."""
    _, counts = decode(engine, Scripted(greedy), gamma=4, max_new_tokens=12, stop=greedy[1])
    assert counts == counted([(4, 2, 2, 2)])


def test_a_stop_id_as_correction_is_a_rejection(engine: Engine, greedy: list[int]) -> None:
    _, counts = decode(
        engine, Scripted(wrong_at(greedy, 2)), gamma=4, max_new_tokens=12, stop=greedy[2]
    )
    assert counts == counted([(4, 3, 2, 3)])


def test_a_stop_id_as_bonus_token_is_committed(engine: Engine, greedy: list[int]) -> None:
    _, counts = decode(engine, Scripted(greedy), gamma=3, max_new_tokens=12, stop=greedy[3])
    assert counts == counted([(3, 3, 3, 4)])


def test_a_rejected_stop_id_ends_nothing(engine: Engine, greedy: list[int]) -> None:
    drafted = wrong_at(greedy, 1)
    tokens, counts = decode(engine, Scripted(drafted), gamma=3, max_new_tokens=4, stop=drafted[1])
    assert tokens == greedy[: len(tokens)]
    assert counts == counted([(3, 2, 1, 2), (1, 1, 1, 2)])


def test_the_last_round_drafts_what_the_limit_leaves(engine: Engine, greedy: list[int]) -> None:
    tokens, counts = decode(engine, Scripted(greedy), gamma=4, max_new_tokens=8)
    assert tokens == greedy[:8]
    assert counts == counted([(4, 4, 4, 5), (2, 2, 2, 3)])


def test_sampled_outputs_keep_the_identities(engine: Engine) -> None:
    draft = Engine(tiny_family("gpt2"), num_rows=1, capacity=64, compiled=False)
    decoder = Decoder(engine, ModelDrafter(draft, vocab_size=64), frozenset(range(10)))
    rng = torch.Generator().manual_seed(0)
    total = Counts()
    for _ in range(20):
        tokens, counts = decoder.decode(
            PROMPT, gamma=3, max_new_tokens=14, sampling=Sampling(1.5), rng=rng
        )
        ended = tokens[-1] in decoder.stop_ids
        assert counts.num_tokens == len(tokens) == 14 or ended
        # each call commits what it accepts and one more, unless it ends inside its draft
        assert counts.num_tokens - counts.num_accepted - counts.num_target_calls in (
            {0, -1} if ended else {0}
        )
        total = total + counts
    assert total.num_accepted < total.num_tested < total.num_drafted
