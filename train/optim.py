"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from conf.choices import Optimizer
from conf.groups import OptimConfig
from train.processes import share_out_moments, whole


def looked_up(model: nn.Module) -> set[int]:
    """The `id` of every weight that is looked up and not multiplied with: tables of tokens or
    positions.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(parameter) for table in tables for parameter in table.parameters()}


class Optimizers:
    """Muon for matrices and AdamW for the rest, or AdamW for everything, under one schedule."""

    def __init__(self, model: nn.Module, config: OptimConfig):
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        tables = looked_up(model)
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for parameter in self.parameters:
            is_matrix = (
                config.name is Optimizer.muon
                and parameter.ndim == 2
                and id(parameter) not in tables
            )
            (matrices if is_matrix else rest).append(parameter)
        self.members: list[torch.optim.Optimizer] = []
        if matrices:
            self.members.append(
                torch.optim.Muon(
                    matrices,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    ns_steps=config.newton_schulz_steps,
                    adjust_lr_fn="match_rms_adamw",  # a rate then means what it does for AdamW
                )
            )
        if rest:
            rate = config.adam_lr if config.name is Optimizer.muon else config.lr
            self.members.append(
                torch.optim.AdamW(
                    rest, lr=rate, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
                )
            )
        self.base = [member.param_groups[0]["lr"] for member in self.members]
        self.clip = config.grad_clip

    def step(self, factor: float) -> float:
        """Clip, update at `factor` times the base rates, clear gradients; returns the gradient norm
        before clipping.

        With a norm that is no finite number nothing is updated: some gradient is none either.
        """
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)))
        for member, base in zip(self.members, self.base, strict=True):
            member.param_groups[0]["lr"] = base * factor
            if math.isfinite(norm):
                member.step()
            member.zero_grad(set_to_none=True)
        return norm

    def rehearse(self) -> None:
        """Do the work of a step with the gradients there are, and leave no trace of it: at rate 0
        no weight changes, and states are forgotten. Only before the first step.
        """
        self.step(0.0)
        for member in self.members:
            member.state.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """States of all members."""
        return [member.state_dict() for member in self.members]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what `state_dict` gave."""
        for member, state in zip(self.members, states, strict=True):
            member.load_state_dict(share_out_moments(state, member))


def rate_factor(step: int, num_steps: int, *, warmup_share: float, decay_share: float) -> float:
    """Share of the base rate at a step (counted from 0): linear warm-up, constant, linear decay to
    zero.
    """
    warm = min(1.0, (step + 1) / max(1.0, warmup_share * num_steps))
    cool = min(1.0, (num_steps - step) / max(1.0, decay_share * num_steps))
    return warm * cool
