"""`python -m tests.killed N ...`: what `python -m train ...` does, killed before its step N."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from train.app import main
from train.loop import Trainer


def kill_before(number: int) -> None:
    """Let the process end there as if its machine had failed."""
    whole = Trainer.step

    def step(self: Trainer, step: int) -> Any:
        if step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, step)

    Trainer.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_before(int(sys.argv.pop(1)))
    main()
