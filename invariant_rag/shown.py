"""How a message shows a value or a text from outside: short, and without control characters."""

from __future__ import annotations

import re
from numbers import Integral
from reprlib import Repr
from typing import Any

_LONGEST = 60
_LONGEST_MESSAGE = 4000

_BOUNDED = Repr()  # a few lists within one another may stand for 10**9 values
_BOUNDED.maxlevel = 3
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = _BOUNDED.maxset = _BOUNDED.maxfrozenset = 20
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 4 * _LONGEST

# Control characters except tab and newline, unpaired surrogates, bidirectional controls, and Unicode's line separators.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    r"""Return text without control characters, for a terminal or a page: neither documents nor file names are trusted.

    >>> clean("notes\x1b[2J.txt") == "notes\ufffd[2J.txt"
    True
    """
    return _UNSAFE.sub("\ufffd", text)


def shown(value: Any) -> str:
    """Return a value for a message, short however large it is.

    >>> shown("a" * 1000)
    "str 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    if isinstance(value, Integral) and abs(int(value)) > 10**20:
        return "a number of more than 20 digits"
    try:
        text = _BOUNDED.repr(value)
    except Exception:  # noqa: BLE001 - lists nested too deeply, or a faulty class of the caller
        return f"an object of {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{type(value).__name__} {text[:_LONGEST]}..."


def shortened(message: str, longest: int = _LONGEST_MESSAGE) -> str:
    """Return a message without its middle if it is longer than a page: it quotes a text from outside.

    >>> shortened("expected 1 or 0, got " + "1" * 5000 + ", line 3")[-40:]
    '11111111111111111111111111111111, line 3'
    """
    if len(message) <= longest:
        return message
    half = longest // 2
    return f"{message[:half]} ... ({len(message) - 2 * half:,} characters left out) ... {message[-half:]}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one.

    >>> counted(1, "question"), counted(1200, "question")
    ('1 question', '1,200 questions')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def reason(error: BaseException) -> str:
    """Return why something failed, for a message: of an error of the system its words, without number and path.

    >>> reason(FileExistsError(17, "File exists", "out")), reason(ValueError("no JSON"))
    ('File exists', 'no JSON')
    """
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
