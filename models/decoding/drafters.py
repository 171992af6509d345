"""Who drafts. Each drafter gives tokens and the laws they were really drawn from."""

# G drafted positions (gamma), H ids the draft proposes, V vocabulary of the target

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.decoding.engine import FEW_QUERIES, Engine
from models.decoding.sampling import Sampling, draw, law, likeliest, penalise


class Proposal(NamedTuple):
    """Drafted ids (1G), the laws they were drawn from (1GV; None: one-hot, nothing was drawn), and
    the draft model's steps behind them.
    """

    ids_1G: Tensor
    laws_1GV: Tensor | None
    num_steps: int


class ModelDrafter:
    """An independent draft model with a cache of its own.

    With `hot_ids` the draft's head has been narrowed to those ids (FR-Spec, 2502.14856): q is zero
    elsewhere, so the output law stays the target's and the head costs len(hot_ids) / V of its time.

    A draft ends early once the product of its tokens' probabilities at temperature 1 is below
    `stop_below`: what comes after a doubtful token is rarely reached. The doubtful token itself is
    verified like the others, so the output law does not change. 0 always drafts gamma tokens, and
    then no token waits for its probability to reach the host.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        vocab_size: int,
        hot_ids: Tensor | None = None,
        stop_below: float = 0.0,
    ):
        self.engine, self.vocab_size, self.hot_ids = engine, vocab_size, hot_ids
        self.stop_below = stop_below
        self._cached = self._num_prompt = 0
        self._nothing = torch.empty(1, 0, dtype=torch.long, device=engine.device)

    def start(self, prompt: Sequence[int]) -> None:
        """Read the prompt, but for its last token."""
        if len(prompt) > 1:
            self.engine.prefill(list(prompt[:-1]))
        self._num_prompt = len(prompt)
        self._cached = len(prompt) - 1

    def settle(self, tokens: Sequence[int]) -> None:
        """Take back what was drafted and not accepted: the text after a round shows how much that
        is.

        Must see the text after every round in which the model drafted; `draft` looks by itself.
        """
        # a round ends with a token of the target's own, which no draft has cached
        self._cached = min(self._cached, len(tokens) - 1)

    def draft(
        self, tokens: Sequence[int], gamma: int, sampling: Sampling, uniform_G: Tensor
    ) -> Proposal:
        """At most `gamma` tokens after `tokens`, one uniform each."""
        device = self.engine.device
        self.settle(tokens)
        while len(tokens) - self._cached > FEW_QUERIES:  # more would need code of its own
            self._read(tokens, self._cached + FEW_QUERIES)
        feed = torch.tensor([list(tokens[self._cached :])], device=device)
        ids: list[Tensor] = []
        laws: list[Tensor] = []
        length = len(tokens)
        confidence = 1.0
        for step in range(gamma):
            positions = torch.arange(length - feed.shape[1], length, device=device).unsqueeze(0)
            logits = self.engine.forward(feed, positions, longest=length, last_only=True)
            # a padded draft vocabulary is cut before the law: ids the target lacks have no mass
            if self.hot_ids is None:
                logits = logits[..., : self.vocab_size]
            if sampling.looks_back:
                logits = self._penalised(logits, sampling, tokens, ids)
            if sampling.temperature == 0:
                index = likeliest(logits, side="draft", first_position=length - 1)
            else:
                laws.append(law(logits, sampling, side="draft", first_position=length - 1))
                index = draw(laws[-1], uniform_G[step].view(1, 1))
            feed = index if self.hot_ids is None else self.hot_ids[index]
            ids.append(feed)
            length += 1
            # the last token's confidence would end nothing
            if self.stop_below and step + 1 < gamma:
                confidence *= float(logits.float().softmax(-1).gather(-1, index.unsqueeze(-1)))
                if confidence < self.stop_below:
                    break
        self._cached = length - 1
        return Proposal(
            torch.cat(ids, 1), self._spread(torch.cat(laws, 1)) if laws else None, len(ids)
        )

    def _read(self, tokens: Sequence[int], end: int) -> None:
        """Catch up with the text to `end`."""
        new = torch.tensor([list(tokens[self._cached : end])], device=self.engine.device)
        positions = torch.arange(self._cached, end, device=self.engine.device).unsqueeze(0)
        self.engine.forward(new, positions, longest=end, last_only=True)
        self._cached = end

    def _penalised(
        self, logits: Tensor, sampling: Sampling, tokens: Sequence[int], ids: list[Tensor]
    ) -> Tensor:
        """The target's penalties, for drafts that it accepts. It alone knows its stop ids."""
        return penalise(
            logits,
            sampling,
            text=tokens,
            num_prompt=self._num_prompt,
            drafted_1G=torch.cat(ids, 1) if ids else self._nothing,
            vocab_size=self.vocab_size,
            ids_V=self.hot_ids,
        )

    def _spread(self, q_1GH: Tensor) -> Tensor:
        """Laws over the hot ids as laws over the target's vocabulary."""
        if self.hot_ids is None:
            return torch.nn.functional.pad(q_1GH, (0, self.vocab_size - q_1GH.shape[-1]))
        q = q_1GH.new_zeros(*q_1GH.shape[:-1], self.vocab_size)
        return q.index_copy_(-1, self.hot_ids, q_1GH)


