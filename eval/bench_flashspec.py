"""The pair in flashspec, a packaged decoder for transformers models: an optional peer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

MISSING = "flashspec is not installed, so nothing is compared with it: pip install -e '.[peers]'"


def is_installed() -> bool:
    """Whether there is something to compare with."""
    return importlib.util.find_spec("flashspec") is not None


def greedy_decoder(
    target: PreTrainedModel, draft: PreTrainedModel, folder: Path, stop_ids: frozenset[int]
) -> Callable[[Sequence[int], int], int]:
    """A function of a prompt and a length that decodes greedily, by flashspec's own default
    strategy (prompt lookup, else two drafted tokens), and returns the number of tokens.
    """
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    device, dtype = target.device, target.dtype
    engine = SpeculativeEngine(
        FlashSpecConfig(device=str(device), sampling=SamplingConfig(temperature=0.0)),
        [HuggingFaceDrafter(str(folder), device, dtype, model=draft)],
        TargetModel(str(folder), device, dtype, model=target),
    )

    def decode(prompt: Sequence[int], max_new_tokens: int) -> int:
        ids = torch.tensor([list(prompt)], device=device)
        found = engine.generate(ids, max_new_tokens=max_new_tokens, eos_token_ids=sorted(stop_ids))
        return int(found.n_tokens_generated)

    return decode
