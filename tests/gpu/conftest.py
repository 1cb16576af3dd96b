"""Tests on CUDA, run by `make test-gpu`. Without a GPU nothing is run, and that is said."""

import pytest
import torch


def pytest_sessionstart(session):
    if not torch.cuda.is_available():
        pytest.exit("no CUDA device: nothing of tests/gpu was run", returncode=0)
