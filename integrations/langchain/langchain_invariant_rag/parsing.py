"""Output parsers of structured output: whole answers are validated, growing ones are parsed as far as they go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from invariant_rag.generation.json_schema import check_complete, json_schema, parse_object
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import Generation
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel


def object_parser(schema: dict[str, Any] | type) -> ObjectParser | SchemaParser:
    """Return the parser of answers that a schema describes: a pydantic class, a TypedDict, or a JSON schema."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return ObjectParser(pydantic_object=schema)
    return SchemaParser(target=convert_to_json_schema(schema))


class _WholeStream(JsonOutputParser):
    """Parses a stream as far as it goes, and raises where it ends too early."""

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:  # noqa: A002
        seen: list[str] = []
        yield from super()._transform(_noted(each, seen) for each in input)
        check_complete("".join(seen))

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:  # noqa: A002
        seen: list[str] = []
        async for found in super()._atransform(_noted(each, seen) async for each in input):
            yield found
        check_complete("".join(seen))


def _noted(piece: str | BaseMessage, seen: list[str]) -> str | BaseMessage:
    seen.append(piece.text if isinstance(piece, BaseMessage) else piece)
    return piece


class ObjectParser(_WholeStream, PydanticOutputParser[BaseModel]):
    """Parses instances of a pydantic class; those of `pydantic.v1` as LangChain does."""

    def get_json_schema(self) -> dict[str, Any]:
        """Return what decoding follows."""
        if issubclass(self.pydantic_object, BaseModel):
            return json_schema(self.pydantic_object)
        return convert_to_json_schema(self.pydantic_object)

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return an instance. Of a part of an answer: None, unless it is enough for one.

        Raises:
            IncompleteObject: The answer was cut off.
            InvalidObject: The class rejects it.
        """
        if partial or not issubclass(self.pydantic_object, BaseModel):
            return super().parse_result(result, partial=partial)
        return parse_object(result[0].text, self.pydantic_object)


class SchemaParser(_WholeStream):
    """Parses what follows a JSON schema."""

    target: dict[str, Any]

    def get_json_schema(self) -> dict[str, Any]:
        """Return what decoding follows."""
        return self.target

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return what an answer says, or a part of one as far as it goes.

        Raises:
            IncompleteObject: The answer was cut off.
            InvalidObject: It does not satisfy the schema.
        """
        if partial:
            return super().parse_result(result, partial=True)
        return parse_object(result[0].text, self.target)
