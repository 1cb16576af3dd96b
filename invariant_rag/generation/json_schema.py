"""JSON schemas: what decoding can follow, and validation of what was decoded. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import ExtraRequired, IncompleteObject, InvalidObject, InvalidSchema
from invariant_rag.files import parse_json
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_ORIGIN = re.compile(r"\[[\d:]+\] \S+?:\d+: (?:Check failed: (?=\())?")  # time and place in xgrammar's source
_OPTIONAL_GROUP = re.compile(r"(\\.|\[(?:\\.|[^\]\\])*\])|\)\?")
_ESCAPED = re.compile(r'\[\^(?:\\.|[^\]\\])*\]()|["\x00-\x1f]|\\[\\nrtfv0]')  # by JSON, and not by a grammar
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LITERALS = ("const", "default", "enum", "examples", "required")
_ALONE = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")  # xgrammar ignores what is beside them
_BOUNDS = {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"}
_LENGTHS = {"minLength", "maxLength"}
_OF_TYPE = {
    "array": {"items", "maxItems", "minItems", "prefixItems", "unevaluatedItems"},
    "integer": {"multipleOf", *_BOUNDS},
    "number": _BOUNDS,
    "object": {"additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties"}
    | {"propertyNames", "required", "unevaluatedProperties"},
    "string": {"format", "pattern", *_LENGTHS},
}


def json_schema(schema: Any) -> dict[str, Any]:
    """Return a JSON schema: of a pydantic class or another type that pydantic knows, or one given as dict or string.

    Raises:
        InvalidSchema: It is no schema, and there is none for this type.
    """
    if isinstance(schema, str | Mapping):
        try:
            found: dict[str, Any] = parse_json(schema if isinstance(schema, str) else json.dumps(dict(schema)))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidSchema(f"expected a JSON schema, got what is no JSON: {error}") from error
        schema = found if isinstance(found, dict) else None
    if isinstance(schema, dict):
        return schema
    if isinstance(schema, bool | int | float | list | tuple | None):
        raise InvalidSchema(f"expected a JSON schema or a type, got {shown(schema)}")
    return _type_adapter(schema).json_schema()


def check_expressible(schema: Mapping[str, Any]) -> None:
    """Check that a grammar of xgrammar says all that a schema says: what it ignores, an answer could break.

    Raises:
        InvalidSchema: It ignores a keyword, which the message names.
    """
    known = _dialect(schema).VALIDATORS
    for node in _nodes(schema):
        if ignored := _ignored(node, {name for name in node if name in known}):
            raise InvalidSchema(
                f"expected keywords that decoding can follow, got {ignored[0]!r} in {shown(node)}",
                hint="Leave it away, or say it with a type, a pattern, an enum or bounds, one of them at a time.",
            )


def _ignored(node: Mapping[str, Any], names: set[str]) -> list[str]:
    """Return those of the keywords of a schema that its grammar does not say."""
    names -= {"uniqueItems"} if node.get("uniqueItems") is False else set()
    kinds = node.get("type") or [kind for kind in ("array", "object") if _OF_TYPE[kind] & names]
    allowed = {"type"}.union(*(_OF_TYPE.get(kind, set()) for kind in ([kinds] if isinstance(kinds, str) else kinds)))
    if alone := [name for name in _ALONE if name in names]:
        allowed = {alone[0], "type"} if alone[0] in ("const", "enum") else {alone[0]}
    escaped = any(found[1] is None for found in _ESCAPED.finditer(str(node.get("pattern", ""))))
    return [
        *sorted(names - allowed),
        *(["allOf"] if len(node.get("allOf", ())) > 1 else []),
        *(["pattern"] if escaped or {"format", "pattern"} <= names else []),
        *(sorted(names & _LENGTHS) if "pattern" in names else []),
        *(["multipleOf"] if "multipleOf" in names and names & _BOUNDS else []),
        *(["required"] if set(node.get("required", ())) - set(node.get("properties", ())) else []),
    ]


def _nodes(part: Any) -> Iterator[Any]:
    """Yield a schema and those within it."""
    if isinstance(part, list):
        yield from (node for each in part for node in _nodes(each))
    if isinstance(part, dict):
        yield part
        for name, value in part.items():
            inner = [*value.values()] if name in _NAMED and isinstance(value, dict) else value
            yield from () if name in _LITERALS else _nodes(inner)


def json_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of xgrammar for JSON of a schema, with at most one white space between its parts.

    Optional groups of patterns are counted: xgrammar 0.2 lets `a(.b+)?` match `ab`, where the group ends with a loop.
    It ignores lengths beside a format, which is an annotation, so lengths alone are followed then.
    """
    schema = json_schema(schema)
    for node in _nodes(schema):
        if "format" in node and _LENGTHS & node.keys():
            del node["format"]
        if isinstance(node.get("pattern"), str):
            node["pattern"] = _OPTIONAL_GROUP.sub(lambda found: found[1] or "){0,1}", node["pattern"])
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def tag_of(form: Mapping[str, Any]) -> str:
    """Return the structural tag of a format, as JSON. vLLM takes it, too."""
    return json.dumps({"type": "structural_tag", "format": form})


