"""Weight-only int8 for drafts on a CPU: a step of few tokens costs what its weights take to read,
so a half or a quarter of the bytes.

Output stays exactly the target's: what matters is that q is the law the draft token was really
drawn from, and it is the law of the quantised draft. Only acceptance can suffer, by what rounding a
weight to 1/127 of its row's largest does.
"""

# O outputs, I inputs

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.decoding.kernels import INT8_MULTIPLE, has_kernels


class Int8Linear(nn.Module):
    """y = x W' + b with W stored as int8 and one scale per output: W = round(W / s), s = max|row| /
    127.
    """

    stored = "weight"
    weight: Tensor
    scale: Tensor

    def __init__(self, plain: nn.Linear):
        super().__init__()
        weight_OI = plain.weight.detach().float()
        scale_O = weight_OI.abs().amax(1).clamp(min=1e-12) / 127
        self.register_buffer("weight", (weight_OI / scale_O.unsqueeze(1)).round().to(torch.int8))
        self.register_buffer("scale", scale_O)
        self.bias = plain.bias
        self.in_features, self.out_features = plain.in_features, plain.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as nn.Linear."""
        y: Tensor = torch.ops.draftsmith.linear(x, self.weight, self.scale, self.bias)
        return y


def quantize(model: nn.Module) -> int:
    """Replace a model's linear layers in place, on a CPU that has the kernels; returns the bytes
    that saved. Embeddings stay as they are: a step looks up one row of them. So do layers whose
    inputs are no multiple of 64, which the kernel would have to widen at every call.
    """
    saved = 0
    if not has_kernels():
        return saved
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.in_features % INT8_MULTIPLE == 0:
                setattr(module, name, Int8Linear(child))
                saved += child.weight.numel() * (child.weight.dtype.itemsize - 1)
    return saved
