"""The budget of a fuzz run: a minute, or as many hours as --hours says. Shared by every file here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

TESTS_OF_A_MINUTE = 8.0
"""Seconds that each test may take, if nothing else is asked for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hours", type=float, default=0.0, help="Hours to fuzz, shared by all tests; 0: about a minute.")
    parser.addoption("--fuzz-seed", type=int, default=0, help="Seed of the mutations; a failure prints its own.")


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[[], Iterator[random.Random]]:
    """Return sources of randomness, each seeded by its number, until the time of this test is over."""
    hours = request.config.getoption("--hours")
    seconds = hours * 3600 / len(request.session.items) if hours else TESTS_OF_A_MINUTE
    first = request.config.getoption("--fuzz-seed")

    def sources() -> Iterator[random.Random]:
        deadline, seed = time.monotonic() + seconds, first
        while seed == first or time.monotonic() < deadline:
            print(f"--fuzz-seed {seed}")  # noqa: T201 - shown if the test fails
            yield random.Random(seed)
            seed += 1

    return sources
