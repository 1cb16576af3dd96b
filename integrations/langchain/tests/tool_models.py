"""Tools, a chat template that knows them, models made to write what a test wants, and answers compared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Annotated, Any

import torch
from invariant_rag import InvariantModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from transformers import LogitsProcessor

from .shared import ORDERS

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}
<think>
{{ message.reasoning_content }}
</think>
{%- endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{%- endif %}"""
"""As many models have it: tools, calls, results in a role of their own, reasoning, and a variable."""


@tool
def search(query: Annotated[str, Field(max_length=8)], limit: Annotated[int, Field(ge=0, le=9)]) -> str:
    """Search the harbour's records."""
    return f"found {limit} of {query}"


@tool
def now() -> str:
    """Tell the time."""
    return "noon"


class Departure(BaseModel):
    """When something leaves."""

    vessel: str = Field(max_length=8)
    hour: int = Field(ge=0, le=23)


class Writing(LogitsProcessor):
    """Makes a model write a text, as far as it may; then it goes on as it likes.

    Args:
        lm: The model.
        texts: What to write in one generation after the other; nothing in those behind the last.
    """

    def __init__(self, lm: InvariantModel, *texts: str) -> None:
        self.waiting = [lm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.tokens: list[int] = []
        self.seen: list[int] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = input_ids[0].tolist()
        if ids[:-1] != self.seen:  # another generation: nothing is left of the one before
            self.tokens = self.waiting.pop(0) if self.waiting else []
        self.seen = ids
        if self.tokens:
            scores = scores.clone()
            scores[0, self.tokens.pop(0)] = scores.max() + 100
        return scores


WRITTEN = '<tool_call>\n{"name": "search", "arguments": {"query": "ferry", "limit": 3}}\n</tool_call>'


def joined(chunks: Iterable[Any]) -> AIMessageChunk:
    """Add the chunks of a stream up to one message."""
    total = reduce(add, chunks)
    assert isinstance(total, AIMessageChunk)
    return total


def awaited_stream(pieces: Any) -> list[Any]:
    """Return what an asynchronous stream yields."""

    async def collected() -> list[Any]:
        return [piece async for piece in pieces]

    return asyncio.run(collected())


def said(message: BaseMessage) -> dict[str, Any]:
    """Return what must be the same however a message was asked for."""
    assert isinstance(message, AIMessage)
    calls, invalid = ([dict(sorted(each.items())) for each in kind]
                      for kind in (message.tool_calls, message.invalid_tool_calls))  # fmt: skip
    names = ("content", "additional_kwargs", "usage_metadata", "response_metadata")
    return {**{name: getattr(message, name) for name in names}, "calls": calls, "invalid": invalid}


SOME_ORDERS = [ORDERS[0], ORDERS[3], ORDERS[5]]
"""As they are listed, turned, and reversed: each begins with another document."""


def distinct(ask: Callable[[list[Any]], Any], orders: Sequence[list[Any]] = ORDERS) -> int:
    """Count the different answers over orders of the documents: over every one, unless told."""
    return len({repr(ask(order)) for order in orders})


def ended(lm: InvariantModel, text: str) -> dict[str, Any]:
    """Return the options of a call in which the model writes a text and ends."""
    end = lm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    return {"eos_token_id": end, "logits_processor": [Writing(lm, f"{text}<|im_end|>")]}
