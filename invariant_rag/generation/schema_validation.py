"""Validation of values with JSON schemas from anywhere: nothing is fetched, and it takes no more than seconds.

A schema of a few lines may ask for endless work: patterns that backtrack, and references that fan out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Any

import regex

from invariant_rag.errors import ExtraRequired, InvalidObject, InvalidSchema

MOST_SECONDS = 5.0
"""How long one validation may take."""

LITERALS = ("const", "default", "enum", "examples", "required")
"""Keywords whose values are data, and no schemas."""


def check_json_schema(schema: Mapping[str, Any]) -> None:
    """Check that something is a JSON schema, as far as its dialect's own schema says.

    Raises:
        ExtraRequired: jsonschema is not installed.
        InvalidSchema: It is none.
    """
    jsonschema = _import_jsonschema()
    try:
        _dialect(schema).check_schema(_without_dialects(schema))
    except jsonschema.SchemaError as error:
        raise InvalidSchema(f"expected a JSON schema, got one that is none: {error.message}") from error
    except (OverflowError, RecursionError) as error:
        raise InvalidSchema(f"expected a JSON schema, got one that counts or nests too far: {error}") from error


def validate_value(value: Any, schema: Mapping[str, Any]) -> None:
    """Validate what a JSON text says.

    Args:
        value: The value.
        schema: The schema. References lead to places within it.

    Raises:
        ExtraRequired: jsonschema is not installed.
        InvalidObject: The value does not satisfy the schema.
        InvalidSchema: It is no schema, refers to what is elsewhere, or takes too long.
    """
    jsonschema = _import_jsonschema()
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    check_json_schema(schema)
    text = json.dumps(schema)
    if '"unevaluatedProperties"' in text and '"patternProperties"' in text:
        raise InvalidSchema(
            "expected a schema with patternProperties or unevaluatedProperties, got both",
            hint="Write additionalProperties instead of unevaluatedProperties.",
        )
    validator = _Rules(_dialect(schema)).validator(_without_dialects(schema), registry=Registry())
    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except (Unresolvable, regex.error, OverflowError) as unusable:
        raise InvalidSchema(f"expected a JSON schema, got one that is none: {unusable}") from unusable
    except (RecursionError, TimeoutError) as endless:
        raise InvalidSchema(
            f"expected a schema that validates an answer in {MOST_SECONDS:g} seconds, got one that does not",
            hint="Leave away references in circles, and nested repetitions in patterns.",
        ) from endless
    if error is not None:
        raise InvalidObject(f"expected JSON of the schema, got {value!r}: {error.message}")


def _import_jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise ExtraRequired("jsonschema", "structured") from error
    return jsonschema


def _dialect(schema: Mapping[str, Any]) -> Any:
    """Return the validator class of the dialect that a schema names."""
    validators = _import_jsonschema().validators
    latest = validators.Draft202012Validator
    named = schema.get("$schema")
    return validators.validator_for({"$schema": named}, default=latest) if isinstance(named, str) else latest


def _without_dialects(node: Any) -> Any:
    """Return a schema whose parts name no dialect: jsonschema would take them to a validator without limits."""
    if isinstance(node, list):
        return [_without_dialects(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    return {
        name: each if name in LITERALS else _without_dialects(each)
        for name, each in node.items()
        if name != "$schema" or not isinstance(each, str)
    }


class _Rules:
    """Rules of a dialect that raise TimeoutError when the time of one validation is over."""

    def __init__(self, dialect: Any) -> None:
        self._end = monotonic() + MOST_SECONDS
        own = {"pattern": self._pattern, "patternProperties": self._named, "additionalProperties": self._others}
        rules = {name: self._in_time(check) for name, check in {**dialect.VALIDATORS, **own}.items()}
        self.validator = _import_jsonschema().validators.extend(dialect, rules)

    def _left(self) -> float:
        seconds = self._end - monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    def _in_time(self, check: Any) -> Any:
        def checked(*arguments: Any) -> Iterator[Any]:
            self._left()
            yield from check(*arguments) or ()

        return checked

    def _matches(self, pattern: str, text: str) -> bool:
        return regex.search(pattern, text, timeout=self._left(), concurrent=True) is not None

    def _pattern(self, validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[Any]:
        if validator.is_type(value, "string") and not self._matches(pattern, value):
            yield _import_jsonschema().ValidationError(f"{value!r} does not match {pattern!r}")

    def _named(self, validator: Any, patterns: Mapping[str, Any], value: Any, _schema: Any) -> Iterator[Any]:
        for pattern, part in patterns.items() if validator.is_type(value, "object") else ():
            for name in value:
                if self._matches(pattern, name):
                    yield from validator.descend(value[name], part, path=name, schema_path=pattern)

    def _others(self, validator: Any, part: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        patterns, named = schema.get("patternProperties", ()), schema.get("properties", ())
        for name in value if validator.is_type(value, "object") else ():
            if name not in named and not any(self._matches(each, name) for each in patterns):
                yield from validator.descend(value[name], part, path=name)
