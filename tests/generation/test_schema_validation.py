"""Validation with JSON schemas from anywhere: what they say holds, nothing is fetched, and it ends."""

from __future__ import annotations

import socket
from time import monotonic
from typing import Any

import pytest

from invariant_rag.errors import InvalidObject, InvalidSchema
from invariant_rag.generation import schema_validation
from invariant_rag.generation.json_schema import parse_object
from invariant_rag.generation.schema_validation import validate_value

SLOW = r"^(a|a)*$"
NAMES = {"patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        (True, {"not": {"type": "object"}, "const": 1}, "1 was expected"),
        ({"x-a": 1}, NAMES, "1 is not of type 'string'"),
        ({"a": "1"}, NAMES, "'1' is not of type 'integer'"),
        ({"b": 1}, {"properties": {"a": {}}, "additionalProperties": False}, "does not allow 1"),
        ("ab", {"pattern": "^a$"}, r"'ab' does not match '\^a\$'"),
        ([1, 1], {"uniqueItems": True}, "non-unique"),
        ({"a": 1}, {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}, "type 'null'"),
    ],
)
def test_values_that_break_a_schema_are_errors(value: Any, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidObject, match=said):
        validate_value(value, schema)


def test_values_that_follow_a_schema_pass() -> None:
    validate_value({"x-a": "1", "b": 2}, NAMES)
    validate_value({"$schema": 1}, {"$schema": "http://json-schema.org/draft-07/schema#", "required": ["$schema"]})


def test_nothing_is_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/schema.json"
        with pytest.raises(InvalidSchema, match="schema"):
            validate_value(1, {"$ref": address})
        with pytest.raises(TimeoutError):
            listening.accept()


FAN = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
ESCAPING = {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": SLOW}


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("a" * 60 + "!", {"pattern": SLOW}),
        ("a" * 60 + "!", {"allOf": [ESCAPING]}),
        ({"a" * 60 + "!": 1}, {"patternProperties": {SLOW: {}}}),
        ({"a" * 60 + "!": 1}, {"patternProperties": {SLOW: {}}, "additionalProperties": False}),
        (1, {"$ref": "#/$defs/d0", "$defs": {**FAN, "d60": {}}}),
        (1, {"$ref": "#"}),
    ],
    ids=["pattern", "another dialect", "names", "other names", "references that fan out", "a circle"],
)
def test_schemas_that_never_end_are_errors(value: Any, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_validation, "MOST_SECONDS", 0.2)
    start = monotonic()
    with pytest.raises(InvalidSchema, match="seconds"):
        validate_value(value, schema)
    assert monotonic() - start < 5


@pytest.mark.parametrize(
    "schema",
    [
        {"type": []},
        {"pattern": "("},
        {"pattern": "a{" + "9" * 20 + "}"},
        {"$ref": "#/$defs/nowhere"},
        {"patternProperties": {"a": {}}, "unevaluatedProperties": False},
    ],
)
def test_what_is_no_schema_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchema):
        parse_object('"a"', schema)
