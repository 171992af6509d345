"""Runs a transformers causal language model over a ragged static cache, with compiled layers where
that pays.

Only one decoder layer is compiled, not the model: its code does not depend on the layer's number or
weights, so the result serves every layer, and compiling takes seconds.
"""

# B rows, T new positions, V vocabulary, S readable cache

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from models.decoding.cache import RaggedCache
from models.decoding.compiled import Compiled, has_compiler
from models.decoding.kernels import has_kernels
from models.decoding.native import NativeSteps
from models.decoding.routing import FEW_QUERIES, cache_argument, decoder_layers, route
from models.decoding.tree import Branches

PREFILL_TOKENS = 512  # of prompts that are read in one call
# layers up to which compiling the whole model takes no longer than a few single layers do
SHALLOW = 8


class Engine:
    """A model, a ragged cache of `num_rows` rows of `capacity` tokens, and the one call that
    advances them. The model must not be changed afterwards: compiled steps no longer check it.
    """

    def __init__(self, model: PreTrainedModel, *, num_rows: int, capacity: int, compiled: bool):
        route(model)
        self.model = model.eval()
        self.device = model.device
        # code compiled for its tensors is for tensors of this mode, in which all calls run
        with torch.inference_mode():
            self.cache = RaggedCache(model.config, num_rows, capacity, model.dtype, model.device)
        # what the head read for the last call's logits, once `keep_features` was asked
        self.features_BUD = torch.empty(0)
        self._listener: RemovableHandle | None = None
        self._native = None
        if model.device.type == "cpu":
            has_kernels()  # before the first step, which may be compiled
            self._native = NativeSteps.of(model, capacity)
        self.compiled = compiled and (model.device.type != "cpu" or has_compiler())
        # a shallow model is compiled whole: what surrounds its few layers would cost as much as
        # they do
        self._is_shallow = len(decoder_layers(model)) <= SHALLOW
        self._code = Compiled()
        self.capacity, self.num_rows = capacity, num_rows
        self._shared: list[int] = []
        self._slots_S = torch.arange(capacity, device=model.device)
        self._cache_key = cache_argument(model)

    @torch.inference_mode()
    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        *,
        longest: int,
        rows_B: Tensor | None = None,
        fresh: bool = False,
        last_only: bool = False,
        only_T: Tensor | None = None,
        num_shared: int = 0,
        branches: Branches | None = None,
    ) -> Tensor:
        """Logits (BTV, in the model's dtype) after each of the given tokens.

        Args:
            tokens_BT: ids to feed, one line per row.
            positions_BT: their positions; what the cache holds from there on is overwritten.
            longest: tokens in the longest row after this call (a host integer, so that nothing
                waits for a device).
            rows_B: rows of the cache that the lines belong to, only with `fresh`; all rows, in
                order, without it.
            fresh: the lines start at position 0, so they attend to themselves alone.
            last_only: only the logits of the last position, shape B1V.
            only_T: only the logits of these places among T.
            num_shared: with `fresh`, the lines start behind so many tokens of the shared beginning.
            branches: where the tokens stand and what they see, if they are not one after another.
        """
        if longest > self.capacity:
            raise ValueError(
                f"{longest} tokens do not fit a cache of {self.capacity}: shorten the prompt or"
                " raise capacity."
            )
        assert fresh or rows_B is None, "a call that reads the cache reads all of its rows"
        num_rows, width = tokens_BT.shape
        if self._native is not None and self._native.takes(tokens_BT):
            self.cache.reach(longest, may_shrink=rows_B is None)
            if num_shared and rows_B is not None:
                for layer in self.cache.ragged:
                    layer.begin_shared(rows_B)
            only_U = self._slots_S[width - 1 : width] if last_only else only_T
            logits_BUV, self.features_BUD = self._native.run(
                tokens_BT, positions_BT, branches, self.cache, rows_B, only_U
            )
            return logits_BUV
        # compiled code tells one tensor given twice from two, and a view from what is none
        slots_BT = (positions_BT if branches is None else branches.slots_BT).clone()
        positions_BT = positions_BT.clone()
        self.cache.place(rows_B, slots_BT, longest, fresh, num_shared)
        read = num_shared + width if fresh else self.cache.window
        given = {
            "input_ids": tokens_BT,
            "position_ids": positions_BT,
            "attention_mask": self._mask(positions_BT, read, branches),
            "use_cache": True,
            "logits_to_keep": int(last_only) if only_T is None else only_T,
            self._cache_key: self.cache,
        }
        # reading few tokens at once is soon over: compiling it would not pay
        is_small = fresh and (num_rows == 1 or width <= FEW_QUERIES)
        self.cache.compiled = self._code if self.compiled and not is_small else None
        if self.cache.compiled is None:
            return self.model(**given).logits
        # steps of one row are short and many; others are long beside the checks of their code
        is_step = num_rows == 1 and width <= FEW_QUERIES
        with self._code.calls(
            (is_step, fresh, width > 1, last_only),
            (width, read, tokens_BT.stride(), positions_BT.stride()) if is_step else None,
        ):
            if not self._is_shallow:
                return self.model(**given).logits
            self.cache.compiled = None
            return self._code.run(self.model.forward, **given).logits

    def keep_features(self) -> None:
        """From now on keep what the head reads in `features_BUD`, until `drop_features`."""
        head = self.model.get_output_embeddings()
        self._listener = head.register_forward_pre_hook(self._hear)

    def drop_features(self) -> None:
        """No longer listen to the model's head."""
        if self._listener is not None:
            self._listener.remove()

    def _hear(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.features_BUD = inputs[0]

    def prefill(self, tokens: Sequence[int], row: int = 0) -> Tensor:
        """Start one row afresh with a prompt; logits after its last token, shape V."""
        tokens_1T = torch.tensor([list(tokens)], device=self.device)
        positions_1T = torch.arange(len(tokens), device=self.device).unsqueeze(0)
        rows_B = torch.tensor([row], device=self.device)
        logits = self.forward(
            tokens_1T, positions_1T, longest=len(tokens), rows_B=rows_B, fresh=True, last_only=True
        )
        return logits[0, -1]

    def prefill_together(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int], *, ends_only: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Start rows afresh in one call, padded to the longest prompt: logits BUV at the U distinct
        places where a prompt ends, or at all places it was read at, and where in U each row's own
        end is, shape B.

        Padding lands behind the end of a row, where nothing looks until it is overwritten. The
        shared beginning is not read again by prompts that all have it.
        """
        num_shared = len(self._shared)
        if not all(
            len(prompt) > num_shared and list(prompt[:num_shared]) == self._shared
            for prompt in prompts
        ):
            num_shared = 0
        longest = max(map(len, prompts))
        padded = [[*prompt[num_shared:], *[0] * (longest - len(prompt))] for prompt in prompts]
        tokens_BT = torch.tensor(padded, device=self.device)
        ends = [len(prompt) - 1 - num_shared for prompt in prompts]
        own_B = torch.tensor(ends, device=self.device)
        only_U = None
        if ends_only:
            only_U, own_B = own_B.unique(return_inverse=True)
        logits_BUV = self.forward(
            tokens_BT,
            torch.arange(num_shared, longest, device=self.device).expand_as(tokens_BT),
            longest=longest,
            rows_B=torch.tensor(rows, device=self.device),
            fresh=True,
            only_T=only_U,
            num_shared=num_shared,
        )
        return logits_BUV, own_B

    def reset(self, num_rows: int) -> None:
        """Have that many rows, without content."""
        if num_rows != self.cache.num_rows:
            self.cache.resize_rows(num_rows)

    def start(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Start rows afresh with texts, several in a call; an empty one needs none."""
        waiting = [(text, row) for text, row in zip(texts, rows, strict=True) if text]
        while waiting:
            longest = len(waiting[0][0])
            taken = 1
            while taken < len(waiting):
                longest = max(longest, len(waiting[taken][0]))
                if longest * (taken + 1) > PREFILL_TOKENS:
                    break
                taken += 1
            self.prefill_together(*zip(*waiting[:taken], strict=True))
            del waiting[:taken]

    def share(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read what all prompts begin with, a system prompt mostly, once and for all. Takes row 0;
        every prompt keeps a token of its own.
        """
        self._shared = shared_beginning(prompts)
        if self._shared:
            self.prefill(self._shared)
            for layer in self.cache.ragged:
                layer.share(len(self._shared))

    def _mask(
        self, positions_BT: Tensor, read: int, branches: Branches | None
    ) -> Tensor | dict[str, Tensor]:
        """True where a query at `positions_BT` may look, shape B1TS; one mask per layer type if the
        model mixes them.
        """
        slots_S = self._slots_S[:read]
        if branches is None:
            full = (slots_S <= positions_BT.unsqueeze(-1)).unsqueeze(1)
        else:
            full = branches.mask(read)
        span = getattr(self.model.config, "sliding_window", None)
        kinds = set(getattr(self.model.config, "layer_types", None) or [])
        if not span or kinds == {"full_attention"}:
            return full
        if branches is None:
            sliding = full & (slots_S > positions_BT.unsqueeze(-1) - span).unsqueeze(1)
        else:
            sliding = branches.mask(read, span)
        return {"full_attention": full, "sliding_attention": sliding} if len(kinds) > 1 else sliding


def shared_beginning(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What all prompts begin with; every one keeps a token of its own."""
    shortest = min(map(len, prompts))
    return list(os.path.commonprefix([list(prompt) for prompt in prompts])[: shortest - 1])


def measure_seconds(
    run: Callable[[], object], *, device: torch.device, warmup: int = 2, repeats: int = 7
) -> list[float]:
    """Wall seconds of each repeat after warm-up, the device synchronised around every one, in
    rising order.
    """
    seconds = []
    for repeat in range(warmup + repeats):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        if repeat >= warmup:
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def synchronise(device: torch.device) -> None:
    """Wait for the device to finish what was submitted; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def narrow_head(model: PreTrainedModel, ids_H: Tensor) -> None:
    """Keep only the head rows of `ids_H`: logits then have that many columns, in that order."""
    head = model.get_output_embeddings()
    small = nn.Linear(
        head.in_features,
        len(ids_H),
        bias=head.bias is not None,
        device=head.weight.device,
        dtype=head.weight.dtype,
    )
    with torch.no_grad():
        small.weight.copy_(head.weight[ids_H])
        if head.bias is not None:
            small.bias.copy_(head.bias[ids_H])
    model.set_output_embeddings(small.requires_grad_(False))
