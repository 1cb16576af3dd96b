"""Truncate text, and join chunks of one source."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import shorten


def truncate(text: str, width: int) -> str:
    """Truncate text to one line of at most `width` characters, between words if the first word fits.

    >>> truncate("a lantern at the harbour", 20), truncate("三十メートルの塔の高さ", 10)
    ('a lantern at [...]', '三十メー [...]')
    """
    line = " ".join(text.split())
    cut = shorten(line, width)
    return f"{line[: width - 6]} [...]" if cut == "[...]" != line else cut


def join_chunks(chunks: Iterable[tuple[int, str]], separator: str = "\n") -> str:
    r"""Join chunks of one source in source order, without repeating text in which they overlap.

    >>> join_chunks([(8, "three four"), (0, "one two three"), (30, "ten")])
    'one two three four\nten'

    Args:
        chunks: Each chunk, and the offset of its first character in the source, in any order.
        separator: Stands where the source has text that is in no chunk, and where offsets and texts do not agree.
    """
    joined, end = "", 0
    for start, text in sorted(chunks):
        shared = min(end - start, len(text))
        if not joined:
            joined = text
        elif shared == len(text) and text in joined:
            continue
        elif shared >= 0 and joined.endswith(text[:shared]):
            joined += text[shared:]
        else:
            joined += separator + text
        end = max(end, start + len(text))
    return joined
