"""JSON schemas from outside: those that would keep a grammar busy for minutes are refused.

A grammar follows a schema literally: the shortest text of one with `{"minItems": 1000000}` has a million items.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from invariant_rag.errors import InvalidSchema
from invariant_rag.server.required import least_required
from invariant_rag.shown import shown

MOST_BYTES = 32_768
MOST_LEVELS = 24
MOST_REPETITIONS = 200
"""Of all counts on the way to one value, multiplied: an array of 10 arrays of 20 items has 200."""
MOST_REQUIRED = 1_000
"""Counted characters and items that no answer can do without, of all values together: 10 texts of 50 have 500."""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LEAST = ("minItems", "minLength", "minProperties")
_QUANTIFIER = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_HINT = "Ask for less, or say it in the prompt."


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check a schema that somebody else has written.

    Raises:
        InvalidSchema: It is too large, too deep, counts too far, or refers to what is elsewhere.
    """
    _check_whole(schema)
    _check_required(_required(schema))


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check the schemas of tools, which an answer may all have to choose from.

    Raises:
        InvalidSchema: As for `check_schema`.
    """
    required = 0
    for tool in tools:
        _check_whole(tool)
        function = tool.get("function", tool)
        required += _required(function.get("parameters")) if isinstance(function, Mapping) else 0
    _check_required(required)


def _check_whole(schema: Mapping[str, Any]) -> None:
    if len(json.dumps(schema)) > MOST_BYTES:
        raise InvalidSchema(f"expected a schema of at most {MOST_BYTES} bytes", hint=_HINT)
    _check(schema, 0, 1)


def _required(schema: Any) -> int:
    try:
        return least_required(schema)
    except RecursionError as error:
        raise InvalidSchema("expected a schema with fewer references to references", hint=_HINT) from error


def _check_required(required: int) -> None:
    if required > MOST_REQUIRED:
        raise InvalidSchema(
            "expected a schema whose values must have at most "
            f"{MOST_REQUIRED} characters and items together, got {shown(required)}",
            hint=_HINT,
        )


def _check(part: Any, level: int, repetitions: int) -> None:
    if level > MOST_LEVELS:
        raise InvalidSchema(f"expected a schema of at most {MOST_LEVELS} levels", hint=_HINT)
    if isinstance(part, Mapping):
        for name in _REFERENCES:
            _check_reference(part.get(name))
        for name in _COUNTS:
            _check_count(part.get(name))
        for name in _LEAST:
            count = part.get(name)
            repetitions *= max(count, 1) if isinstance(count, int) else 1
        _check_count(repetitions)
        if isinstance(pattern := part.get("pattern"), str):
            for quantifier in _QUANTIFIER.finditer(pattern):
                repetitions *= max(*(int((number or "0")[:9]) for number in quantifier.groups()), 1)
                _check_count(repetitions)
    for each in part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ():
        _check(each, level + 1, repetitions)


def _check_count(count: Any) -> None:
    if isinstance(count, int | float) and count > MOST_REPETITIONS:
        raise InvalidSchema(f"expected a schema that counts to at most {MOST_REPETITIONS}", hint=_HINT)


def _check_reference(reference: Any) -> None:
    if isinstance(reference, str) and not reference.startswith("#"):
        raise InvalidSchema(
            f"expected references within the schema, got {shown(reference)}: nothing is fetched",
            hint="Write the definition under $defs, and refer to #/$defs/NAME.",
        )
