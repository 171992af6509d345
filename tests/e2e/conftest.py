"""What several files of whole stages begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.lessons import recorded_rows
from tests.tiny import tiny_model
from tests.training import (
    Recording,
    save_target,
    train,
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit for bit holds for a given number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = save_target(tiny_model(4), tmp_path_factory.mktemp("target"))
    target = tiny_model(4)
    return Recording(folder, recorded_rows(target, 144), recorded_rows(target, 32, first=1000))


@pytest.fixture(scope="session")
def uninterrupted(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(recording, folder)
    torch.set_num_threads(before)
    return folder
