"""The speculative decoder: draft a few tokens, verify them in one target call, keep what the law
allows.

With gamma = 0 the same loop is plain autoregressive decoding: the baseline of every speedup is this
very code.
"""

# G drafted positions (gamma), V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from models.decoding.engine import Engine
from models.decoding.sampling import Sampling, law
from models.decoding.verify import chain


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
    drafted_at: list[int] = field(default_factory=list)  # rounds that drafted position i
    tested_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    # target calls that committed i + 1 tokens
    calls_by_length: list[int] = field(default_factory=list)

    def add_round(
        self, num_drafted: int, num_tested: int, num_accepted: int, num_committed: int
    ) -> None:
        """Count one target call."""
        assert num_accepted <= num_tested <= num_drafted and 1 <= num_committed <= num_drafted + 1
        for held in (self.drafted_at, self.tested_at, self.accepted_at):
            held.extend([0] * (num_drafted - len(held)))
        self.calls_by_length.extend([0] * (num_committed - len(self.calls_by_length)))
        for held, reached in (
            (self.drafted_at, num_drafted),
            (self.tested_at, num_tested),
            (self.accepted_at, num_accepted),
        ):
            for position in range(reached):
                held[position] += 1
        self.calls_by_length[num_committed - 1] += 1
        self.num_tokens += num_committed
        self.num_target_calls += 1
        self.num_drafted += num_drafted
        self.num_tested += num_tested
        self.num_accepted += num_accepted

    def __add__(self, other: Counts) -> Counts:
        def summed(a: list[int], b: list[int]) -> list[int]:
            return [sum(pair) for pair in zip(_padded(a, len(b)), _padded(b, len(a)), strict=True)]

        return Counts(
            *(
                getattr(self, name) + getattr(other, name)
                for name in list(Counts.__dataclass_fields__)[:5]
            ),
            *(
                summed(getattr(self, name), getattr(other, name))
                for name in list(Counts.__dataclass_fields__)[5:]
            ),
        )

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


def _padded(values: list[int], length: int) -> list[int]:
    return values + [0] * (length - len(values))


class Drafter(Protocol):
    """Proposes tokens. `draft` returns their ids (1G) and the laws they were drawn from (1GV)."""

    def start(self, prompt: Sequence[int]) -> None: ...

    def draft(
        self, tokens: Sequence[int], gamma: int, sampling: Sampling, uniform_G: Tensor
    ) -> tuple[Tensor, Tensor]: ...


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

    `stop_ids` end an output and are part of it. Uniforms come from `rng`, so equal seeds give equal
    outputs.
    """

    target: Engine
    drafter: Drafter | None
    stop_ids: frozenset[int]

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
        """Yield what each target call commits, until a stop id or the length limit.

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
        while len(tokens) < end:
            # a token beyond the limit would never be committed
            width = min(gamma, end - len(tokens) - 1)
            uniform = torch.rand(2 * width + 1, generator=rng, device=rng.device).to(device)
            if width:
                drafted_1G, q = drafter.draft(tokens, width, sampling, uniform[width + 1 :])
            else:
                drafted_1G, q = (
                    torch.empty(1, 0, dtype=torch.long, device=device),
                    torch.empty(1, 0, 0, device=device),
                )
            last = torch.tensor([[tokens[-1]]], device=device)
            positions = torch.arange(len(tokens) - 1, len(tokens) + width, device=device).unsqueeze(
                0
            )
            logits = self.target.forward(
                torch.cat([last, drafted_1G], 1), positions, longest=len(tokens) + width
            )
            p = law(logits, sampling, side="target", first_position=len(tokens) - 1)
            verdict = chain(
                p, q, drafted_1G, uniform[:width].unsqueeze(0), uniform[width : width + 1]
            )
            num_accepted, *emitted = torch.cat(
                [verdict.num_accepted_B, drafted_1G[0], verdict.next_token_B]
            ).tolist()
            new = [*emitted[:num_accepted], emitted[-1]]
            stop = next((i for i, token in enumerate(new) if token in self.stop_ids), None)
            new = new if stop is None else new[: stop + 1]
            kept = min(num_accepted, len(new))
            # a rejection is a test too, unless the output ended before it
            counts.add_round(width, kept + (kept < width and len(new) > kept), kept, len(new))
            tokens += new
            yield Round(new, kept, width)
            if stop is not None:
                return

    def _check(self, prompt: Sequence[int], gamma: int, max_new_tokens: int) -> Drafter:
        if gamma < 0 or (gamma and self.drafter is None):
            raise ValueError(f"gamma={gamma}: use 0 without a draft and 1 or more with one.")
        if not prompt:
            raise ValueError(
                "prompt: it is empty; a target needs a token to start from, for example its BOS."
            )
        if len(prompt) + max_new_tokens > self.target.capacity:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + {max_new_tokens} new ones exceed the context of"
                f" {self.target.capacity}. Shorten the prompt or lower max_new_tokens."
            )
        return self.drafter  # type: ignore[return-value]
