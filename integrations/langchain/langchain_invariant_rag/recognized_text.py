"""Texts of completion models, with the sets of segments that were recognised in them."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Self

from invariant_rag.prompts import Recognition, mark
from invariant_rag.segments import Prompt, Segment, SegmentSet, document_rendering
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompt_values import PromptValue
from pydantic import SkipValidation

from langchain_invariant_rag.turns import to_turns


class RecognizedText(str):  # noqa: SLOT000 - it has attributes
    """A text whose segments are known. The text itself is a key of caches, and what callbacks see.

    Attributes:
        prompt: The prompt.
        recognized: Whether everything in it was understood.
    """

    prompt: Prompt
    recognized: bool

    @classmethod
    def of(cls, recognition: Recognition, *, sort: bool) -> Self:
        """Write a recognised conversation of one turn.

        Args:
            recognition: The turn.
            sort: Whether to list segments by content, so that the same set in another order is the same text. Sets with
                running numbers keep the order given: an answer may name the numbers.
        """
        (turn,) = recognition.turns
        parts = [_sorted(part) if sort and isinstance(part, SegmentSet) else part for part in turn.parts]
        text = cls("".join(_set_text(part) if isinstance(part, SegmentSet) else part for part in parts))
        text.prompt = Prompt.of(*parts, rendering=document_rendering).to_complete()
        text.recognized = not recognition.findings
        return text


class RecognizedValue(PromptValue):
    """A prompt that holds a recognised text."""

    text: Annotated[str, SkipValidation]

    def to_string(self) -> str:
        """Return the text."""
        return self.text

    def to_messages(self) -> list[BaseMessage]:
        """Return the text as a message."""
        return [HumanMessage(content=self.text)]


def _sorted(segments: SegmentSet) -> SegmentSet:
    if segments.slots is not None and any(slot.number for slot in segments.slots):
        return segments
    listed = sorted(segments, key=attrgetter("canonical_key"))
    return SegmentSet(listed, slots=segments.slots)


def _set_text(segments: SegmentSet) -> str:
    """Return a set as text in which the boundaries of segments show, so that no other prompt has the same text."""
    bounded = [replace(each, text=mark(each, nonce="")) for each in segments]
    if segments.slots is None:
        return "".join(each.text for each in bounded)
    return "".join(slot.render(each) for slot, each in zip(segments.slots, bounded, strict=True))


def marked_message(message: BaseMessage) -> BaseMessage:
    """Return a message whose documents are marked segments in its text."""
    if isinstance(message, AIMessage):
        return message
    (turn,) = to_turns([message])
    texts = [mark(part) if isinstance(part, Segment) else part for part in turn.parts]
    return message.model_copy(update={"content": "".join(each for each in texts if isinstance(each, str))})
