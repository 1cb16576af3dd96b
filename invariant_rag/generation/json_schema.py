"""JSON schemas: what decoding can follow, and validation of what was decoded. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from invariant_rag.checks import require_extra
from invariant_rag.errors import IncompleteObject, InvalidObject, InvalidSchema
from invariant_rag.files import parse_json
from invariant_rag.shown import shown

_ORIGIN = re.compile(r"\[[\d:]+\] \S+?:\d+: (?:Check failed: (?=\())?")  # time and line in xgrammar's source
_IGNORED = ("contains", "dependentRequired", "dependentSchemas", "if", "not", "uniqueItems")  # by xgrammar
_CLASS = re.compile(r"(\\.)|\[(?:\\.|[^]\\])*]")  # or an escape, in a pattern
_UNWRITTEN = re.compile(r'"|\\(?:[\\cfnrtv0]|x[01]|u00[01]|(?:x|u00)(?:22|5[cC]))')  # as JSON has it, by xgrammar
_LITERALS = ("const", "default", "enum", "examples", "required")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def json_schema(schema: Any) -> dict[str, Any]:
    """Return the JSON schema of a type that pydantic knows, or one as dict or string; or raise InvalidSchema."""
    if isinstance(schema, str | Mapping):
        try:
            schema = parse_json(schema if isinstance(schema, str) else json.dumps(dict(schema)))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidSchema(f"expected a JSON schema, got what is no JSON: {error}") from error
    if isinstance(schema, dict):
        return schema
    if isinstance(schema, bool | int | float | list | tuple | None):
        raise InvalidSchema(f"expected a JSON schema or a type, got {shown(schema)}")
    return dict(_type_adapter(schema).json_schema())


def check_expressible(part: Any, *, is_schema: bool = True) -> Any:
    """Return a schema that has no keyword that xgrammar ignores or breaks, or raise InvalidSchema, which names it."""
    for name, value in part.items() if isinstance(part, dict) else ():
        several = name == "allOf" and isinstance(value, list) and len(value) > 1
        broken = name == "pattern" and isinstance(value, str) and _UNWRITTEN.search(_CLASS.sub(r"\1", value))
        if is_schema and value and (several or broken or name in _IGNORED):
            hint = "Leave it away, or say it with a type, an enum, bounds, or a pattern (no quotes, no backslashes)."
            raise InvalidSchema(f"expected keywords that decoding can follow, got {name!r} in {shown(part)}", hint=hint)
        if not is_schema or name not in _LITERALS:
            check_expressible(value, is_schema=not is_schema or name not in _NAMED)
    for each in part if isinstance(part, list) else ():
        check_expressible(each)
    return part


def json_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of xgrammar for JSON of a schema, with at most one white space between its parts."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def compile_tag(compiler: Any, tag: str) -> Any:
    """Compile a structural tag with a `GrammarCompiler` of xgrammar, or raise InvalidSchema."""
    try:
        return compiler.compile_structural_tag(tag)
    except RuntimeError as error:
        reason = _ORIGIN.sub("", str(error)).strip().rstrip(":")
        raise InvalidSchema(f"xgrammar does not take this schema: {reason}") from error


def parse_object(text: str, schema: Any) -> Any:
    """Return the object of a JSON text: an instance of a class; for a JSON schema, plain values.

    A text that was cut off raises IncompleteObject; one that the schema or a validator rejects, InvalidObject.
    """
    value = check_complete(text)
    if isinstance(schema, str | Mapping):
        validate_value(value, json_schema(schema))
        return value
    adapter = _type_adapter(schema)
    try:
        return adapter.validate_json(text)
    except ValueError as error:  # of pydantic
        raise InvalidObject(f"expected JSON of {shown(schema)}, got {text!r}: {error}") from error


def check_complete(text: str) -> Any:
    """Return the object of a JSON text, or raise IncompleteObject: it was cut off."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise IncompleteObject(f"expected a complete JSON text, got {text!r}: {error}") from error
    return value


def _type_adapter(schema: Any) -> Any:
    require_extra("pydantic", "structured")
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(schema)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise InvalidSchema(f"expected a type of which pydantic knows a JSON schema, got {shown(schema)}") from error


def validate_value(value: Any, schema: Mapping[str, Any]) -> None:
    """Validate the object of a JSON text, or raise InvalidObject; or as `check_json_schema`."""
    validator = check_json_schema(schema)
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(validator.iter_errors(value))
    except (Unresolvable, re.error, OverflowError, RecursionError) as unusable:
        raise InvalidSchema(f"expected a JSON schema, got one that is none: {unusable}") from unusable
    if error is not None:
        raise InvalidObject(f"expected JSON of the schema, got {value!r}: {error.message} ({error.validator})")


def check_json_schema(schema: Mapping[str, Any]) -> Any:
    """Return the validator of a JSON schema in its dialect, or raise InvalidSchema. Nothing is fetched."""
    require_extra("jsonschema", "structured")
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    named = schema.get("$schema")
    dialect = validator_for({"$schema": named if isinstance(named, str) else ""}, default=Draft202012Validator)
    try:
        dialect.check_schema(schema)
    except (SchemaError, OverflowError, RecursionError) as error:
        raise InvalidSchema(f"expected a JSON schema, got none: {getattr(error, 'message', error)}") from error
    return dialect(schema, registry=Registry())
