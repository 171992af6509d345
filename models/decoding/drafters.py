"""Who drafts. Each drafter gives tokens and the laws they were really drawn from."""

# G drafted positions (gamma), H ids the draft proposes, V vocabulary of the target

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.decoding.engine import Engine
from models.decoding.sampling import Sampling, draw, law


class ModelDrafter:
    """An independent draft model with a cache of its own.

    With `hot_ids` the draft's head has been narrowed to those ids (FR-Spec, 2502.14856): q is zero
    elsewhere, so the output law stays the target's and the head costs len(hot_ids) / V of its time.
    """

    def __init__(self, engine: Engine, *, vocab_size: int, hot_ids: Tensor | None = None):
        self.engine, self.vocab_size, self.hot_ids = engine, vocab_size, hot_ids
        self._cached = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Read the prompt, but for its last token."""
        if len(prompt) > 1:
            self.engine.prefill(list(prompt[:-1]))
        self._cached = len(prompt) - 1

    def draft(
        self, tokens: Sequence[int], gamma: int, sampling: Sampling, uniform_G: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`gamma` tokens after `tokens`, one uniform each: ids 1G and laws 1GV."""
        device = self.engine.device
        # all but the tokens committed since the last call are cached; entries of rejected tokens
        # are overwritten
        known = min(self._cached, len(tokens) - 1)
        feed = torch.tensor([list(tokens[known:])], device=device)
        ids: list[Tensor] = []
        laws: list[Tensor] = []
        length = len(tokens)
        for step in range(gamma):
            positions = torch.arange(length - feed.shape[1], length, device=device).unsqueeze(0)
            logits = self.engine.forward(feed, positions, longest=length, last_only=True)
            # a padded draft vocabulary is cut before the law: ids the target lacks have no mass
            if self.hot_ids is None:
                logits = logits[..., : self.vocab_size]
            q = law(logits, sampling, side="draft", first_position=length - 1)
            index = draw(q, uniform_G[step].view(1, 1))
            feed = index if self.hot_ids is None else self.hot_ids[index]
            ids.append(feed)
            laws.append(q)
            length += 1
        self._cached = length - 1
        return torch.cat(ids, 1), self._spread(torch.cat(laws, 1))

    def _spread(self, q_1GH: Tensor) -> Tensor:
        """Laws over the hot ids as laws over the target's vocabulary."""
        if self.hot_ids is None:
            return torch.nn.functional.pad(q_1GH, (0, self.vocab_size - q_1GH.shape[-1]))
        q = q_1GH.new_zeros(*q_1GH.shape[:-1], self.vocab_size)
        return q.index_copy_(-1, self.hot_ids, q_1GH)
