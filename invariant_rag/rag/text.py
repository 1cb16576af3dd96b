"""Text cut into words, or to a length, in whatever script it is written."""

from __future__ import annotations

import re
import unicodedata
from textwrap import shorten

# Kana and ideographs are words of their own: no space says where a word ends.
_ALONE = "\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")


def words(text: str) -> list[str]:
    """Return the words of a text, however they are cased and whichever form of a letter they are written with.

    >>> words("The o\ufb03ce: 三つ")
    ['the', 'office', '三', 'つ']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def shortened(text: str, width: int) -> str:
    """Return a text on one line of at most `width` characters: cut between words, or within the first if it is longer.

    >>> shortened("a lantern at the harbour", 20), shortened("三十メートルの塔の高さ", 10)
    ('a lantern at [...]', '三十メー [...]')
    """
    line = " ".join(text.split())
    cut = shorten(line, width)
    return f"{line[: width - 6]} [...]" if cut == "[...]" != line else cut
