"""JSON from outside: of a size; and schemas, whether they are any, and refer to nothing elsewhere.

How long one takes to compile is seen when it is compiled; see `compiling`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from invariant_rag.errors import InvalidSchema, InvalidTool
from invariant_rag.generation.json_schema import check_json_schema
from invariant_rag.server.errors import TooLarge
from invariant_rag.shown import shown

MOST_BYTES = 65_536
"""Of a schema, and of all tools together."""
MOST_TOOLS = 128

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_HINT = "Ask for less, or say it in the prompt."


def check_values(document: Any, most: int, what: str) -> None:
    """Check that a document is no heap of small values, which take far more memory and time than their text.

    Args:
        document: JSON.
        most: Texts, names, lists and objects that it may have.
        what: What it is, such as `a body`.

    Raises:
        TooLarge: It has more.
    """
    level, found = [document], 0
    while level:
        inner: list[Any] = []
        for each in level:
            values = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            inner.extend(value for value in values if not isinstance(value, int | float))
            found += len(each) if isinstance(each, dict) else 0
        found += len(inner)
        if found > most:
            raise TooLarge(f"expected {what} of at most {most:,} values, got more")
        level = inner


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check a schema that somebody else has written.

    Raises:
        InvalidSchema: It is none, is too large, or refers to what is elsewhere.
    """
    if len(json.dumps(schema)) > MOST_BYTES:
        raise InvalidSchema(f"expected a schema of at most {MOST_BYTES:,} bytes", hint=_HINT)
    check_json_schema(schema)
    _check_references(schema)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check tools in OpenAI's shape, which an answer may all have to choose from.

    Raises:
        InvalidSchema: As for `check_schema`.
        InvalidTool: There are too many, or they are too long together.
    """
    if len(tools) > MOST_TOOLS or len(json.dumps(tools)) > MOST_BYTES:
        raise InvalidTool(
            f"expected at most {MOST_TOOLS} tools of {MOST_BYTES:,} bytes together, got more", hint="Give fewer tools."
        )
    for each in tools:
        check_schema(each["function"].get("parameters") or {})


def _check_references(part: Any) -> None:
    """Check every reference of a schema."""
    if isinstance(part, Mapping):
        for name in _REFERENCES:
            reference = part.get(name)
            if isinstance(reference, str) and not reference.startswith("#"):
                raise InvalidSchema(
                    f"expected references within the schema, got {shown(reference)}: nothing is fetched",
                    hint="Write the definition under $defs, and refer to #/$defs/NAME.",
                )
    for each in part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ():
        _check_references(each)
