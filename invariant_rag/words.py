"""Words of a text, also in scripts without spaces."""

from __future__ import annotations

import re
import unicodedata

# Scripts without spaces between words (kana, ideographs): each character counts as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
_LONG = 100_000
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def split_words(text: str) -> list[str]:
    """Split text into words: case-folded, NFKC-normalised, without punctuation.

    >>> split_words("The o\ufb03ce: 三つ")
    ['the', 'office', '三', 'つ']
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    if len(plain) < _LONG:
        return _WORD.findall(plain)
    return [match[0] for match in _WORD.finditer(plain)]  # so that other threads run meanwhile
