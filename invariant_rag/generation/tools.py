"""Tool calling: prompts that offer tools, and decoding in which every call is well-formed.

Calls are written in the format of the model's chat template, which is found out by rendering; where the template has
none, in a format that the system message describes. `Answering` makes a request of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

from invariant_rag.checks import check_flag, check_kind, check_text
from invariant_rag.errors import InvalidPrompt, InvalidTool, TokenizerRequired
from invariant_rag.generation.answer_parsing import AnswerParser
from invariant_rag.generation.json_schema import json_format
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import as_ids, check_options
from invariant_rag.generation.structured import follow
from invariant_rag.prompts import Message, TemplateFormat, Tool, ToolCall, render_chat, template_format
from invariant_rag.prompts.tools import as_tools
from invariant_rag.segments import Prompt

__all__ = ["Tool", "ToolCall", "ToolCalling", "ToolChoice"]

ToolChoice: TypeAlias = Literal["auto", "none", "required", "any"] | str
"""Whether the answer holds calls: as the model likes, never, always (two names for it), or of the tool of this name."""


class ToolCalling:
    """Tools that a model may call in its answer. One object serves any number of prompts and threads.

    Args:
        lm: The model.
        tools: The tools: `Tool`s, or dicts in OpenAI's shape. None: answers are parsed for reasoning only.
        tool_choice: `auto`, `none`, `required` (or `any`), or the name of a tool.
        parallel: Whether an answer may hold several calls.

    Raises:
        InvalidTool: A tool is malformed, two share a name, or the choice is none of them.
        TokenizerRequired: The model has no tokenizer.
    """

    def __init__(
        self,
        lm: InvariantModel,
        tools: Iterable[Tool | Mapping[str, Any]] = (),
        *,
        tool_choice: ToolChoice = "auto",
        parallel: bool = True,
    ) -> None:
        self.lm = check_kind("lm", lm, InvariantModel)
        if lm.tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: calls are written as text")
        self._tokenizer = lm.tokenizer
        self.tools = as_tools(tools)
        check_text("tool_choice", tool_choice, error=InvalidTool)
        self.tool_choice = "required" if tool_choice == "any" else tool_choice
        self.parallel = check_flag("parallel", parallel, error=InvalidTool)
        self.offered = () if self.tool_choice == "none" else self.tools
        names = [tool.name for tool in self.tools]
        if self.tool_choice not in ("auto", "none", "required", *names):
            choices = ", ".join(map(repr, ("auto", "none", "required", "any", *names)))
            raise InvalidTool(f"unknown tool_choice {tool_choice!r}; choose from {choices}", hint="Name one of them.")
        if not self.tools and self.forced:
            raise InvalidTool("expected tools to choose from, got none", hint="Leave tool_choice away.")

    @property
    def forced(self) -> bool:
        """Whether every answer is a call."""
        return self.tool_choice not in ("auto", "none")

    @cached_property
    def form(self) -> TemplateFormat:
        """What the chat template renders, and how."""
        return template_format(self._tokenizer) if self._tokenizer.chat_template else TemplateFormat()

    @cached_property
    def kept_tokens(self) -> frozenset[int]:
        """Special tokens that belong to the answer: markers. `lm.stream` takes them as `keep_tokens`."""
        written, reasoning = self.form.call_format, self.form.reasoning
        markers = [written.begin, written.middle, written.between or "", written.end] if self.offered else []
        markers += [reasoning.open, reasoning.close] if reasoning else []
        special = {index: token for index, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(index for index, token in special.items() if any(token.content in each for each in markers))

    def prompt(self, messages: Sequence[Message], query: str | None = None, /, **template_kwargs: Any) -> Prompt:
        """Render a conversation that offers the tools; see `InvariantModel.chat_prompt` and `render_chat`."""
        return render_chat(messages, self._tokenizer, query, tools=self.offered, template_kwargs=template_kwargs)

    def constrain(self, prompt: Prompt, **kwargs: Any) -> dict[str, Any]:
        """Return keywords with which a model answers a prompt with well-formed calls; see `structured.constrain`.

        A forced answer is nothing but calls; it skips the reasoning that the prompt opened. With `auto`, text is free
        until a call begins; after a call there are only more calls. Arguments follow the schemas as far as xgrammar
        does.
        """
        check_kind("prompt", prompt, Prompt, error=InvalidPrompt)
        if not self.offered:
            check_options(kwargs, self.lm.model)
            return kwargs
        written, reasoning, is_open = self.form.call_format, self.form.reasoning, self._reasoning_open(prompt)
        literals = [written.begin, written.middle, written.between or "", written.end]
        literals += [reasoning.open, reasoning.closing] if reasoning else []
        trigger = "" if self.forced else written.trigger
        if self.forced:
            before = reasoning.closing if is_open and reasoning else ""
            form = self._calls(before + written.begin.lstrip())
        elif written.anchored:
            other = _sequence({"type": "regex", "pattern": rf"[^\{trigger}]"}, _ANY)
            form = _either(self._calls(written.begin.lstrip()), {"type": "optional", "content": other})
        else:
            calls = self._calls(written.begin.lstrip().partition(trigger)[2])
            form = {"type": "dispatch", "rules": [[trigger, calls]], "loop": False}
            if reasoning:  # in which no call begins
                begin: list[Any] = [] if is_open else [{"type": "regex", "pattern": r"\s*"}, reasoning.open]
                thought = {"type": "tag", "begin": "", "content": _ANY, "end": reasoning.close}
                form = _either(form, _sequence(*begin, thought, form))
        ending, special = self.form.turn_end.lstrip(), self._tokenizer.added_tokens_decoder.items()
        ends = [index for index, token in special if token.content and ending.startswith(token.content)]
        ends += as_ids(self._tokenizer.eos_token_id)  # the token that the template writes there, else the tokenizer's
        return follow(self.lm, form, kwargs, trigger=trigger, literals="".join(literals), turn_ends=ends[:1])

    def _calls(self, begin: str) -> dict[str, Any]:
        """Return the format of `begin NAME middle JSON (between NAME middle JSON)* end`."""
        written = self.form.call_format
        named = [tool for tool in self.tools if tool.name == self.tool_choice] or self.tools
        schemas = [(tool.name, {"type": "object", **tool.parameters}) for tool in named]
        call = _either(*(_sequence(name + written.middle, json_format(each)) for name, each in schemas))
        several = self.parallel and written.between is not None
        further = [{"type": "star", "content": _sequence(written.between, call)}] if several else []
        return _sequence(begin, call, *further, written.end)

    def _reasoning_open(self, prompt: Prompt) -> bool:
        """Return whether the prompt ends within reasoning, as some templates leave it."""
        suffix, reasoning = prompt.suffix, self.form.reasoning
        text = suffix if isinstance(suffix, str) else str(self._tokenizer.decode(list(suffix)))
        return reasoning is not None and text.rstrip().endswith(reasoning.open)

    def parser(self, prompt: Prompt) -> AnswerParser:
        """Return a parser of one answer, which takes text in which the `kept_tokens` are kept."""
        sets = [sorted(segment.content_hash for segment in each) for each in prompt.sets]  # the same in any order
        digest = hashlib.sha256(repr((prompt.texts, sets)).encode()).hexdigest()
        names, is_open = [tool.name for tool in self.offered], self._reasoning_open(prompt)
        return AnswerParser(self.form.call_format, names, self.form.reasoning, reasoning_open=is_open, prompt=digest)


_ANY = {"type": "any_text"}


def _sequence(*parts: dict[str, Any] | str | None) -> dict[str, Any]:
    written = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in parts if part]
    return {"type": "sequence", "elements": written}


def _either(*formats: dict[str, Any]) -> dict[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}
