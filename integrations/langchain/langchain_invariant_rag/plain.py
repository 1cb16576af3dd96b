"""Messages for models that know of no segments: every set in an order of its own, and segments as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from invariant_rag.api_models import canonical_parts, drawn_orders, plain_text
from invariant_rag.orderings import Ordering
from invariant_rag.segments import Segment
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue, StringPromptValue

from langchain_invariant_rag.documents import to_segments
from langchain_invariant_rag.messages import is_document_list, is_segment_block, parse_content, parse_marked_text
from langchain_invariant_rag.prompts import SegmentsPlaceholder

_TEXT_KEYS = {"type", "text", "id"}


@dataclass(frozen=True)
class Requests:
    """Writes what to ask a model, so that the order in which segments were listed does not show.

    Attributes:
        ordering: Which segment stands where, by content.
        votes: How many requests to write, each with the segments in another order.
        seed: What these orders are drawn with. The first is that of the ordering.
    """

    ordering: str | Ordering = "lexical"
    votes: int = 1
    seed: int = 0

    def of(self, model_input: Any, documents: Iterable[Any] | None = None) -> list[Any]:
        """Return requests: texts for a text, and lists of messages for messages.

        Args:
            model_input: What language models of LangChain take.
            documents: Further segments: in front of the text, or of what the user said last.
        """
        if isinstance(model_input, str | StringPromptValue):
            text = model_input if isinstance(model_input, str) else model_input.text
            parts = [*to_segments(documents or []), *parse_marked_text(text)]
            return ["".join(map(plain_text, listed)) for listed in self._listed(parts, _said(parts))]
        given = model_input.to_messages() if isinstance(model_input, PromptValue) else convert_to_messages(model_input)
        return self.of_messages(given, documents)

    def of_messages(
        self, messages: Sequence[BaseMessage], documents: Iterable[Any] | None = None
    ) -> list[list[BaseMessage]]:
        """Return requests; see `of`."""
        if documents is not None:
            messages = _with_documents(messages, documents)
        owned = list(_owned(messages))
        asked = max((place for place, each in enumerate(messages) if isinstance(each, HumanMessage)), default=None)
        query = _said(part for owner, part in owned if owner == asked)
        requests = []
        for listed in self._listed([part for _, part in owned], query):
            parts: list[list[Any]] = [[] for _ in messages]
            for (owner, _), part in zip(owned, listed, strict=True):
                if owner is not None:
                    parts[owner].append(part)
            requests.append(list(map(_written, messages, parts)))
        return requests

    def _listed(self, parts: Sequence[Any], query: str) -> list[list[Any]]:
        return drawn_orders(canonical_parts(parts, self.ordering, query), self.votes, self.seed)


class _Wall:
    """Stands between two sets that do not become one."""


def _said(parts: Iterable[Any]) -> str:
    return "".join(part for part in parts if isinstance(part, str)).strip()


def _text(content: Iterable[Any]) -> str:
    texts = (each.get("text", "") if isinstance(each, Mapping) else each for each in content)
    return "".join(text for text in texts if isinstance(text, str))


def _with_documents(messages: Sequence[BaseMessage], documents: Iterable[Any]) -> list[BaseMessage]:
    """Put documents in front of what the user said last."""
    said = [index for index, message in enumerate(messages) if isinstance(message, HumanMessage)]
    place = said[-1] if said else len(messages)
    placed = SegmentsPlaceholder("documents").format_messages(documents=documents)
    return [*messages[:place], *placed, *messages[place:]]


def _owned(messages: Sequence[BaseMessage]) -> Iterator[tuple[int | None, Any]]:
    """Yield every part with its message. Sets reach across messages of one role, but for what tools returned."""
    before: BaseMessage | None = None
    for place, message in enumerate(messages):
        if type(message) is not type(before) or isinstance(message, ToolMessage):
            yield None, _Wall()
        for part in _parts(message):
            yield place, part
        before = message


def _parts(message: BaseMessage) -> Iterator[Any]:
    """Yield texts, segments, and whatever else there is in a message."""
    if isinstance(message, AIMessage):
        yield _Wall()
    elif isinstance(message, ToolMessage) and is_document_list(message.artifact):
        yield from to_segments(message.artifact)
    else:
        yield from _content(message.content)


def _content(content: str | Sequence[str | Mapping[str, Any]]) -> Iterator[Any]:
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str) or is_segment_block(block):
            yield from parse_content([block])
        elif block.get("type") == "text":
            found = list(parse_content([block]))
            marked = found != [block["text"]]
            yield from found if marked or set(block) <= _TEXT_KEYS else [block]
        else:
            yield block


def _written(message: BaseMessage, parts: Sequence[Any]) -> BaseMessage:
    """Return a message of these parts: as a string where there is only text, else as content blocks."""
    given = [message.content] if isinstance(message.content, str) else message.content
    unmarked = not any(isinstance(part, Segment) for part in parts) and _text(parts) == _text(given)
    if isinstance(message, AIMessage) or unmarked:
        return message
    blocks: list[Any] = []
    for part in parts:
        text = plain_text(part) if isinstance(part, str | Segment) else None
        if text is not None and blocks and isinstance(blocks[-1], str):
            blocks[-1] += text
        else:
            blocks.append(part if text is None else text)
    whole = blocks[0] if len(blocks) == 1 and isinstance(blocks[0], str) else None
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in blocks]
    changed: dict[str, Any] = {"content": content if whole is None else whole}
    if isinstance(message, ToolMessage):
        changed["artifact"] = None  # it lists the documents too
    return message.model_copy(update=changed)
