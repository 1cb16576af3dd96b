"""How a message shows a value that somebody passed: short, and whatever the value is."""

from __future__ import annotations

from numbers import Integral
from typing import Any

_LONGEST = 60


def shown(value: Any) -> str:
    """Return a value for a message, short however large it is.

    >>> shown("a" * 1000)
    "str 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    if isinstance(value, Integral) and abs(int(value)) > 10**20:
        return "a number of more than 20 digits"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - lists nested too deeply, or a faulty class of the caller
        return f"an object of {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{type(value).__name__} {text[:_LONGEST]}..."
