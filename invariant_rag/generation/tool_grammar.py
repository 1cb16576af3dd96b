"""What a model may write as calls of tools: literal tokens of its own format, and JSON of each tool's schema.

An answer with calls is `opening JSON (separator JSON)* closing`. The literals are tokenized as the chat template's text
is, so that markers are the tokens that the model was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from invariant_rag.generation.grammar import GrammarText, Vocabulary
from invariant_rag.generation.json_schema import json_schema
from invariant_rag.prompts import CallFormat, Tool, tokenize_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Opening:
    """A literal after which JSON follows.

    Attributes:
        first: Tokens of the literal at the beginning of an answer.
        resumed: Tokens of its rest, after the trigger.
        again: Tokens from the end of a call's JSON to the JSON of the next call. None: no further calls.
        json: The text of the JSON, which has not begun; it is copied, never advanced.
        shortest: The fewest tokens of the JSON.
    """

    first: tuple[int, ...]
    resumed: tuple[int, ...]
    again: tuple[int, ...] | None
    json: GrammarText
    shortest: int


@dataclass(frozen=True)
class CallGrammar:
    """The calls that an answer may hold.

    Attributes:
        words: The vocabulary.
        trigger: Bytes with which a call begins.
        anchored: Whether it only begins at the start of an answer.
        openings: What may open a call: one per tool, or one for all of them.
        closing: Tokens after the JSON of the last call.
    """

    words: Vocabulary
    trigger: bytes
    anchored: bool
    openings: tuple[Opening, ...]
    closing: tuple[int, ...]

    def at_trigger(self, before: bytes) -> tuple[list[int], list[int]]:
        """Return the tokens that complete the trigger after a part of it, and those that go beyond it.

        Args:
            before: The part of the trigger that is written.
        """
        return self.words.at_marker(self.trigger, before, anchored=self.anchored)


def call_grammar(
    words: Vocabulary, tokenizer: PreTrainedTokenizerBase, written: CallFormat, tools: Sequence[Tool], before: str = ""
) -> CallGrammar:
    """Return the grammar of calls.

    Args:
        words: The vocabulary.
        tokenizer: The tokenizer.
        written: The format.
        tools: The tools that may be called; at least one.
        before: Text to write before the first call, such as the end of the reasoning.

    Raises:
        InvalidSchema: A schema of parameters uses what xgrammar does not know.
    """

    def ids(text: str) -> tuple[int, ...]:
        return tokenize_text(text, tokenizer)

    keys = written.object_keys
    if keys:
        cut = len(f'{{"{keys[0]}": "')
        literals = [(written.begin[:-cut], _objects_schema(tools, *keys))]
        between = None if written.between is None else written.between[1:-cut]
        closing = written.end[1:]
    else:
        literals = [(f"{written.begin}{tool.name}{written.middle}", json_schema(_parameters(tool))) for tool in tools]
        between, closing = written.between, written.end
    openings = []
    for tool, (literal, schema) in zip(tools, literals, strict=False):
        resumed = literal[literal.index(written.trigger) + len(written.trigger) :]
        again = between if between is None or keys else f"{between}{tool.name}{written.middle}"
        text = GrammarText(words, json.dumps(schema))
        first = ids(before + literal.lstrip())
        openings.append(
            Opening(first, ids(resumed), None if again is None else ids(again), text, len(text.ending() or ()))
        )
    return CallGrammar(words, written.trigger.encode(), written.anchored, tuple(openings), ids(closing))


def _parameters(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **tool.parameters}


def _objects_schema(tools: Sequence[Tool], name_key: str, arguments_key: str) -> dict[str, Any]:
    """Return the schema of an object with a tool's name and its arguments."""
    definitions = {f"tool{index}": _moved(_parameters(tool), f"tool{index}") for index, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {name_key: {"const": tool.name}, arguments_key: {"$ref": f"#/$defs/tool{index}"}},
            "required": [name_key, arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return json_schema({"$defs": definitions, **({"anyOf": calls} if len(calls) > 1 else calls[0])})


def _moved(node: Any, place: str) -> Any:
    """Return a schema whose references to itself hold when it is a definition in another."""
    if isinstance(node, list | tuple):
        return [_moved(each, place) for each in node]
    if not isinstance(node, Mapping):
        return node
    reference = node.get("$ref")
    moved = {key: each if key in ("const", "enum", "default") else _moved(each, place) for key, each in node.items()}
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{place}{reference[1:]}"
    return moved
