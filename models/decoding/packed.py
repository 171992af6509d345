"""Weights of bfloat16 linear layers in the order that oneDNN computes in, on a CPU.

torch's own product puts them into that order at every call, which for a few tokens takes as long as
the product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_library = torch.library.Library("draftsmith", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int num_outputs) -> Tensor")


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, _num_outputs: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _shape(x: Tensor, _weight: Tensor, _bias: Tensor | None, num_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


# torch.compile takes its own operator only with weights that it knows as constants, and then every
# layer would have code of its own
_library.impl("packed_linear", _packed_linear, "MkldnnCPU")
_library.impl("packed_linear", _shape, "Meta")


class PackedLinear(nn.Linear):
    """nn.Linear whose `weight` is opaque: it has its shape and size, but no elements to index."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as nn.Linear."""
        y: Tensor = torch.ops.draftsmith.packed_linear(x, self.weight, self.bias, self.out_features)
        return y


def can_pack() -> bool:
    """Whether this processor has products of bfloat16."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@torch.no_grad()
def pack(model: nn.Module, num_tokens: int = 1) -> int:
    """Pack a model's bfloat16 linear layers on a CPU in place, for calls of about `num_tokens`;
    returns how many there were. They cannot be trained or saved afterwards.

    The weights move, so memory grows only by a head that is tied to the embeddings.
    """
    if not can_pack():
        return 0
    found = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and module.weight.dtype is torch.bfloat16
        and module.weight.device.type == "cpu"
    ]
    for module in found:
        packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), num_tokens)
        module.weight = nn.Parameter(packed, requires_grad=False)
        module.__class__ = PackedLinear
    return len(found)
