"""Compiled code for decoding steps, called without the checks that it fits where that is known."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

# shapes of one code: one row or many, one position or several, prefill or not
RECOMPILE_LIMIT = 64
# dimensions of places T, tokens BT, features BTD, and masks B1TS or a cache BKSD
VARYING = {0: (), 1: (0,), 2: (0, 1), 3: (0, 1), 4: (0, 2, 3)}
_numbers = count()


def find_compiler() -> str | None:
    """The C++ compiler that builds CPU code here, None without one."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


def has_compiler() -> bool:
    """Whether torch.compile can build CPU code here."""
    return find_compiler() is not None


class Compiled:
    """Compiled code of one engine, one for each kind of call.

    Before every call torch.compile checks that its code fits, which takes a tenth of a decoding
    step. A call of a kind whose code fitted calls of the same shape before can do without. So that
    nothing but layers and shapes can differ there, each kind gets a code object of its own, which
    is compiled for any size of what varies.
    """

    def __init__(self) -> None:
        self._codes: dict[tuple[Callable[..., Any], Hashable], Callable[..., Any]] = {}
        self._seen: set[Hashable] = set()
        self._kind: Hashable = None
        self._is_known = False

    @contextmanager
    def calls(self, kind: Hashable, shape: Hashable) -> Iterator[None]:
        """Inside, `self.run` runs the code of a kind: what the code depends on.

        Calls of a kind differ in `shape`; None where more than that may, and the checks are needed.
        """
        self._kind = kind
        self._is_known = shape is not None and (kind, shape) in self._seen
        if self._is_known:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                yield
        else:
            yield
            if shape is not None:
                self._seen.add((kind, shape))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run compiled `function`."""
        if not self._is_known:
            mark_varying([*args, *kwargs.values()])
        key = (function, self._kind)
        if key not in self._codes:
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT
            )
            self._codes[key] = torch.compile(_copied(function))
        return self._codes[key](*args, **kwargs)


def mark_varying(values: Iterable[Any]) -> None:
    """Have code compiled for any number of rows, new positions and past ones that tensors among
    `values` have. A dimension of size 1 stays: code for one is simpler.
    """
    for value in values:
        if isinstance(value, dict | tuple):
            mark_varying(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, Tensor):
            for dimension in VARYING[value.ndim]:
                if value.shape[dimension] > 1:
                    torch._dynamo.maybe_mark_dynamic(value, dimension)


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, to which torch ties what it compiles."""
    if isinstance(function, MethodType):
        return MethodType(_copied(function.__func__), function.__self__)
    assert isinstance(function, FunctionType)
    copied = FunctionType(
        # equal codes would be one to whoever keeps them in a dictionary
        function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
