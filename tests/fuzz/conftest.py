"""The budget of a fuzz run: fixed rounds of a minute, or as many hours as --hours says. Shared by every file here.

Without --hours every machine does the same rounds, so what fails in one place fails everywhere. How many rounds a test
does is written beside it, with `@pytest.mark.rounds(N)`.
"""

import random
import time

import pytest


def pytest_addoption(parser):
    parser.addoption("--hours", type=float, default=0.0, help="Hours to fuzz, shared by all tests; 0: about a minute.")
    parser.addoption("--fuzz-seed", type=int, default=0, help="Seed of the mutations; a failure prints its own.")


@pytest.fixture
def rounds(request):
    """Return sources of randomness, each seeded by its number: a fixed number, or until the hours are over."""
    option, (count,) = request.config.getoption, request.node.get_closest_marker("rounds").args
    seconds = option("--hours") * 3600 / len(request.session.items)

    def sources():
        deadline, seed = time.monotonic() + seconds, option("--fuzz-seed")
        last = seed + count
        while seed < last or time.monotonic() < deadline:
            print(f"--fuzz-seed {seed}")  # noqa: T201 - shown if the test fails
            yield random.Random(seed)
            seed += 1

    return sources