def compile_tag(compiler: Any, tag: str) -> Any:
    """Compile a structural tag with a `GrammarCompiler` of xgrammar, or raise InvalidSchema."""
    try:
        return compiler.compile_structural_tag(tag)
    except RuntimeError as error:
        said = _ORIGIN.sub("", str(error)).strip().rstrip(":")
        raise InvalidSchema(f"xgrammar does not take this schema: {said}") from error


def parse_object(text: str, schema: Any) -> Any:
    """Parse a text as JSON and validate it: an instance of a class; for a JSON schema, what the JSON says.

    Raises:
        IncompleteObject: The text is no JSON: it was cut off.
        InvalidObject: It does not satisfy the schema, or a validator of the class rejects it.
        InvalidSchema: The schema is none, or refers to what is elsewhere.
        ExtraRequired: jsonschema is not installed, and there is no class that validates.
    """
    value = check_complete(text)
    if isinstance(schema, str | Mapping):
        validate_value(value, json_schema(schema))
        return value
    from pydantic import ValidationError as RejectedByClass

    try:
        return _type_adapter(schema).validate_json(text)
    except RejectedByClass as error:
        raise InvalidObject(f"expected JSON of {shown(schema)}, got {text!r}: {error}") from error


def check_complete(text: str) -> Any:
    """Return what a JSON text says, or raise IncompleteObject: it was cut off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IncompleteObject(f"expected a complete JSON text, got {text!r}: {error}") from error


def _type_adapter(schema: Any) -> TypeAdapter[Any]:
    try:
        from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter
    except ImportError as error:
        raise ExtraRequired("pydantic", "structured") from error
    try:
        return TypeAdapter(schema)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise InvalidSchema(f"expected a type of which pydantic knows a JSON schema, got {shown(schema)}") from error


def check_json_schema(schema: Mapping[str, Any]) -> None:
    """Check that something is a JSON schema, as far as its dialect's own schema says, or raise InvalidSchema."""
    dialect = _dialect(schema)
    from jsonschema import SchemaError

    try:
        dialect.check_schema(schema)
    except SchemaError as error:
        raise InvalidSchema(f"expected a JSON schema, got one that is none: {error.message}") from error
    except (OverflowError, RecursionError) as error:
        raise InvalidSchema(f"expected a JSON schema, got one that counts or nests too far: {error}") from error


def validate_value(value: Any, schema: Mapping[str, Any]) -> None:
    """Validate what a JSON text says. References of the schema lead to places within it: nothing is fetched.

    Raises:
        ExtraRequired: jsonschema is not installed.
        InvalidObject: The value does not satisfy the schema.
        InvalidSchema: It is no schema, or refers to what is elsewhere.
    """
    check_json_schema(schema)
    from jsonschema.exceptions import best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(_dialect(schema)(schema, registry=Registry()).iter_errors(value))
    except (Unresolvable, re.error, OverflowError, RecursionError) as unusable:
        raise InvalidSchema(f"expected a JSON schema, got one that is none: {unusable}") from unusable
    if error is not None:
        raise InvalidObject(f"expected JSON of the schema, got {value!r}: {error.message} ({error.validator})")


def _dialect(schema: Mapping[str, Any]) -> Any:
    try:
        from jsonschema.validators import Draft202012Validator, validator_for
    except ImportError as error:
        raise ExtraRequired("jsonschema", "structured") from error
    named = schema.get("$schema")
    return validator_for({"$schema": named if isinstance(named, str) else ""}, default=Draft202012Validator)
