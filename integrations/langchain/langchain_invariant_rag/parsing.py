"""Output parsers of structured output: whole answers are validated, growing ones are parsed as far as they go."""

from __future__ import annotations

from typing import Any

from invariant_rag.generation.json_schema import json_schema, parse_object
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


class ObjectParser(PydanticOutputParser[BaseModel]):
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


class SchemaParser(JsonOutputParser):
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
