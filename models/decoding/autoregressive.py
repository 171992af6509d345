"""Batched autoregressive generation that keeps the target's distributions, with continuous
batching.
"""

# B rows, V vocabulary, K recorded ids, D hidden dimension, N generated tokens of one answer

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.decoding.engine import Engine
from models.decoding.sampling import check_finite, draw_mixed


@dataclass(frozen=True)
class Request:
    """A prompt to answer. `uniforms` holds one number per token to draw, so an answer does not
    depend on its batch.
    """

    index: int
    prompt: list[int]
    temperature: float
    uniforms: Tensor
    keep_hidden: bool = False


@dataclass
class Answer:
    """Generated ids with the target's distribution at each: un-renormalised top-k log-probabilities
    at temperature 1.
    """

    index: int
    prompt: list[int]
    temperature: float
    tokens: list[int]
    log_probabilities_NK: Tensor
    ids_NK: Tensor
    hidden_ND: Tensor | None  # what the head read, where asked for


@dataclass
class _Row:
    request: Request
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[Tensor] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class Generator:
    """Answers requests, `engine.cache.num_rows` at a time; a finished row is replaced at once."""

    def __init__(
        self, engine: Engine, *, stop_ids: frozenset[int], max_new_tokens: int, top_k: int
    ):
        self.engine, self.stop_ids = engine, stop_ids
        self.max_new_tokens, self.top_k = max_new_tokens, top_k
        self._hidden = torch.empty(0)
        head = engine.model.get_output_embeddings()
        self._hook = head.register_forward_pre_hook(self._keep_hidden)

    def _keep_hidden(self, _module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0][:, -1]

    def close(self) -> None:
        """Remove the hook on the model."""
        self._hook.remove()

    @torch.inference_mode()
    def answer(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """Yield answers as they end. Raises FloatingPointError when the target's logits are NaN."""
        waiting = iter(requests)
        num_rows = self.engine.cache.num_rows
        rows: list[_Row | None] = [None] * num_rows
        tokens_B = torch.zeros(num_rows, dtype=torch.long)
        lengths_B = torch.zeros(num_rows, dtype=torch.long)
        temperature_B = torch.zeros(num_rows)
        uniforms_BN = torch.zeros(num_rows, self.max_new_tokens)
        more = True
        while True:
            for slot in range(num_rows):
                while rows[slot] is None and more:
                    request = next(waiting, None)
                    if request is None:
                        more = False
                        break
                    row = _Row(request)
                    logits = self.engine.prefill(request.prompt, slot).unsqueeze(0)
                    first = self._advance(
                        [row], logits, torch.tensor([request.temperature]), request.uniforms[:1]
                    )
                    if self._ended(row):
                        yield _answer(row)
                        continue
                    rows[slot] = row
                    tokens_B[slot], lengths_B[slot] = first[0], len(request.prompt)
                    temperature_B[slot], uniforms_BN[slot] = request.temperature, request.uniforms
            active = [slot for slot in range(num_rows) if rows[slot] is not None]
            if not active:
                return
            device = self.engine.device
            logits_BV = self.engine.forward(
                tokens_B.unsqueeze(1).to(device),
                lengths_B.unsqueeze(1).to(device),
                longest=int(lengths_B.max()) + 1,
            )[:, -1]
            step_B = torch.tensor([len(row.tokens) if row else 0 for row in rows])
            uniform_B = uniforms_BN.gather(1, step_B.unsqueeze(1)).squeeze(1)
            tokens_B = self._advance(rows, logits_BV, temperature_B, uniform_B).cpu()
            for slot in active:
                lengths_B[slot] += 1
                running = rows[slot]
                assert running is not None
                if self._ended(running):
                    yield _answer(running)
                    rows[slot], lengths_B[slot] = None, 0

    def _advance(
        self, rows: list[_Row | None], logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor
    ) -> Tensor:
        """Draw one token per row and record the distribution it came from."""
        logits_BV = logits_BV.float()
        top_BK = logits_BV.topk(self.top_k, -1)
        positions = [len(row.request.prompt) + len(row.tokens) - 1 if row else 0 for row in rows]
        check_finite(top_BK.values.unsqueeze(1), "target", positions)
        device = logits_BV.device
        log_z_B1 = logits_BV.logsumexp(-1, keepdim=True)
        tokens_B = draw_mixed(
            logits_BV, temperature_B.to(device), uniform_B.to(device), top_BK, log_z_B1
        )
        log_probabilities_BK = (top_BK.values - log_z_B1).half().cpu()
        ids_BK = top_BK.indices.int().cpu()
        for slot, (row, token) in enumerate(zip(rows, tokens_B.tolist(), strict=True)):
            if row is None:
                continue
            row.tokens.append(token)
            row.log_probabilities.append(log_probabilities_BK[slot])
            row.ids.append(ids_BK[slot])
            if row.request.keep_hidden:
                row.hidden.append(self._hidden[slot].cpu())
        return tokens_B

    def _ended(self, row: _Row) -> bool:
        return row.tokens[-1] in self.stop_ids or len(row.tokens) >= self.max_new_tokens


def _answer(row: _Row) -> Answer:
    return Answer(
        index=row.request.index,
        prompt=row.request.prompt,
        temperature=row.request.temperature,
        tokens=row.tokens,
        log_probabilities_NK=torch.stack(row.log_probabilities),
        ids_NK=torch.stack(row.ids),
        hidden_ND=torch.stack(row.hidden) if row.hidden else None,
    )
