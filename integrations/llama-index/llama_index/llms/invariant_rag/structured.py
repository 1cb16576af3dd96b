"""Answers that are objects: decoding that can only write JSON of a schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from pydantic_core import from_json

from invariant_rag import InvariantModel
from invariant_rag.errors import InvariantRAGError, TokenizerRequired, UnsupportedCombination

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from xgrammar import CompiledGrammar


T = TypeVar("T", bound=BaseModel)


class IncompleteObject(InvariantRAGError, ValueError):
    """The answer ended before the object was complete."""

    hint = "Give more max_tokens, or bound the schema: max_length, le, Literal, fewer fields."


def asked_for_object(messages: Sequence[ChatMessage], output_cls: type[BaseModel]) -> list[ChatMessage]:
    """Return messages that end with the schema of the object that is wanted. The ones given stay as they are."""
    schema = PydanticOutputParser(output_cls).get_format_string(escape_json=False)
    last = ChatMessage(role=messages[-1].role, blocks=[*messages[-1].blocks, TextBlock(text=schema)])
    return [*messages[:-1], last]


class GrowingObject(Generic[T]):
    """Reads an object from JSON that is still being written.

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
        """
        if whole:
            yield self._output_cls.model_validate_json(text)
            return
        found = from_json(text, allow_partial="trailing-strings") if text.strip() else None
        if isinstance(found, dict) and found != self._before:
            self._before = found
            yield self._partial_cls.model_validate(found)


def schema_options(model: InvariantModel, output_cls: type[BaseModel]) -> dict[str, Any]:
    """Return keywords for `generate` under which it can write nothing but JSON of the schema of `output_cls`.

    Raises:
        TokenizerRequired: The model has no tokenizer.
        UnsupportedCombination: xgrammar, which does this, is not installed.
    """
    if model.tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: an object is written as text")
    vocabulary = model.model.config.get_text_config(decoder=True).vocab_size
    grammar, stops = _compiled(model.tokenizer, vocabulary, output_cls)
    from xgrammar.contrib.hf import LogitsProcessor

    class Fresh(LogitsProcessor):
        """A processor whose copy starts anew: a routed model writes two texts."""

        def __deepcopy__(self, memo: dict[int, Any]) -> Fresh:
            return Fresh(grammar)

    return {"logits_processor": [Fresh(grammar)], "eos_token_id": stops}


@lru_cache(maxsize=32)
def _compiled(
    tokenizer: PreTrainedTokenizerBase, vocabulary: int, output_cls: type[BaseModel]
) -> tuple[CompiledGrammar, list[int]]:
    """Return the grammar of a schema over a vocabulary, and the tokens that end a text."""
    try:
        from xgrammar import GrammarCompiler, TokenizerInfo
    except ImportError as error:
        raise UnsupportedCombination(
            "output_cls needs xgrammar, which is not installed",
            hint="pip install 'llama-index-llms-invariant-rag[structured]'",
        ) from error
    tokens = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
    return GrammarCompiler(tokens).compile_json_schema(output_cls, any_whitespace=False), list(tokens.stop_token_ids)