class LookupDrafter:
    """Prompt lookup: what followed the latest earlier occurrence of the text's last tokens.

    The longest match of `longest` down to `shortest` tokens counts. Drafts are certain, so q is
    one-hot and a draft x is accepted with probability p(x) at any sampling law. Costs no model
    step. (Prompt lookup decoding, apoorvumang/prompt-lookup-decoding.)
    """

    def __init__(self, *, device: torch.device, shortest: int = 2, longest: int = 8):
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"shortest={shortest}, longest={longest}: use 1 <= shortest <= longest."
            )
        self.device = device
        self.lengths = range(longest, shortest - 1, -1)
        self._read = 0
        # where the text went on after its latest such tokens
        self._after: dict[tuple[int, ...], int] = {}

    def start(self, prompt: Sequence[int]) -> None:
        """Forget the last text."""
        del prompt  # it is read with the first draft
        self._read = 0
        self._after.clear()

    def draft(
        self, tokens: Sequence[int], gamma: int, sampling: Sampling, uniform_G: Tensor
    ) -> Proposal:
        """Up to `gamma` tokens; none where nothing matches."""
        del sampling, uniform_G  # nothing is drawn
        ids = self._follow(tokens, gamma)
        return Proposal(torch.tensor([ids], dtype=torch.long, device=self.device), None, 0)

    def _follow(self, tokens: Sequence[int], gamma: int) -> list[int]:
        for end in range(self._read, len(tokens)):  # `end` goes on after the tokens before it
            for length in self.lengths:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._read = len(tokens)
        for length in self.lengths:
            place = self._after.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if place is not None:
                # past its end the text goes on as the draft does: a loop is drafted as a loop
                period = tokens[place:]
                return [period[i % len(period)] for i in range(gamma)]
        return []


class CombinedDrafter:
    """Lookup where the text repeats itself, the model elsewhere.

    A lookup costs nothing and may draft as many tokens as it is asked for; the model, whose steps
    cost time and whose guesses are less certain, drafts at most `model_gamma`.
    """

    def __init__(self, model: ModelDrafter, lookup: LookupDrafter, *, model_gamma: int):
        if model_gamma < 1:
            raise ValueError(f"model_gamma={model_gamma}: use 1 or more.")
        self.model, self.lookup, self.model_gamma = model, lookup, model_gamma

    def start(self, prompt: Sequence[int]) -> None:
        """Both read the prompt."""
        self.model.start(prompt)
        self.lookup.start(prompt)

    def draft(
        self, tokens: Sequence[int], gamma: int, sampling: Sampling, uniform_G: Tensor
    ) -> Proposal:
        """Up to `gamma` tokens."""
        self.model.settle(tokens)
        found = self.lookup.draft(tokens, gamma, sampling, uniform_G)
        if found.ids_1G.shape[1]:
            return found
        return self.model.draft(tokens, min(gamma, self.model_gamma), sampling, uniform_G)
