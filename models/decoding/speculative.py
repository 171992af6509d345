"""The speculative decoder: draft a few tokens, verify them in one target call, keep what the law
allows.

With gamma = 0 the same loop is plain autoregressive decoding: the baseline of every speedup is this
very code.
"""

# G drafted positions (gamma), V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from conf.choices import Verification
from models.decoding.drafters import Proposal
from models.decoding.engine import Engine
from models.decoding.sampling import Sampling, law, likeliest, penalise
from models.decoding.stops import StopStrings
from models.decoding.verify import block, chain, greedy


@dataclass
class Counts:
    """Sums over target calls; every rate of the report is a quotient of these.

    Only committed tokens are counted: what follows EOS or the length limit is not committed. A
    drafted token is tested when all before it in its round were accepted and it lies before the end
    of the output.
    """

    num_tokens: int = 0
    num_target_calls: int = 0
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_draft_steps: int = 0  # of the draft model; a lookup needs none
    drafted_at: list[int] = field(default_factory=list)  # rounds that drafted position i
    tested_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    # target calls that committed i + 1 tokens
    calls_by_length: list[int] = field(default_factory=list)
    # target calls that read i + 1 tokens
    calls_by_width: list[int] = field(default_factory=list)

    def add_round(
        self,
        num_drafted: int,
        num_tested: int,
        num_accepted: int,
        num_committed: int,
        num_draft_steps: int = 0,
    ) -> None:
        """Count one target call."""
        assert num_accepted <= num_tested <= num_drafted and 1 <= num_committed <= num_drafted + 1
        for held in (self.drafted_at, self.tested_at, self.accepted_at):
            held.extend([0] * (num_drafted - len(held)))
        for counts, place in (
            (self.calls_by_length, num_committed - 1),
            (self.calls_by_width, num_drafted),
        ):
            counts.extend([0] * (place + 1 - len(counts)))
            counts[place] += 1
        for held, reached in (
            (self.drafted_at, num_drafted),
            (self.tested_at, num_tested),
            (self.accepted_at, num_accepted),
        ):
            for position in range(reached):
                held[position] += 1
        self.num_tokens += num_committed
        self.num_target_calls += 1
        self.num_drafted += num_drafted
        self.num_tested += num_tested
        self.num_accepted += num_accepted
        self.num_draft_steps += num_draft_steps

    def __add__(self, other: Counts) -> Counts:
        def summed(a: Any, b: Any) -> Any:
            if isinstance(a, int):
                return a + b
            return [sum(pair) for pair in zip_longest(a, b, fillvalue=0)]

        return Counts(**{key: summed(mine, vars(other)[key]) for key, mine in vars(self).items()})

    @property
    def acceptance_rate(self) -> float:
        """Accepted over tested."""
        return self.num_accepted / max(self.num_tested, 1)

    @property
    def acceptance_length(self) -> float:
        """Committed tokens over target calls."""
        return self.num_tokens / max(self.num_target_calls, 1)

    @property
    def draft_utilisation(self) -> float:
        """Accepted over drafted."""
        return self.num_accepted / max(self.num_drafted, 1)

    @property
    def position_acceptance(self) -> list[float]:
        """Rounds accepting at least i tokens over rounds drafting at least i, for i = 1, 2, ..."""
        return [
            accepted / max(drafted, 1)
            for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)
        ]

    @property
    def conditional_acceptance(self) -> list[float]:
        """The same given that position i was tested."""
        return [
            accepted / max(tested, 1)
            for accepted, tested in zip(self.accepted_at, self.tested_at, strict=True)
        ]


class Drafter(Protocol):
    """Proposes at most gamma tokens, of which each is verified: none may be drawn and dropped."""

    def start(self, prompt: Sequence[int]) -> None: ...

    def draft(
        self, tokens: Sequence[int], gamma: int, sampling: Sampling, uniform_G: Tensor
    ) -> Proposal: ...


@dataclass(frozen=True)
class Round:
    """What one target call committed: the first `num_accepted` tokens were drafted, the one after
    is the target's.
    """

    tokens: list[int]
    num_accepted: int
    num_drafted: int


