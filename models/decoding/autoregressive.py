"""Batched autoregressive generation that keeps the target's distributions, with continuous
batching.
"""

# B rows, V vocabulary, K recorded ids, D hidden dimension, N generated tokens and M laws of
# one answer, U places with logits

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from models.decoding.engine import PREFILL_TOKENS, Engine
from models.decoding.kernels import largest
from models.decoding.sampling import check_finite, draw_mixed

PATIENCE = 32  # a share of 1 / so many of the rows may be empty while requests wait


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
    record_prompt: bool = False  # also the laws of its own tokens, but for a beginning all share


@dataclass
class Answer:
    """Generated ids and the target's laws of the last M tokens of prompt and answer, all generated
    ones among them: un-renormalised top-k log-probabilities at temperature 1.
    """

    index: int
    prompt: list[int]
    temperature: float
    tokens: list[int]
    log_probabilities_MK: Tensor
    ids_MK: Tensor
    hidden_ND: Tensor | None  # what the head read before generated ones, where asked for


@dataclass
class Stopwatch:
    """Seconds spent in `with` blocks; what a device has yet to do when one ends is not seen."""

    seconds: float = 0.0
    _start: float = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._start


@dataclass
class _Row:
    request: Request
    uniforms: list[float]
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[Tensor] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """All but the last token: that one is fed next."""
        return len(self.request.prompt) + len(self.tokens) - 1


