"""Tests on CUDA, run by `make test-gpu`. Without a GPU nothing is run, and that is said."""

from __future__ import annotations

import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    if not torch.cuda.is_available():
        pytest.exit("no CUDA device: nothing of tests/gpu was run", returncode=0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda")
