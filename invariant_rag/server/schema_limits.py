"""JSON schemas from outside: those that would keep a grammar busy for minutes are refused.

A grammar follows a schema literally: the shortest text of one with `{"minItems": 1000000}` has a million items.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from invariant_rag.errors import InvalidSchema

MOST_BYTES = 32_768
MOST_LEVELS = 24
MOST_REPETITIONS = 200
"""Of all counts on the way to one value, multiplied: an array of 10 arrays of 20 items has 200."""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LEAST = ("minItems", "minLength", "minProperties")
_QUANTIFIER = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_HINT = "Ask for less, or say it in the prompt."


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check a schema that somebody else has written.

    Raises:
        InvalidSchema: It is too large, too deep, or counts too far.
    """
    if len(json.dumps(schema)) > MOST_BYTES:
        raise InvalidSchema(f"expected a schema of at most {MOST_BYTES} bytes", hint=_HINT)
    _check(schema, 0, 1)


def _check(part: Any, level: int, repetitions: int) -> None:
    if level > MOST_LEVELS:
        raise InvalidSchema(f"expected a schema of at most {MOST_LEVELS} levels", hint=_HINT)
    if isinstance(part, Mapping):
        for name in _COUNTS:
            _check_count(part.get(name))
        for name in _LEAST:
            count = part.get(name)
            repetitions *= max(count, 1) if isinstance(count, int) else 1
        _check_count(repetitions)
        if isinstance(pattern := part.get("pattern"), str):
            for quantifier in _QUANTIFIER.finditer(pattern):
                repetitions *= max(*(int(number or 0) for number in quantifier.groups()), 1)
                _check_count(repetitions)
    for each in part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ():
        _check(each, level + 1, repetitions)


def _check_count(count: Any) -> None:
    if isinstance(count, int | float) and count > MOST_REPETITIONS:
        raise InvalidSchema(f"expected a schema that counts to at most {MOST_REPETITIONS}", hint=_HINT)
