"""Low-rank adapters (LoRA, 2106.09685) on the linear layers of a draft's body, by peft.

A layer then computes W x + 2 B A x with W frozen; only A and B, of `rank` rows and columns, and the
draft's map are trained. On export W + 2 B A takes the place of W, so a draft looks the same however
it was trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SCALE = 2  # of the adapters' product
LINEAR = (nn.Linear, Conv1D)  # experts that are one stacked parameter stay as they are


def adapt(body: nn.Module, rank: int, seed: int) -> None:
    """Freeze a body and give its linear layers adapters, in place. They change nothing until they
    are trained: B starts at zero.
    """
    # most drafts are trained without, and need not wait for it and hold it
    from peft import LoraConfig, inject_adapter_in_model

    body.requires_grad_(False)
    config = LoraConfig(
        r=rank,
        lora_alpha=SCALE * rank,
        target_modules=[
            name for name, module in body.named_modules() if isinstance(module, LINEAR)
        ],
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in body.modules()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, body)


@torch.no_grad()
def merged(body: nn.Module) -> dict[str, Tensor]:
    """The weights of a body by the names it has without adapters, what these learned added."""
    weights = {}
    adapted: dict[str, Any] = {
        name: module for name, module in body.named_modules() if hasattr(module, "get_delta_weight")
    }
    for name, weight in body.state_dict().items():
        owner = next((each for each in adapted if name.startswith(f"{each}.")), None)
        if owner is None:
            weights[name] = weight
        elif name.startswith(f"{owner}.base_layer."):
            key = name.removeprefix(f"{owner}.base_layer.")
            if key == "weight":
                weight = weight + adapted[owner].get_delta_weight("default").to(weight)
            weights[f"{owner}.{key}"] = weight
    return weights
