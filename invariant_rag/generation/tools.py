"""Tool calling: prompts that offer tools, and decoding in which every call is well-formed.

Calls are written in the format of the chat template, or, where it has none, in one that the system message describes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from invariant_rag.checks import check_flag, check_kind, check_text
from invariant_rag.errors import InvalidPrompt, InvalidTool, TokenizerRequired
from invariant_rag.generation.answer_parsing import AnswerParser
from invariant_rag.generation.json_schema import json_format
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import as_ids, check_options
from invariant_rag.generation.structured import follow
from invariant_rag.prompts import Message, Tool, ToolCall, render_chat, template_format
from invariant_rag.prompts.tools import as_tools
from invariant_rag.segments import Prompt

__all__ = ["Tool", "ToolCall", "ToolCalling"]


class ToolCalling:
    """Tools that a model may call in its answer. One object serves any number of prompts and threads.

    Args:
        lm: The model.
        tools: The tools: `Tool`s, or dicts in OpenAI's shape. Without any, answers are parsed for reasoning only.
        tool_choice: Whether answers hold calls: `auto`, `none`, `required` (or `any`), or those of a tool by its name.
        parallel: Whether an answer may hold several calls.
    """

    def __init__(
        self,
        lm: InvariantModel,
        tools: Iterable[Tool | Mapping[str, Any]] = (),
        *,
        tool_choice: str = "auto",
        parallel: bool = True,
    ) -> None:
        self.lm = check_kind("lm", lm, InvariantModel)
        if lm.tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: calls are written as text")
        self._tokenizer, self.form = lm.tokenizer, template_format(lm.tokenizer)
        self.tools = as_tools(tools)
        check_text("tool_choice", tool_choice, error=InvalidTool)
        self.tool_choice = "required" if tool_choice == "any" else tool_choice
        self.parallel = check_flag("parallel", parallel, error=InvalidTool)
        self.offered = () if self.tool_choice == "none" else self.tools
        self.forced = self.tool_choice not in ("auto", "none")  # every answer is a call
        names = [tool.name for tool in self.tools]
        if self.forced and self.tool_choice not in ("required", *names):
            choices = ", ".join(map(repr, ("auto", "none", "required", "any", *names)))
            raise InvalidTool(f"unknown tool_choice {tool_choice!r}; choose from {choices}", hint="Name one of them.")
        if self.forced and not self.tools:
            raise InvalidTool("expected tools to choose from, got none", hint="Leave tool_choice away.")

    @cached_property
    def kept_tokens(self) -> frozenset[int]:
        """Special tokens that are markers in the answer. `lm.stream` takes them as `keep_tokens`."""
        reasoning = self.form.reasoning
        markers = [*vars(self.form.call_format).values()] if self.offered else []
        markers += [reasoning.open, reasoning.close] if reasoning else []
        return frozenset(
            index
            for index, token in self._tokenizer.added_tokens_decoder.items()
            if token.special and any(token.content in (each or "") for each in markers)
        )

    def prompt(self, messages: Sequence[Message], query: str | None = None, /, **template_kwargs: Any) -> Prompt:
        """Render a conversation that offers the tools; see `InvariantModel.chat_prompt` and `render_chat`."""
        return render_chat(messages, self._tokenizer, query, tools=self.offered, template_kwargs=template_kwargs)

    def constrain(self, prompt: Prompt, **kwargs: Any) -> dict[str, Any]:
        """Return keywords of `generate` with which calls in the answer to a prompt are well-formed.

        A forced answer is nothing but calls; it skips the reasoning that the prompt opened. With `auto`, text is free
        until a call begins, behind which there are only more calls.
        """
        check_kind("prompt", prompt, Prompt, error=InvalidPrompt)
        if not self.offered:
            check_options(kwargs, self.lm.model)
            return kwargs
        written, reasoning, is_open = self.form.call_format, self.form.reasoning, self._reasoning_open(prompt)
        begin, trigger = written.begin.lstrip(), "" if self.forced else written.trigger
        if self.forced:
            form = self._calls((reasoning.closing if is_open and reasoning else "") + begin)
        elif written.anchored:
            other = _sequence({"type": "regex", "pattern": rf"[^\{trigger}]"}, {"type": "any_text"})
            form = _either(self._calls(begin), {"type": "optional", "content": other})
        else:
            form = {"type": "dispatch", "rules": [[trigger, self._calls(begin.partition(trigger)[2])]], "loop": False}
            if reasoning:  # in which no call begins
                opening: list[Any] = [] if is_open else [{"type": "regex", "pattern": r"\s*"}, reasoning.open]
                thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": reasoning.close}
                form = _either(form, _sequence(*opening, thought, form))
        thoughts = (reasoning.open, reasoning.closing) if reasoning else ()
        literals = "".join(filter(None, (*vars(written).values(), *thoughts)))
        ending, special = self.form.turn_end.lstrip(), self._tokenizer.added_tokens_decoder.items()
        ends = [index for index, token in special if token.content and ending.startswith(token.content)]
        ends += as_ids(self._tokenizer.eos_token_id)  # the token that the template writes there, else the tokenizer's
        return follow(self.lm, form, kwargs, trigger=trigger, literals=literals, turn_ends=ends[:1])

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
        """Return a parser of answers to a prompt, which takes text in which the `kept_tokens` are kept."""
        sets = [sorted(segment.content_hash for segment in each) for each in prompt.sets]  # the same in any order
        digest = hashlib.sha256(repr((prompt.texts, sets)).encode()).hexdigest()
        names, is_open = [tool.name for tool in self.offered], self._reasoning_open(prompt)
        return AnswerParser(self.form.call_format, names, self.form.reasoning, reasoning_open=is_open, prompt=digest)


def _sequence(*parts: dict[str, Any] | str | None) -> dict[str, Any]:
    written = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in parts if part]
    return {"type": "sequence", "elements": written}


def _either(*formats: dict[str, Any]) -> dict[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}
