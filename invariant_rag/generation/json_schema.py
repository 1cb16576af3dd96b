"""JSON schemas for constrained decoding, and validation of what was decoded.

A grammar knows strings by their patterns, not by their meaning: it would allow the 31st of February and a URL without a
host. Therefore known `format`s become patterns of which every text can be parsed. They are narrower than the standards:
`uri` is http(s) with a domain name, and leap days do not occur.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import ExtraRequired, IncompleteObject, InvalidObject, InvalidSchema
from invariant_rag.files import parse_json
from invariant_rag.generation.schema_validation import LITERALS, validate_value
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

_DATE = (
    r"[1-9]\d{3}-((0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"  # any but 02-29
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?"
_ZONE = r"(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-z0-9]{1,30}(-[a-z0-9]{1,30})?"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_IPV6 = r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|::([0-9a-f]{1,4}(:[0-9a-f]{1,4}){0,5})?"
_PATH = r"[A-Za-z0-9._~!$&()*+,;=:@-]"
_HOST = rf"({_LABEL}\.){{1,3}}[a-z]{{2,12}}(:[1-9]\d{{1,3}})?"
_PLACE = rf"{_HOST}(/{_PATH}{{0,64}}){{0,8}}(\?{_PATH}{{0,128}})?(#{_PATH}{{0,64}})?"
_HEX = "[0-9a-f]"
_DURATION = r"P(\d{1,4}D(T\d{1,4}[HMS])?|T\d{1,4}(H(\d{1,4}M)?(\d{1,4}S)?|M(\d{1,4}S)?|S)|\d{1,3}W)"


def _uuid(version: str = _HEX) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"


PATTERNS = {
    "base64": "([A-Za-z0-9+/]{4})*",
    "base64url": "([A-Za-z0-9_-]{4})*",
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "duration": _DURATION,
    # domains that are reserved for special use end with other words
    "email": rf"[A-Za-z0-9]{{1,20}}([._+-][A-Za-z0-9]{{1,20}}){{0,2}}@({_LABEL}\.){{1,3}}([a-z]{{2,3}}|info|name)",
    "hostname": rf"({_LABEL}\.){{0,3}}[a-z]{{2,12}}",
    "ipv4": _IPV4,
    "ipv4interface": rf"{_IPV4}/(3[0-2]|[12]?\d)",
    "ipv4network": rf"{_IPV4}/32",
    "ipv6": _IPV6,
    "ipv6interface": rf"({_IPV6})/(12[0-8]|1[01]\d|[1-9]?\d)",
    "ipv6network": rf"({_IPV6})/128",
    "ipvanyaddress": rf"{_IPV4}|{_IPV6}",
    "ipvanyinterface": rf"{_IPV4}/(3[0-2]|[12]?\d)",
    "ipvanynetwork": rf"{_IPV4}/32",
    "regex": "[A-Za-z0-9_ ]*",
    "time": f"{_TIME}{_ZONE}?",
    "uri": f"https?://{_PLACE}",
    "uuid": _uuid(),
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
}

_ORIGIN = re.compile(r"\[[\d:]+\] \S+?:\d+: (?:Check failed: (?=\())?")  # time and place in xgrammar's source
_OPTIONAL_GROUP = re.compile(r"(\\.|\[(?:\\.|[^\]\\])*\])|\)\?")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def json_schema(schema: Any) -> dict[str, Any]:
    """Return the JSON schema of a pydantic class, or of any other type that pydantic knows, for constrained decoding.

    Args:
        schema: A pydantic class, a type, a JSON schema as a dict, or one as a string. Known formats become patterns.

    Raises:
        InvalidSchema: It is no schema, and there is none for this type.
    """
    if isinstance(schema, str):
        try:
            schema = parse_json(schema)
        except ValueError as error:
            raise InvalidSchema(f"expected a JSON schema, got a string that is no JSON: {error}") from error
    if isinstance(schema, Mapping):
        try:
            found: dict[str, Any] = _with_patterns(dict(schema))
            json.dumps(found)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidSchema(f"expected a JSON schema, got what is no JSON: {error}") from error
        return found
    if isinstance(schema, bool | int | float | list | tuple | None):
        raise InvalidSchema(f"expected a JSON schema or a type, got {shown(schema)}")
    return _with_patterns(_type_adapter(schema).json_schema(schema_generator=_generator()))  # type: ignore[no-any-return]


def compile_tag(compiler: Any, tag: str) -> Any:
    """Compile a structural tag with a `GrammarCompiler` of xgrammar.

    Raises:
        InvalidSchema: It does not take the schema.
    """
    try:
        return compiler.compile_structural_tag(tag)
    except RuntimeError as error:
        said = _ORIGIN.sub("", str(error)).strip().rstrip(":")
        raise InvalidSchema(f"xgrammar does not take this schema: {said}") from error


def parse_object(text: str, schema: Any) -> Any:
    """Parse a text as JSON and validate it.

    Args:
        text: What the model wrote.
        schema: What `json_schema` takes.

    Returns:
        An instance of the class; for a JSON schema, what the JSON says.

    Raises:
        IncompleteObject: The text is no JSON: it was cut off.
        InvalidObject: It does not satisfy the schema, or a validator of the class rejects it.
        InvalidSchema: The schema is none, refers to what is elsewhere, or takes too long.
        ExtraRequired: jsonschema is not installed, and there is no class that validates.
    """
    value = check_complete(text)
    if isinstance(schema, str | Mapping):
        validate_value(value, parse_json(schema) if isinstance(schema, str) else schema)
        return value
    from pydantic import ValidationError as RejectedByClass

    try:
        return _type_adapter(schema).validate_json(text)
    except RejectedByClass as error:
        raise InvalidObject(f"expected JSON of {_name(schema)}, got {text!r}: {error}") from error


def check_complete(text: str) -> Any:
    """Return what a JSON text says.

    Raises:
        IncompleteObject: It is no JSON: it was cut off.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IncompleteObject(f"expected a complete JSON text, got {text!r}: {error}") from error


