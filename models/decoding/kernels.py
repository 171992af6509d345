"""Kernels of our own for decoding steps on a CPU (folder cpu), and the layers that use them.

A step over a few tokens costs what its weights and its cache take to read. torch's products of such
shapes take 1.5 to 4 times as long, and longer for five tokens than for one, which is what
verification is made of; those of 32 rows, of which recording is made, take twice as long.
"""

# O outputs, I inputs

from __future__ import annotations

import hashlib
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.cpp_extension import include_paths, library_paths

from models.decoding.compiled import find_compiler
from models.load import cache_folder

SOURCES = Path(__file__).with_name("cpu")
OPTIONS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC")
# the kernels read whole vectors: what they take is a multiple of these
HEAD_MULTIPLE = INPUT_MULTIPLE = 32
INT8_MULTIPLE = 64


class FewRowsLinear(nn.Linear):
    """nn.Linear of float32 whose calls of up to 32 rows read each weight once per 8 of them.

    A row's sums do not depend on the other rows of the call. For inference only.
    """

    stored = "weight"

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as nn.Linear."""
        y: Tensor = torch.ops.draftsmith.linear(x, self.weight, None, self.bias)
        return y


class PackedLinear(nn.Linear):
    """nn.Linear of bfloat16 with the weight in the order in which a product reads it: panels of
    outputs, all pairs of inputs of one after another. On a processor that multiplies bfloat16 a
    dozen rows take as long as the weight takes to read.

    Inputs and results are float32 or bfloat16. Sums are float32 and in one order whatever the rows
    of the call. For inference only.
    """

    stored = "packed"
    packed: Tensor  # panels, I / 2, outputs of a panel, 2; outputs filled up to whole panels

    @classmethod
    def take_over(cls, plain: nn.Linear, weight_OI: Tensor) -> None:
        """Make one of a linear layer, in place, with this weight."""
        lanes = torch.ops.draftsmith.lanes()
        weight_OI = nn.functional.pad(weight_OI, (0, 0, 0, -plain.out_features % lanes))
        packed = weight_OI.view(-1, lanes, plain.in_features // 2, 2).transpose(1, 2).contiguous()
        del plain.weight
        plain.register_buffer("packed", packed, persistent=False)
        plain.__class__ = cls

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as nn.Linear has it, shape OI: a copy."""
        rows = self.packed.transpose(1, 2).reshape(-1, self.in_features)
        return rows[: self.out_features].contiguous()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight  # as anybody would load it

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as nn.Linear."""
        y: Tensor = torch.ops.draftsmith.packed_linear(x, self.packed, self.out_features, self.bias)
        return y


@torch.no_grad()
def use_kernel(model: nn.Module) -> int:
    """Have a model's linear layers on a CPU use the kernels, in place; returns how many do.

    float32 weights that are bfloat16 numbers, as those of most checkpoints are, are kept as such:
    the products are the same, and half as much is read. The model can then no longer be trained.
    """
    found = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and module.in_features % INPUT_MULTIPLE == 0
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
    ]
    if not found or not has_kernels():
        return 0
    for module in found:
        narrow = module.weight.bfloat16()
        if module.weight.dtype is torch.bfloat16 or torch.equal(narrow.float(), module.weight):
            PackedLinear.take_over(module, narrow)
        else:
            module.__class__ = FewRowsLinear
    return len(found)


def can_attend(q: Tensor, mask: Tensor) -> bool:
    """Whether the attention kernel takes these queries; known once `has_kernels` was asked."""
    return (
        _is_loaded
        and q.dtype in (torch.float32, torch.bfloat16)
        and mask.dtype is torch.bool
        and q.shape[-1] % HEAD_MULTIPLE == 0
    )


def largest(x: Tensor, num: int, *, is_law: bool = False) -> tuple[Tensor, Tensor]:
    """The `num` largest of the last dimension and their places, the first of equal ones first if it
    is one or the kernels are there; logits come as log-probabilities if `is_law`. A NaN is larger
    than any number.
    """
    if _is_loaded and x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
        found: tuple[Tensor, Tensor] = torch.ops.draftsmith.largest(x, num, is_law)
        return found
    x = x.float().log_softmax(-1) if is_law else x
    values, places = x.max(-1, keepdim=True) if num == 1 else x.topk(num, -1)
    return values, places


_is_loaded = False


@cache
def has_kernels() -> bool:
    """Whether the kernels are there: they are built once per machine, within half a minute, by a
    C++ compiler. Without one everything runs on torch's own products.
    """
    global _is_loaded
    path = _library()
    if path is not None:
        torch.ops.load_library(str(path))
        torch.library.register_fake("draftsmith::linear")(_linear_shape)
        torch.library.register_fake("draftsmith::packed_linear")(_packed_shape)
        torch.library.register_fake("draftsmith::attention")(_attention_shape)
        torch.library.register_fake("draftsmith::largest")(_largest_shape)
        _is_loaded = True
    return _is_loaded


def _linear_shape(x: Tensor, weight: Tensor, _scale: Tensor | None, _bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _packed_shape(x: Tensor, _weight: Tensor, out: int, _bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], out)


def _attention_shape(q: Tensor, _k: Tensor, _v: Tensor, _mask: Tensor, _scaling: float) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def _largest_shape(x: Tensor, num: int, _is_law: bool) -> tuple[Tensor, Tensor]:
    values = x.new_empty(*x.shape[:-1], num, dtype=torch.float32)
    return values, values.long()


def _library() -> Path | None:
    """The library, built if need be; None where that fails."""
    compiler = find_compiler()
    if compiler is None:
        return None
    texts = [path.read_text("utf-8") for path in sorted(SOURCES.iterdir())]
    made_of = [*texts, *OPTIONS, torch.__version__, compiler, _processor()]
    digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:12]
    path = cache_folder() / "kernels" / f"{digest}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _build(compiler, path)
    except (OSError, subprocess.CalledProcessError):
        return None
    return path


def _build(compiler: str, path: Path) -> None:
    sources = sorted(SOURCES.glob("*.cpp"))
    headers = [f"-I{folder}" for folder in include_paths()]
    libraries = [*(f"-L{folder}" for folder in library_paths()), "-ltorch_cpu", "-lc10"]

    def run(*arguments: str) -> None:
        subprocess.run([compiler, *OPTIONS, *arguments], check=True, capture_output=True)

    with tempfile.TemporaryDirectory(dir=path.parent) as place, ThreadPoolExecutor() as pool:
        objects = [str(Path(place, f"{source.stem}.o")) for source in sources]
        list(
            pool.map(
                lambda source, built: run(*headers, "-c", str(source), "-o", built),
                sources,
                objects,
            )
        )
        library = Path(place, path.name)
        run("-shared", *objects, "-o", str(library), *libraries)
        library.replace(path)  # whole, however many processes build it


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by several machines."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    known = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return "\n".join(known[:2]) or f"{platform.machine()} {platform.processor()}"
