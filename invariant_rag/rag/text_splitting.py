"""Split text into chunks, join chunks of one source, and truncate text.

The splitter prefers coarse separators (blank line, sentence, line, word, character) and drops only the white space at
its cuts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten

_SEPARATORS = tuple(re.compile(each) for each in (r"\n\s*\n", r"(?<=[.!?])\s+|(?<=[。！？])", r"\n", r"\s+"))  # noqa: RUF001
WORD_START = re.compile(r"(?<!\S)\S")


def split_spans(
    text: str, start: int, stop: int, size: int, separators: Sequence[re.Pattern[str]] = _SEPARATORS
) -> Iterator[tuple[int, int]]:
    """Split `text[start:stop]` into spans of at most `size` characters, at the coarsest separators that suffice.

    A separator is white space (or empty) and belongs to no span; a span is as long as possible.
    """
    if stop - start <= size:
        yield start, stop
    elif not separators:
        yield from ((at, min(at + size, stop)) for at in range(start, stop, size))
    else:
        begin = end = resume = start
        for cut, after in [*(match.span() for match in separators[0].finditer(text, start, stop)), (stop, stop)]:
            if cut - begin > size:
                yield from split_spans(text, begin, end, size, separators[1:])
                begin = resume
            end, resume = cut, after
        yield from split_spans(text, begin, end, size, separators[1:])


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


def truncate(text: str, width: int) -> str:
    """Truncate text to one line of at most `width` characters, between words if the first word fits.

    >>> truncate("a lantern at the harbour", 20), truncate("三十メートルの塔の高さ", 10)
    ('a lantern at [...]', '三十メー [...]')
    """
    line = " ".join(text.split())
    cut = shorten(line, width)
    return f"{line[: width - 6]} [...]" if cut == "[...]" != line else cut
