"""What several files of whole stages begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training import (
    Recording,
    recorded_target,
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
    return recorded_target(tmp_path_factory.mktemp("target"), 144, 32)


@pytest.fixture(scope="session")
def uninterrupted(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(recording, folder)
    torch.set_num_threads(before)
    return folder
