"""The budget of a fuzz run, mutations of files, and a full disk.

Without --hours every machine does the same rounds, so what fails in one place fails everywhere. How many rounds a test
does is written beside it, with `@pytest.mark.rounds(N)`.
"""

import random
import resource
import signal
import time
from contextlib import contextmanager

import pytest

# What parsers dislike.
TOKENS = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n", b"\\ud800", b"9" * 5000, b"1e999", b"NaN"),
    *(b"[" * 2000, b'{"a":' * 500, b'"', b"null", b"-1", b"true", b"{}", b"#" * 3000, b" " * 3000, b","),
    b"x" * 140_000,
    *(b"obj", b"endobj", b"<<", b">>", b"/Length -1", b"/Filter /Unheard", b"/Encrypt 1 0 R", b"1 0 R", b"stream"),
)


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


def mutated(content, source):
    """Return the content after one to five random changes: flipped, cut, doubled, or exchanged for `TOKENS`."""
    changed = bytearray(content)
    for _ in range(source.randint(1, 5)):
        at = source.randrange(len(changed) + 1)
        length = min(source.choice((1, 1, 4, 30, 300)), len(changed) - at)
        match source.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << source.randrange(8)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = changed[at : at + length]
            case 3:
                changed[at : at + length] = source.choice(TOKENS)
            case 4:
                changed[at : at + length] = source.randbytes(length)
            case _:
                del changed[at + source.randrange(400) :]
    return bytes(changed)


@contextmanager
def full_disk(size):
    """No file becomes larger than `size` bytes, which is an error of the disk, and not the end of the process."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
