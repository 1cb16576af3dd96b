"""Slots of a prompt: values of template variables, contents of tool messages, content blocks.

A slot is a set of segments if it is nothing but what was retrieved at once; `find_set` of the core decides. Every other
text reaches the model as it came: the user's words, histories, what a model wrote. Where nodes are in a text that is no
set, a warning says so.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import finalize

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import (
    BasePromptTemplate,
    ChatPromptTemplate,
    PromptTemplate,
    RichPromptTemplate,
    SelectorPromptTemplate,
)
from llama_index.core.prompts.default_prompts import DEFAULT_CHOICE_SELECT_PROMPT
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE, CITATION_REFINE_TEMPLATE

from invariant_rag.segments import SegmentSet
from llama_index.llms.invariant_rag.runs import Scope, current_scope

_WORDS = frozenset({"query_str", "query", "question", "existing_answer", "chat_history"})
"""Variables of LlamaIndex's templates that hold what the user or a model wrote."""

_CONTEXT = frozenset({"context_str", "context_msg"})
"""Variables that hold nodes, even if somebody asks with the very same text."""

_TEMPLATES = (CITATION_QA_TEMPLATE.template, CITATION_REFINE_TEMPLATE.template, DEFAULT_CHOICE_SELECT_PROMPT.template)
_STOCK = frozenset(piece for template in _TEMPLATES for piece in re.split(r"\{\w+\}", template))
"""Texts of LlamaIndex's own templates that show numbered documents as examples; nobody retrieved them."""

_NONCE = secrets.token_hex(8)
_PLACE = re.compile(rf"<{_NONCE}:(\d+)>")


@dataclass(frozen=True)
class Part:
    """A piece of text, as far as it is known what it is.

    It is the `value` of a template's variable; `words` of a user or model; text of a `template`; or text that came
    `finished`, of which nothing is known.
    """

    text: str
    kind: Literal["value", "words", "template", "finished"]
    segments: SegmentSet | None = None  # the set that a value is
    block: TextBlock | None = None  # of the message that a finished text is


_KEPT: dict[int, tuple[str, SegmentSet]] = {}
"""Sets that blocks of messages were when they were read first, by the identity of the block; gone with it."""


def find_in(scope: Scope, part: Part) -> SegmentSet | None:
    """Return the set that a finished text is in a run, or was when its block was read first.

    So an agent's next turn knows what its tool retrieved, as long as its memory keeps the messages themselves.
    """
    found = scope.find(part.text)
    if part.block is None:
        return found
    key = id(part.block)
    if found is None:
        text, kept = _KEPT.get(key, ("", None))
        return kept if text == part.text else None
    if key not in _KEPT:
        finalize(part.block, _KEPT.pop, key, None).atexit = False
    _KEPT[key] = part.text, found
    return found


class SetText(str):
    """A value of a template's variable that is declared to be a set: its text, for LLMs that know no segments."""

    __slots__ = ("segments",)
    segments: SegmentSet


class SlotText(str):
    """A text that a template wrote, with its parts."""

    __slots__ = ("parts",)
    parts: tuple[Part, ...]


class SlotBlock(TextBlock):
    """A text block that a template wrote. It is an ordinary one for all but the LLMs of this package."""

    _parts: tuple[Part, ...] = PrivateAttr(default=())


class SlotReader(LLM):
    """The part of an LLM that is given templates and the values of their variables, by `predict` and its like."""

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        """Return the messages of a template; what stands in which variable is told by their blocks."""
        filled = _Filled.of(self, prompt, prompt_args)
        if filled is None:
            return super()._get_messages(prompt, **prompt_args)
        return filled.messages(super()._get_messages(filled.plain), super()._get_messages(filled.placed))

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Return the text of a template; what stands in which variable is told by its parts."""
        filled = _Filled.of(self, prompt, prompt_args)
        if filled is None:
            return super()._get_prompt(prompt, **prompt_args)
        text = SlotText(super()._get_prompt(filled.plain))
        text.parts = filled.parts(text, super()._get_prompt(filled.placed)) or (Part(text, "finished"),)
        return text


@dataclass(frozen=True)
class _Filled:
    """A template with its values, once as they are, once with a place for each."""

    plain: BasePromptTemplate
    placed: BasePromptTemplate
    values: Sequence[Part]

    @classmethod
    def of(cls, llm: LLM, prompt: BasePromptTemplate, given: Mapping[str, Any]) -> _Filled | None:
        """Return None for a kind of template that formats in its own way."""
        template = prompt.select(llm) if isinstance(prompt, SelectorPromptTemplate) else prompt
        if not isinstance(template, PromptTemplate | ChatPromptTemplate | RichPromptTemplate):
            return None
        asked = llm.llm if isinstance(llm, StructuredLLM) else llm
        scope = current_scope() if getattr(asked, "find_documents", True) else None
        plain = template._map_all_vars({**template.kwargs, **given})
        placed, parts = dict(plain), list[Part]()
        for name, value in plain.items():
            # `simple_summarize` gives a list of one text, which Python would write with brackets and escapes.
            text = value[0] if isinstance(value, list) and len(value) == 1 else value
            if not isinstance(text, str):
                continue
            part = _part(name, text, scope)
            if part.segments is None and text is not value:
                continue
            plain[name], placed[name] = text, f"<{_NONCE}:{len(parts)}>"
            parts.append(part)
        return cls(_formatted(template, plain), _formatted(template, placed), parts)

    def messages(self, plain: Sequence[ChatMessage], placed: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return plain messages, whose text blocks tell their parts."""
        if [len(each.blocks) for each in plain] != [len(each.blocks) for each in placed]:
            return list(plain)
        return [
            message.model_copy(update={"blocks": list(map(self._block, message.blocks, other.blocks))})
            for message, other in zip(plain, placed, strict=True)
        ]

    def _block(self, plain: Any, placed: Any) -> Any:
        if type(plain) is not TextBlock or not isinstance(placed, TextBlock):
            return plain
        parts = self.parts(plain.text, placed.text) if _PLACE.search(placed.text) else None
        if parts is None:
            return plain  # no value is in it: a message that somebody has finished
        block = SlotBlock(text=plain.text)
        block._parts = parts
        return block

    def parts(self, plain: str, placed: str) -> tuple[Part, ...] | None:
        """Return the parts of a text; None if it is not the values with text between them, such as after a filter."""
        found = []
        for i, piece in enumerate(_PLACE.split(placed)):
            kind: Any = "words" if piece in _STOCK else "template"
            found.append(self.values[int(piece)] if i % 2 else Part(piece, kind))
        return tuple(each for each in found if each.text) if "".join(each.text for each in found) == plain else None


def _part(name: str, text: str, scope: Scope | None) -> Part:
    if isinstance(text, SetText):
        return Part(text, "value", text.segments)
    if scope is None or name in _WORDS:
        return Part(text, "words")
    segments = scope.find(text, is_context=name in _CONTEXT)
    asked = segments is None and text in {each.query for each in scope.retrievals}
    return Part(text, "words" if asked and not scope.is_set(text) else "value", segments)


def _formatted(template: BasePromptTemplate, values: Mapping[str, Any]) -> BasePromptTemplate:
    """Return a template that needs no more values, whatever they are called."""
    mappings: dict[str, Any] = {"function_mappings": {}, "template_var_mappings": {}}
    return template.model_copy(update={"kwargs": dict(values), **mappings})
