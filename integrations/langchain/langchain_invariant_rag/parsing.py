"""The output parser of structured output: whole answers are validated, growing ones are parsed as far as they go."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from invariant_rag.errors import InvalidSchema
from invariant_rag.generation.json_schema import check_complete, json_schema, parse_object
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.outputs import Generation
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel
from pydantic.v1 import BaseModel as OldModel


class ObjectParser(JsonOutputParser):
    """Parses instances of a pydantic class, also of `pydantic.v1`, or dicts that a TypedDict or JSON schema describes.

    A stream is parsed as far as it goes, and raises where it ends too early.
    """

    target: Any
    """The class or the schema."""

    def get_json_schema(self) -> dict[str, Any]:
        """Return what decoding follows, or raise `InvalidSchema`."""
        try:
            modern = _is_class(self.target, BaseModel)
            return json_schema(self.target) if modern else convert_to_json_schema(self.target)
        except ValueError as error:
            raise InvalidSchema(str(error)) from error

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return what an answer says. Of a part of one: a dict as far as it goes, or an instance if it is enough."""
        modern, old = (_is_class(self.target, kind) for kind in (BaseModel, OldModel))
        if not partial:
            found = parse_object(result[0].text, self.target if modern else self.get_json_schema())
            return self.target.parse_obj(found) if old else found
        found = super().parse_result(result, partial=True)
        try:
            return self.target.model_validate(found) if modern else self.target.parse_obj(found) if old else found
        except ValueError:  # as far as it goes, it is no instance
            return None

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:  # noqa: A002
        seen: list[str] = []
        yield from super()._transform(_noted(each, seen) for each in input)
        check_complete("".join(seen))

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:  # noqa: A002
        seen: list[str] = []
        async for found in super()._atransform(_noted(each, seen) async for each in input):
            yield found
        check_complete("".join(seen))


def _is_class(target: Any, kind: type) -> bool:
    return isinstance(target, type) and issubclass(target, kind)


def _noted(piece: str | BaseMessage, seen: list[str]) -> str | BaseMessage:
    seen.append(piece.text if isinstance(piece, BaseMessage) else piece)
    return piece


def response_schema(response_format: Mapping[str, Any] | type) -> str:
    """Return the JSON schema of a response format: a class, a schema, or what LangChain's `ProviderStrategy` writes."""
    if isinstance(response_format, Mapping) and "json_schema" in response_format:
        described = response_format["json_schema"]
        return json.dumps({"title": described.get("name", ""), **described["schema"]})
    return json.dumps(ObjectParser(target=response_format).get_json_schema())
