"""Training state on disk: everything a killed run needs to go on as if it had not been."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conf.run import write_atomically

STATE = "state.pt"
BEST = "best.pt"


@dataclass
class Progress:
    """What is logged and what a resumed run starts from."""

    step: int = 0
    num_planned: int = -1  # steps of the run, where its time is limited; negative: all
    num_tokens: int = 0  # supervised, over all processes
    seconds: float = 0.0
    best_step: int = 0
    first: dict[str, Any] | None = None  # fields of the Acceptance before the first step
    best: dict[str, Any] | None = None  # and of the best one
    curve: list[dict[str, float]] = field(default_factory=list)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    write_atomically(path, lambda file: torch.save(state, file))


def load_state(path: Path) -> dict[str, Any] | None:
    """A checkpoint, or None when there is none."""
    if not path.is_file():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)
