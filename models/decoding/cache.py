"""A static key-value cache whose rows have their own lengths, in the form transformers models
accept.
"""

# B rows, K key-value heads, S capacity, T new positions, D head dimension

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from models.decoding.compiled import Compiled, mark_varying

WINDOW_STEP = 64  # the storage follows the longest row, rounded up to this


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, shape BKSD. New entries are written at each row's own
    places: a token's position, but for candidates of a tree.

    A row's past is what the attention mask admits, so taking tokens back needs no copy: later
    writes overwrite them. The storage is exactly as long as attention reads: a batched product over
    a slice of something longer would first copy it, at every step.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False
    keys: Tensor
    values: Tensor
    # of a beginning that all texts have, shape 1KSD
    shared_keys: Tensor
    shared_values: Tensor

    def __init__(
        self, cache: RaggedCache, num_rows: int, num_heads: int, window: int, head_dim: int
    ):
        super().__init__()
        shape = (num_rows, num_heads, window, head_dim)
        self.keys = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        self.values = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        mark_varying([(self.keys, self.values)])
        self.where = cache.where
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage is allocated in the constructor."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new entries (BKTD) and return what attention may read."""
        where = self.where
        self.keys[where.rows_B1, :, where.slots_BT] = key_states.transpose(1, 2)
        self.values[where.rows_B1, :, where.slots_BT] = value_states.transpose(1, 2)
        if not where.fresh:
            return self.keys, self.values
        if not where.num_shared:  # a prefill from position 0 attends to nothing but itself
            return key_states, value_states
        self.begin_shared(where.rows_B1[:, 0])
        size = (len(where.rows_B1), -1, -1, -1)
        return (
            torch.cat([self.shared_keys.expand(size), key_states], 2),
            torch.cat([self.shared_values.expand(size), value_states], 2),
        )

    def share(self, num_tokens: int) -> None:
        """Remember the beginning of row 0."""
        self.shared_keys = self.keys[:1, :, :num_tokens].clone()
        self.shared_values = self.values[:1, :, :num_tokens].clone()

    def begin_shared(self, rows_B: Tensor) -> None:
        """Have rows begin with what was shared."""
        num_shared = self.shared_keys.shape[2]
        self.keys[rows_B, :, :num_shared] = self.shared_keys
        self.values[rows_B, :, :num_shared] = self.shared_values

    def resize(self, window: int) -> None:
        """Make the storage `window` tokens long, keeping what fits."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], window, old.shape[3])
            kept = min(window, old.shape[2])
            new[:, :, :kept] = old[:, :, :kept]
            setattr(self, name, new)
        mark_varying([(self.keys, self.values)])

    def resize_rows(self, num_rows: int) -> None:
        """Have that many rows, without content."""
        shape = (num_rows, *self.keys.shape[1:])
        self.keys, self.values = self.keys.new_zeros(shape), self.values.new_zeros(shape)
        mark_varying([(self.keys, self.values)])

    def keep(self, rows_B: Tensor) -> None:
        """Drop all other rows."""
        self.keys, self.values = self.keys[rows_B], self.values[rows_B]
        mark_varying([(self.keys, self.values)])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention reads; the engine passes finished masks, so this is
        informative.
        """
        return (query_length if self.where.fresh else self.keys.shape[2]), 0

    def get_seq_length(self) -> int:
        """Always 0: positions are given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Tokens a row can hold before the storage grows."""
        return self.keys.shape[2]


class Where:
    """Rows of the current call and places in them, whether it starts rows afresh, and behind how
    many shared tokens.
    """

    def __init__(self, rows_B1: Tensor):
        self.rows_B1 = rows_B1
        self.slots_BT = torch.zeros_like(rows_B1)
        self.fresh = False
        self.num_shared = 0


class RaggedCache(Cache):
    """Keys and values of all layers for `num_rows` rows of at most `capacity` tokens."""

    def __init__(
        self,
        config: PretrainedConfig,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.dtype, self.device, self.capacity, self.num_rows = dtype, device, capacity, num_rows
        self.compiled: Compiled | None = None  # runs the layers; None: they run as they are
        self.all_rows_B1 = torch.arange(num_rows, device=device).unsqueeze(1)
        self.where = Where(self.all_rows_B1)
        # a device keeps one shape for good, so that recorded kernels stay valid; a CPU pays for
        # what it reads
        self.window = min(WINDOW_STEP, capacity) if device.type == "cpu" else capacity
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.ragged = [
            RaggedLayer(self, num_rows, heads, self.window, head_dim)
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(layers=list(self.ragged))
        self.views = [LayerView(layer) for layer in self.ragged]

    def place(
        self,
        rows_B: Tensor | None,
        slots_BT: Tensor,
        longest: int,
        fresh: bool,
        num_shared: int = 0,
    ) -> None:
        """Announce the next call: which rows and places of them it writes, and how far it reads
        (`longest` tokens).
        """
        where = self.where
        where.rows_B1 = self.all_rows_B1 if rows_B is None else rows_B.unsqueeze(1)
        where.slots_BT = slots_BT
        mark_varying([where.rows_B1, slots_BT])
        where.fresh, where.num_shared = fresh, num_shared
        self.reach(longest, may_shrink=rows_B is None)

    def reach(self, longest: int, *, may_shrink: bool) -> None:
        """Have room for `longest` tokens in a row. It is that of one row where a prompt is read, so
        only calls over all rows may give room back, and late.
        """
        needed = min(-(-longest // WINDOW_STEP) * WINDOW_STEP, self.capacity)
        if needed > self.window or (
            may_shrink and needed < self.window - WINDOW_STEP and self.device.type == "cpu"
        ):
            for layer in self.ragged:
                layer.resize(needed)
            self.window = needed

    @torch.inference_mode()
    def move(self, row: int, sources: Sequence[int], start: int) -> None:
        """Put the entries of a row's places `sources` one after another from `start` on."""
        held = [part[row] for layer in self.ragged for part in (layer.keys, layer.values)]
        # sources rise and lie at or behind their goals, so none is overwritten before it is read
        for goal, source in enumerate(sources, start):
            if goal != source:
                torch._foreach_copy_(
                    [part.select(1, goal) for part in held],
                    [part.select(1, source) for part in held],
                )

    @torch.inference_mode()
    def resize_rows(self, num_rows: int) -> None:
        """Have that many rows, without content."""
        for layer in self.ragged:
            layer.resize_rows(num_rows)
        self.num_rows = num_rows
        self.all_rows_B1 = torch.arange(num_rows, device=self.device).unsqueeze(1)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; the kept ones are renumbered in the given order."""
        for layer in self.ragged:
            layer.keep(torch.tensor(rows, device=self.device))
        self.num_rows = len(rows)
        self.all_rows_B1 = self.all_rows_B1[: len(rows)]


class LayerView(Cache):
    """One layer of a cache under the interface of a whole cache.

    Every layer gets its own view, so that the code compiled for one layer serves all: nothing in it
    depends on the layer's number.
    """

    def __init__(self, layer: RaggedLayer):
        super().__init__(layers=[layer])
        self.layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new entries of this layer, whatever number it is called by."""
        return self.layer.update(key_states, value_states)