@dataclass
class Decoder:
    """A target and, for gamma > 0, a drafter. One prompt at a time.

    `rule` is `chain` or `block`; greedy, and where one token was drafted, they are the same.
    With a `fixed_width` every target call reads at least so many tokens, so that calls with and
    without a draft have one shape: in bfloat16 the same sums over one token and over several round
    differently, and near ties then fall either way. Take gamma + 1, for both.
    `stop_ids` end an output and are part of it, and so does the token that completes one of
    `stop_strings`. Uniforms come from `rng`, so equal seeds give equal
    outputs.
    """

    target: Engine
    drafter: Drafter | None
    stop_ids: frozenset[int]
    rule: Verification = Verification.block
    fixed_width: int = 0
    stop_strings: StopStrings | None = None

    def decode(
        self,
        prompt: Sequence[int],
        *,
        gamma: int,
        max_new_tokens: int,
        sampling: Sampling,
        rng: torch.Generator,
    ) -> tuple[list[int], Counts]:
        """The whole output and its counts."""
        tokens: list[int] = []
        counts = Counts()
        for step in self.stream(
            prompt,
            gamma=gamma,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            rng=rng,
            counts=counts,
        ):
            tokens += step.tokens
        assert counts.num_tokens == len(tokens) and counts.num_tested <= counts.num_drafted
        return tokens, counts

    def stream(
        self,
        prompt: Sequence[int],
        *,
        gamma: int,
        max_new_tokens: int,
        sampling: Sampling,
        rng: torch.Generator,
        counts: Counts | None = None,
    ) -> Iterator[Round]:
        """Yield what each target call commits, until a stop or the length limit.

        Raises ValueError when prompt and output do not fit the target's cache, FloatingPointError
        on NaN logits.
        """
        drafter = self._check(prompt, gamma, max_new_tokens)
        counts = Counts() if counts is None else counts
        device = self.target.device
        tokens = list(prompt)
        end = len(prompt) + max_new_tokens
        # the prompt's last token is left for the first round, which then verifies drafts like every
        # other
        if len(prompt) > 1:
            self.target.prefill(tokens[:-1])
        if gamma:
            drafter.start(prompt)
        nothing = Proposal(torch.empty(1, 0, dtype=torch.long, device=device), None, 0)
        verify = block if self.rule is Verification.block else chain
        while len(tokens) < end:
            # a token beyond the limit would never be committed
            most = min(gamma, end - len(tokens) - 1)
            uniform = torch.rand(2 * most + 1, generator=rng, device=rng.device).to(device)
            drafted_1G, q, num_steps = (
                drafter.draft(tokens, most, sampling, uniform[most + 1 :]) if most else nothing
            )
            width = drafted_1G.shape[1]
            last = torch.tensor([[tokens[-1]]], device=device)
            # what fills a fixed width stands behind everything that is read, and is overwritten
            filler = last.new_zeros(1, max(0, self.fixed_width - 1 - width))
            fed_1T = torch.cat([last, drafted_1G, filler], 1)
            longest = len(tokens) - 1 + fed_1T.shape[1]
            positions = torch.arange(len(tokens) - 1, longest, device=device).unsqueeze(0)
            logits = self.target.forward(fed_1T, positions, longest=longest)[:, : width + 1]
            if sampling.looks_back:
                logits = penalise(
                    logits,
                    sampling,
                    text=tokens,
                    num_prompt=len(prompt),
                    drafted_1G=drafted_1G,
                    vocab_size=logits.shape[-1],
                    stop_ids=self.stop_ids,
                )
            side, first = "target", len(tokens) - 1
            if sampling.temperature == 0:
                verdict = greedy(likeliest(logits, side, first), drafted_1G)
            else:
                p = law(logits, sampling, side=side, first_position=first)
                if q is None:
                    q = one_hot(drafted_1G, p.shape[-1]).to(p.dtype)
                verdict = verify(
                    p, q, drafted_1G, uniform[:width].unsqueeze(0), uniform[most : most + 1]
                )
            num_accepted, *emitted = torch.cat(
                [verdict.num_accepted_B, drafted_1G[0], verdict.next_token_B]
            ).tolist()
            new = [*emitted[:num_accepted], emitted[-1]]
            stop = self._stop(tokens, len(prompt), new)
            new = new if stop is None else new[: stop + 1]
            kept = min(num_accepted, len(new))
            # a rejection is a test too, unless the output ended before it
            num_tested = kept + (kept < width and len(new) > kept)
            counts.add_round(width, num_tested, kept, len(new), num_steps)
            tokens += new
            yield Round(new, kept, width)
            if stop is not None:
                return

    def _stop(self, tokens: Sequence[int], num_prompt: int, new: Sequence[int]) -> int | None:
        """Which of the new tokens ends the output."""
        places = [place for place, token in enumerate(new) if token in self.stop_ids]
        if self.stop_strings is not None:
            found = self.stop_strings.first([*tokens[num_prompt:], *new], len(new))
            places += [] if found is None else [found]
        return min(places, default=None)

    def _check(self, prompt: Sequence[int], gamma: int, max_new_tokens: int) -> Drafter:
        if gamma < 0 or (gamma and self.drafter is None):
            raise ValueError(f"gamma={gamma}: use 0 without a draft and 1 or more with one.")
        if not prompt:
            raise ValueError(
                "prompt: it is empty; a target needs a token to start from, for example its BOS."
            )
        if len(prompt) + max_new_tokens + max(0, self.fixed_width - 1) > self.target.capacity:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + {max_new_tokens} new ones exceed the context of"
                f" {self.target.capacity}. Shorten the prompt or lower max_new_tokens."
            )
        return self.drafter  # type: ignore[return-value]