def _name(schema: Any) -> str:
    return str(getattr(schema, "__name__", schema))


def _type_adapter(schema: Any) -> TypeAdapter[Any]:
    try:
        from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter
    except ImportError as error:
        raise ExtraRequired("pydantic", "structured") from error
    try:
        return TypeAdapter(schema)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise InvalidSchema(f"expected a type of which pydantic knows a JSON schema, got {_name(schema)}") from error


def _with_patterns(node: Any) -> Any:
    """Return a schema in which known formats of strings are patterns."""
    if isinstance(node, list):
        return [_with_patterns(each) for each in node]
    if not isinstance(node, dict):
        return node
    replaced: dict[str, Any] = {}
    for name, value in node.items():
        if name in _NAMED and isinstance(value, dict):
            replaced[name] = {key: _with_patterns(each) for key, each in value.items()}
        else:
            replaced[name] = value if name in LITERALS else _with_patterns(value)
    if isinstance(node.get("pattern"), str):
        replaced["pattern"] = _for_xgrammar(node["pattern"])
    pattern = PATTERNS.get(str(node.get("format")))
    if pattern is None or node.get("type") != "string":
        return replaced
    kept = {name: value for name, value in replaced.items() if name not in ("format", "minLength", "maxLength")}
    return {**kept, **_text(pattern)}


@cache
def _generator() -> type[GenerateJsonSchema]:
    """Return pydantic's generator of JSON schemas, extended by what `format` does not say.

    That is: digits of a Decimal, whether a datetime has a time zone, past and future, and which schemes a URL may have.
    """
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> dict[str, Any]:
            if any(name in schema for name in ("ge", "gt", "le", "lt", "multiple_of")):
                number: dict[str, Any] = super().decimal_schema(schema)["anyOf"][0]
                return number
            places = schema.get("decimal_places", min(schema.get("max_digits", 12), 6))
            whole = schema.get("max_digits", places + 9) - places
            tail = rf"(\.\d{{1,{places}}})?" if places else ""
            return _text(rf"-?(0|[1-9]\d{{0,{whole - 1}}}){tail}" if whole > 0 else rf"-?0\.\d{{1,{places}}}")

        def date_schema(self, schema: Any) -> dict[str, Any]:
            return _text(_in_years(_DATE, schema))

        def datetime_schema(self, schema: Any) -> dict[str, Any]:
            zone = {"naive": "", "aware": _ZONE}.get(schema.get("tz_constraint"), f"{_ZONE}?")
            return _text(_in_years(f"{_DATE}T{_TIME}{zone}", schema))

        def url_schema(self, schema: Any) -> dict[str, Any]:
            schemes = schema.get("allowed_schemes") or ["https?"]
            return _text(f"({'|'.join(schemes)})://{_PLACE}")

    return Generator


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": _for_xgrammar(f"^({pattern})$")}


def _for_xgrammar(pattern: str) -> str:
    r"""Write optional groups with counts: xgrammar 0.2 lets `a(b+)?` match `bb` too where the group ends with a loop.

    >>> _for_xgrammar(r"a(b+)?[)?]\)?")
    'a(b+){0,1}[)?]\\)?'
    """
    return _OPTIONAL_GROUP.sub(lambda found: found[1] or "){0,1}", pattern)


def _in_years(pattern: str, schema: Mapping[str, Any]) -> str:
    """Move a pattern that begins with a year into the past or the future."""
    first = {"past": "1", "future": "[3-9]"}.get(str(schema.get("now_op")), "[1-9]")
    return pattern.replace("[1-9]", first, 1)