class Generator:
    """Answers requests, `engine.cache.num_rows` at a time; finished rows are replaced.

    `recording` counts what finding and keeping the laws takes, of prompts and answers.
    """

    def __init__(
        self, engine: Engine, *, stop_ids: frozenset[int], max_new_tokens: int, top_k: int
    ):
        self.engine, self.stop_ids = engine, stop_ids
        self.max_new_tokens, self.top_k = max_new_tokens, top_k
        self.recording = Stopwatch()
        engine.keep_features()

    def close(self) -> None:
        """No longer listen to the model."""
        self.engine.drop_features()

    @torch.inference_mode()
    def answer(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """Yield answers as they end. Raises FloatingPointError when the target's logits are NaN."""
        waiting = _Waiting(requests)
        self.engine.reset(self.engine.num_rows)  # the last answers of a call leave only their own
        rows: list[_Row | None] = [None] * self.engine.num_rows
        while True:
            free = [slot for slot, row in enumerate(rows) if row is None]
            # one prompt alone costs twice what it costs among several: a few places stay empty for
            # a few steps until there is room for these
            if waiting.more and len(free) >= max(1, len(rows) // PATIENCE):
                for slot, row in zip(free, self._prefill(waiting, free), strict=False):
                    if self._ended(row):
                        yield _answer(row)
                    else:
                        rows[slot] = row
                continue
            if len(free) == len(rows):
                return
            if len(free) * 2 >= len(rows):  # nothing is waiting: the last answers are under way
                kept = [slot for slot, row in enumerate(rows) if row is not None]
                self.engine.cache.keep(kept)
                rows = [rows[slot] for slot in kept]
            self._step(rows)
            for slot, running in enumerate(rows):
                if running is not None and self._ended(running):
                    yield _answer(running)
                    rows[slot] = None

    def _prefill(self, waiting: _Waiting, free: list[int]) -> list[_Row]:
        """Start as many waiting requests as one call should take, in the first free places."""
        requests = waiting.take(len(free), PREFILL_TOKENS)
        if not requests:
            return []
        rows = [_Row(request, request.uniforms.tolist()) for request in requests]
        logits_BUV, own_B = self.engine.prefill_together(
            [request.prompt for request in requests],
            free[: len(requests)],
            ends_only=not any(request.record_prompt for request in requests),
        )
        for place, row in enumerate(rows):
            if row.request.record_prompt:
                self._record_prompt(row, logits_BUV[place], int(own_B[place]))
        at = torch.arange(len(rows), device=own_B.device)
        features_BD = self.engine.features_BUD[at, own_B]
        self._advance(list(rows), logits_BUV[at, own_B], features_BD)
        return rows

    def _record_prompt(self, row: _Row, logits_UV: Tensor, end: int) -> None:
        """Laws of a prompt's own tokens, which the call that read it computed anyway."""
        with self.recording:
            log_p_UK, ids_UK = largest(logits_UV[:end], self.top_k, is_law=True)
            check_finite(log_p_UK, "target")
            row.log_probabilities.extend(log_p_UK.cpu())
            row.ids.extend(ids_UK.int().cpu())

    def _step(self, rows: list[_Row | None]) -> None:
        """One more token for every row."""
        feed = [(row.tokens[-1], row.num_cached) if row else (0, 0) for row in rows]
        fed_B2 = torch.tensor(feed, device=self.engine.device)
        logits_B1V = self.engine.forward(
            fed_B2[:, :1], fed_B2[:, 1:], longest=max(cached for _, cached in feed) + 1
        )
        self._advance(rows, logits_B1V[:, -1], self.engine.features_BUD[:, -1])

    def _advance(self, rows: list[_Row | None], logits_BV: Tensor, features_BD: Tensor) -> None:
        """Draw one token per row and record the distribution it came from."""
        with self.recording:  # drawing makes use of them, but would not need as many
            log_p_BK, ids_BK = largest(logits_BV, self.top_k, is_law=True)
        check_finite(
            log_p_BK.unsqueeze(1), "target", [row.num_cached if row else 0 for row in rows]
        )
        laws = [
            (row.request.temperature, row.uniforms[len(row.tokens)]) if row else (0.0, 0.0)
            for row in rows
        ]
        temperature_B, uniform_B = torch.tensor(laws, device=logits_BV.device).T.contiguous()
        tokens_B = draw_mixed(logits_BV, temperature_B, uniform_B, (log_p_BK, ids_BK))
        for row, token in zip(rows, tokens_B.tolist(), strict=True):
            if row is not None:
                row.tokens.append(token)
        with self.recording:
            self._record(rows, log_p_BK, ids_BK, features_BD)

    def _record(
        self, rows: list[_Row | None], log_p_BK: Tensor, ids_BK: Tensor, features_BD: Tensor
    ) -> None:
        log_p_BK, ids_BK = log_p_BK.cpu(), ids_BK.int().cpu()
        for slot, row in enumerate(rows):
            if row is None:
                continue
            row.log_probabilities.append(log_p_BK[slot])
            row.ids.append(ids_BK[slot])
            if row.request.keep_hidden:
                row.hidden.append(features_BD[slot].cpu())

    def _ended(self, row: _Row) -> bool:
        return row.tokens[-1] in self.stop_ids or len(row.tokens) >= self.max_new_tokens


class _Waiting:
    """Requests not yet begun."""

    def __init__(self, requests: Iterable[Request]):
        self._requests = iter(requests)
        self._next = next(self._requests, None)

    @property
    def more(self) -> bool:
        return self._next is not None

    def take(self, most: int, num_tokens: int) -> list[Request]:
        """The next requests, at most so many and, padded, so many tokens; at least one."""
        taken: list[Request] = []
        longest = 0
        while self._next is not None and len(taken) < most:
            longest = max(longest, len(self._next.prompt))
            if taken and longest * (len(taken) + 1) > num_tokens:
                break
            taken.append(self._next)
            self._next = next(self._requests, None)
        return taken


def _answer(row: _Row) -> Answer:
    return Answer(
        index=row.request.index,
        prompt=row.request.prompt,
        temperature=row.request.temperature,
        tokens=row.tokens,
        log_probabilities_MK=torch.stack(row.log_probabilities),
        ids_MK=torch.stack(row.ids),
        hidden_ND=torch.stack(row.hidden) if row.hidden else None,
    )
