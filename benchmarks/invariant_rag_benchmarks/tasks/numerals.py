"""Numerals of any kind (Arabic, Roman, words), read where they plainly name events: in lists, or before a sign."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORDS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
_LONGEST = 9
"""Digits of a number; events are not that many, and Python refuses to read thousands of digits."""

_ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100, "d": 500, "m": 1000}
_KINDS = (r"\d+", "[IVXLCDM]+|[ivxlcdm]+", f"(?i:{'|'.join(_WORDS)})")
_MARKED = tuple(
    re.compile(rf"(?:^|[\n,;>(\[])[ \t]*({kind})(?=[.)\]:,;> \t]*(?:[\n,;>]|\Z)|[.)\]:])") for kind in _KINDS
)
"""A numeral of each kind as a name: before a sign, or in a list of nothing else. `I` is a pronoun, too."""

_LEAD = re.compile(r"(?i)\b(?:is|order|sequence)\b|:")
_CONNECTIVES = frozenset({"and", "before", "then", "to"})


def value_of(numeral: str) -> int | None:
    """Return the number that a numeral of any kind stands for; None if it is none.

    >>> [value_of(each) for each in ("2", "(2)", "II", "iv", "Two", "IIV", "noon")]
    [2, 2, 2, 4, 2, None, None]
    """
    bare = numeral.strip("()[]. ").lower()
    if bare.isdecimal():
        return int(bare) if len(bare) <= _LONGEST else None
    if bare in _WORDS:
        return _WORDS.index(bare) + 1
    return _roman_value(bare)


def read_numbers(output: str, wanted: Sequence[int]) -> list[int]:
    """Return the wanted numbers in the order in which an output names them, in numerals of whatever kind.

    Empty if the output does not name each of them once, or if numerals of two kinds name them in two orders.

    >>> read_numbers("(2), (1), (3)", [1, 2, 3]), read_numbers("The order is II, I and III.", [1, 2, 3])
    ([2, 1, 3], [2, 1, 3])
    >>> read_numbers("two, one", [1, 2]), read_numbers("I think that two of them came before one.", [1, 2])
    ([2, 1], [])
    """
    tail = re.findall(r"\w+", _LEAD.split(output)[-1])
    listed = [each for each in tail if each.lower() not in _CONNECTIVES]
    found: dict[tuple[int, ...], None] = {}
    for kind, marked in zip(_KINDS, _MARKED, strict=True):
        sequence = listed if all(re.fullmatch(kind, each) for each in listed) else []
        for numerals in (marked.findall(output), sequence):
            values = map(value_of, numerals)
            named = tuple(each for each in values if each is not None and each in wanted)
            if sorted(named) == sorted(wanted):
                found[named] = None
                break
    return list(next(iter(found))) if len(found) == 1 else []


def _roman_value(numeral: str) -> int | None:
    """Return the number of a Roman numeral in small letters; None if it is not written as one."""
    pattern = "m{0,3}(cm|cd|d?c{0,3})(xc|xl|l?x{0,3})(ix|iv|v?i{0,3})"
    if not numeral or not re.fullmatch(pattern, numeral):
        return None
    values = [_ROMAN[each] for each in numeral]
    pairs = zip(values, [*values[1:], 0], strict=True)
    return sum(-value if value < following else value for value, following in pairs)
