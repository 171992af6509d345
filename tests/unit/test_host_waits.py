"""On a device the host must not wait for each drafted token: what would halt it is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine
from models.decoding.sampling import Sampling
from tests.tiny import VOCAB_SIZE, tiny_model

# values that the host reads, and tensors that it makes of numbers and would send
HALTING = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::lift_fresh", "aten::nonzero")


class Halts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num += func.name().startswith(HALTING)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_of_a_chain_waits_for_the_host(temperature: float) -> None:
    engine = Engine(tiny_model(), num_rows=2, capacity=64, compiled=False)
    drafter = ModelDrafter(engine, vocab_size=VOCAB_SIZE)
    uniform = torch.rand(2, 8, generator=torch.Generator().manual_seed(0))
    texts = [[5, 6, 7], [8, 9]]

    def halts(gamma: int) -> int:
        drafter.reset(2)
        drafter.start(texts, (0, 1))
        with Halts() as counted:
            drafter.draft(texts, [gamma, gamma], Sampling(temperature), uniform)
        return counted.num

    assert 0 < halts(1) == halts(8)
