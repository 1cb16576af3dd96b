"""Objects as answers: the request for one in a prompt, and objects that are parsed while they are being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from pydantic_core import from_json

from invariant_rag.generation.json_schema import parse_object

T = TypeVar("T", bound=BaseModel)


def asked_for_object(messages: Sequence[ChatMessage], output_cls: type[BaseModel]) -> list[ChatMessage]:
    """Return messages that end with the schema of the object that is wanted. The ones given stay as they are."""
    schema = PydanticOutputParser(output_cls).get_format_string(escape_json=False)
    last = ChatMessage(role=messages[-1].role, blocks=[*messages[-1].blocks, TextBlock(text=schema)])
    return [*messages[:-1], last]


class GrowingObject(Generic[T]):
    """Parses an object from JSON that is still being written.

    Args:
        output_cls: The class of the object.
    """

    def __init__(self, output_cls: type[T]) -> None:
        self._output_cls = output_cls
        self._partial_cls = create_flexible_model(output_cls)
        self._before: Any = None

    def read(self, text: str, *, whole: bool) -> Iterator[T | FlexibleModel]:
        """Yield what the text says, if that is more than before: an object without checks, or the whole one at last.

        Args:
            text: All that was written so far.
            whole: Whether nothing follows.

        Raises:
            InvalidObject: The class rejects the whole object.
        """
        if whole:
            yield parse_object(text, self._output_cls)
            return
        found = from_json(text, allow_partial="trailing-strings") if text.strip() else None
        if isinstance(found, dict) and found != self._before:
            self._before = found
            yield self._partial_cls.model_validate(found)
