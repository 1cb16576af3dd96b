"""Mutations of files: bytes flipped, cut, doubled and exchanged for what parsers dislike; and a full disk."""

import resource
import signal
from contextlib import contextmanager

TOKENS = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n", b"\\ud800", b"9" * 5000, b"1e999", b"NaN"),
    *(b"[" * 2000, b'{"a":' * 500, b'"', b"null", b"-1", b"true", b"{}", b"#" * 3000, b" " * 3000, b","),
    b"x" * 140_000,
    *(b"obj", b"endobj", b"<<", b">>", b"/Length -1", b"/Filter /Unheard", b"/Encrypt 1 0 R", b"1 0 R", b"stream"),
)


def mutated(content, source):
    """Return the content after one to five random changes."""
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
