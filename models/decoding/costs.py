"""What steps cost: a draft made cheap for our decoder, and how long its steps and the target's
take.
"""

# H ids the draft proposes

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf.groups import RuntimeConfig
from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine, measure_seconds, narrow_head
from models.decoding.kernels import use_kernel
from models.decoding.quantized import quantize
from models.decoding.sampling import Sampling
from models.draft import from_layers

CONTEXT = 128  # tokens in the cache while a step is timed
ROOM = 64  # for those of a step


def make_cheap(draft: PreTrainedModel, hot_ids_H: Tensor | None, *, int8: bool) -> None:
    """What our decoder does to a draft, in place: a head of the proposed ids, on a CPU int8 weights
    and the kernel for few rows.
    """
    if hot_ids_H is not None:
        narrow_head(draft, hot_ids_H)
    if int8 and draft.device.type == "cpu":
        quantize(draft)
    use_kernel(draft)


def step_seconds(
    target: Engine,
    drafters: Sequence[ModelDrafter],
    longest: int,
    sampling: Sampling,
    repeats: int = 15,
) -> tuple[list[float], list[float]]:
    """Seconds of a target call over 1, 2, ... `longest` + 1 tokens, and of a step of each draft, at
    a context of 128 tokens: medians of interleaved repeats.

    A draft step is everything a drafted token costs: forward, law and draw.
    """
    context = [int(token) for token in torch.arange(CONTEXT) % 97 + 3]
    target.prefill(context[:-1])
    uniform = torch.full((1, 1), 0.5, device=target.device)
    runs = [_target_step(target, width) for width in range(1, longest + 2)]
    for drafter in drafters:
        drafter.start([context])
        runs.append(partial(drafter.draft, [context], [1], sampling, uniform))
    seconds: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats):
        for run, spent in zip(runs, seconds, strict=True):
            spent += measure_seconds(
                run, device=target.device, warmup=0 if repeat else 3, repeats=1
            )
    found = [median(spent) for spent in seconds]
    return found[: longest + 1], found[longest + 1 :]


def seconds_by_depth(
    target: PreTrainedModel,
    deepest: PreTrainedModel,
    hot_ids_H: Tensor | None,
    longest: int,
    runtime: RuntimeConfig,
) -> tuple[list[float], list[float]]:
    """`step_seconds` of greedy decoding by the target, which is changed, and by drafts of the first
    1, 2, ... layers of the `deepest`, all as our decoder runs them.
    """
    engine = partial(Engine, num_rows=1, capacity=CONTEXT + ROOM, compiled=runtime.compile)
    hot_ids_H = None if hot_ids_H is None else hot_ids_H.to(target.device)
    drafters = []
    for num_layers in range(1, deepest.config.num_hidden_layers + 1):
        draft = from_layers(deepest, range(num_layers))
        # the wrapped method has a signature that type checkers misread
        nn.Module.to(draft, device=target.device, dtype=target.dtype)
        make_cheap(draft, hot_ids_H, int8=runtime.int8_draft)
        vocab_size = target.config.vocab_size
        drafters.append(ModelDrafter(engine(draft), vocab_size=vocab_size, hot_ids=hot_ids_H))
    use_kernel(target)
    return step_seconds(engine(target), drafters, longest, Sampling(0.0))


def _target_step(target: Engine, width: int) -> Callable[[], object]:
    tokens = torch.full((1, width), 5, device=target.device)
    positions = torch.arange(CONTEXT, CONTEXT + width, device=target.device).unsqueeze(0)
    return lambda: target.forward(tokens, positions, longest=CONTEXT + width)
