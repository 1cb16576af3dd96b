"""JSON schemas from outside: those that would keep a grammar busy for minutes are refused.

A grammar follows a schema literally: the shortest text of one with `{"minItems": 1000000}` has a million items.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from invariant_rag.errors import InvalidSchema
from invariant_rag.generation.json_schema import PATTERNS
from invariant_rag.server.patterns import MOST_WORK, pattern_size
from invariant_rag.server.required import least_required
from invariant_rag.shown import shown

MOST_BYTES = 32_768
MOST_LEVELS = 24
MOST_REPETITIONS = 200
"""Of all counts on the way to one value, multiplied: an array of 10 arrays of 20 items has 200."""
MOST_REQUIRED = 1_000
"""Counted characters and items that no answer can do without, of all values together: 10 texts of 50 have 500."""
MOST_MASKED = 50_000_000
"""Edges of the automata of patterns and lengths, times tokens of the vocabulary: about 20 seconds of a processor.

A grammar tells for each character that is counted which tokens may follow it.
"""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LENGTHS = ("minLength", "maxLength")
_LEAST = ("minItems", "minLength", "minProperties")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_HINT = "Ask for less, or say it in the prompt."


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check a schema that somebody else has written.

    Raises:
        InvalidSchema: It is too large, too deep, counts too far, has patterns that take too long, or refers to what is
            elsewhere.
    """
    _check_all([schema], [schema])


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check the schemas of tools, in OpenAI's shape, which an answer may all have to choose from.

    Raises:
        InvalidSchema: As for `check_schema`.
    """
    _check_all(tools, [each["function"].get("parameters") for each in tools])


def check_masked(schemas: Sequence[Any], vocabulary: int) -> float:
    """Check schemas that were checked for themselves, together and for the vocabulary of a model.

    Args:
        schemas: JSON schemas.
        vocabulary: How many tokens there are.

    Returns:
        What compiling them takes, as `MOST_MASKED` counts it.

    Raises:
        InvalidSchema: They take too long to compile.
    """
    work = _work_of(schemas)
    if work * vocabulary > MOST_MASKED:
        raise InvalidSchema(
            f"expected patterns and lengths of texts with automata of at most {MOST_MASKED // vocabulary:,} edges "
            f"together, for a model with {vocabulary:,} tokens, got {work:,.0f}",
            hint=_HINT,
        )
    return work * vocabulary


def _check_all(whole: Sequence[Any], schemas: Sequence[Any]) -> None:
    """Check each of several things with schemas in them, and what those schemas ask for together."""
    for each in whole:
        if len(json.dumps(each)) > MOST_BYTES:
            raise InvalidSchema(f"expected a schema of at most {MOST_BYTES} bytes", hint=_HINT)
        _check(each, 0, 1)
    required = sum(map(_required, schemas))
    if required > MOST_REQUIRED:
        raise InvalidSchema(
            "expected a schema whose values must have at most "
            f"{MOST_REQUIRED} characters and items together, got {shown(required)}",
            hint=_HINT,
        )
    if _work_of(schemas) > MOST_WORK:
        raise InvalidSchema(
            f"expected patterns and lengths of texts with automata of at most {MOST_WORK:,} edges together, got more",
            hint=_HINT,
        )


def _required(schema: Any) -> int:
    try:
        return least_required(schema)
    except RecursionError as error:
        raise InvalidSchema("expected a schema with fewer references to references", hint=_HINT) from error


def _texts(part: Any) -> Iterator[str | tuple[int, int]]:
    """Yield the patterns of a schema, and the bounds of the lengths of its other texts."""
    if isinstance(part, Mapping):
        names = part.get("patternProperties")
        found = (
            part.get("pattern"),
            PATTERNS.get(str(part.get("format"))),
            *(names if isinstance(names, Mapping) else ()),
        )
        yield from (each for each in found if isinstance(each, str))
        least, most = (part[name] if isinstance(part.get(name), int) else 0 for name in _LENGTHS)
        yield least, most
    for each in part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ():
        yield from _texts(each)


def _work_of(schemas: Sequence[Any]) -> float:
    return sum(map(_work, {text for each in schemas for text in _texts(each)}))


def _work(text: str | tuple[int, int]) -> float:
    return pattern_size(text).work if isinstance(text, str) else max(text)


def _check(part: Any, level: int, repetitions: int) -> None:
    if level > MOST_LEVELS:
        raise InvalidSchema(f"expected a schema of at most {MOST_LEVELS} levels", hint=_HINT)
    if isinstance(part, Mapping):
        for name in _REFERENCES:
            _check_reference(part.get(name))
        for name in _COUNTS:
            _check_count(part.get(name))
        _check_properties(part)
        for name in _LEAST:
            count = part.get(name)
            repetitions *= max(count, 1) if isinstance(count, int) else 1
        _check_count(repetitions)
    for each in part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ():
        _check(each, level + 1, repetitions)


def _check_properties(part: Mapping[str, Any]) -> None:
    """Refuse many properties that are counted: a grammar has a rule for each of them at each count."""
    properties = part.get("properties")
    counts = [part[name] for name in ("minProperties", "maxProperties") if isinstance(part.get(name), int)]
    if isinstance(properties, Mapping) and len(properties) * max(counts, default=0) > MOST_WORK:
        raise InvalidSchema(
            f"expected properties that, times minProperties or maxProperties, are at most {MOST_WORK:,}, got more",
            hint=_HINT,
        )


def _check_count(count: Any) -> None:
    if isinstance(count, int | float) and count > MOST_REPETITIONS:
        raise InvalidSchema(f"expected a schema that counts to at most {MOST_REPETITIONS}", hint=_HINT)


def _check_reference(reference: Any) -> None:
    if isinstance(reference, str) and not reference.startswith("#"):
        raise InvalidSchema(
            f"expected references within the schema, got {shown(reference)}: nothing is fetched",
            hint="Write the definition under $defs, and refer to #/$defs/NAME.",
        )
