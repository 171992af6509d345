"""Training state on disk: everything a killed run needs to go on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from conf.run import write_atomically

STATE = "state.pt"
BEST = "best.pt"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    write_atomically(path, lambda file: torch.save(state, file))


def load_state(path: Path) -> dict[str, Any] | None:
    """A checkpoint, or None when there is none."""
    if not path.is_file():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)
