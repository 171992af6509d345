"""Weight-only int8 for drafts on a CPU: a step of few tokens costs what its weights take to read,
so half the bytes.

Output stays exactly the target's: what matters is that q is the law the draft token was really
drawn from, and it is the law of the quantised draft. Only acceptance can suffer, by what rounding a
weight to 1/127 of its row's largest does.
"""

# O outputs, I inputs

from __future__ import annotations

import torch
from torch import Tensor, nn

# torch's int8 kernel reads whole blocks of inputs: with others it reads past the end of its arrays
MULTIPLE = 64
# up to this many tokens the product reads int8 weights; beyond, they are widened once
FEW_ROWS = 16


class Int8Linear(nn.Module):
    """y = x W' + b with W stored as int8 and one scale per output: W = round(W / s), s = max|row| /
    127.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, plain: nn.Linear):
        super().__init__()
        if plain.in_features % MULTIPLE:
            raise ValueError(
                f"{plain.in_features} inputs: int8 products need a multiple of {MULTIPLE}."
            )
        scale_O = plain.weight.detach().float().abs().amax(1).clamp(min=1e-12) / 127
        weight_OI = (plain.weight.detach().float() / scale_O.unsqueeze(1)).round().to(torch.int8)
        self.register_buffer("weight", weight_OI)
        self.register_buffer("scale", scale_O.to(plain.weight.dtype))
        self.bias = plain.bias
        self.in_features, self.out_features = plain.in_features, plain.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as nn.Linear."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] <= FEW_ROWS:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            y = rows @ (self.weight.to(x.dtype) * self.scale.unsqueeze(1)).T
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def quantize(model: nn.Module) -> int:
    """Replace a bfloat16 model's linear layers in place, on a CPU; returns the bytes that saved.

    Layers whose inputs are no multiple of 64 stay as they are, and so do embeddings: a step looks
    up one row of them.
    """
    saved = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear) or child.in_features % MULTIPLE:
                continue
            if child.weight.dtype is torch.bfloat16:
                setattr(module, name, Int8Linear(child))
                saved += child.weight.numel()
    return saved
