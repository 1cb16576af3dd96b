"""Tool calling: prompts that offer tools, decoding in which every call is well-formed, and answers taken apart.

>>> calling = ToolCalling(lm, [search], tool_choice="required")  # doctest: +SKIP
>>> prompt = calling.prompt([{"role": "user", "content": "When does the ferry leave?"}])  # doctest: +SKIP
>>> calling.answer(lm.generate(prompt, **calling.constrain(prompt).options), prompt).tool_calls  # doctest: +SKIP
(ToolCall(id='call_5a0c...', name='search', arguments={'query': 'ferry'}),)

Calls are written in the format of the model's chat template, which is found out by rendering; where the template has
none, in a format that the system message describes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from invariant_rag.checks import check_flag, check_kind, check_text
from invariant_rag.errors import InvalidChoice, InvalidPrompt, InvalidTool, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.answer_parsing import AnswerParser, MarkerParser, ResponseTemplateParser
from invariant_rag.generation.answers import Answer, AnswerDelta, CallDelta
from invariant_rag.generation.grammar import Grammar, json_format
from invariant_rag.generation.json_schema import json_schema
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import check_options, resolve_max_new_tokens
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.streaming import decode_keeping
from invariant_rag.generation.structured import Constraint, follow
from invariant_rag.prompts import Message, TemplateFormat, Tool, ToolCall, render_chat, template_format
from invariant_rag.prompts.template_format import parses_calls
from invariant_rag.prompts.tools import as_tools
from invariant_rag.segments import Prompt, Text
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["Answer", "AnswerDelta", "CallDelta", "Tool", "ToolCall", "ToolCalling", "ToolChoice"]

ToolChoice: TypeAlias = Literal["auto", "none", "required", "any"] | str
"""Whether the answer holds calls: as the model likes, never, always (two names for it), or of the tool of this name."""


class ToolCalling:
    """Tools that a model may call in its answer.

    It has no state: one object serves any number of prompts and threads.

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
        check_kind("lm", lm, InvariantModel)
        if lm.tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: calls are written as text")
        self.lm = lm
        self.tools = as_tools(tools)
        check_text("tool_choice", tool_choice, error=InvalidTool)
        self.tool_choice = "required" if tool_choice == "any" else tool_choice
        self.parallel = check_flag("parallel", parallel, error=InvalidTool)
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

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self.lm.tokenizer
        if tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: calls are written as text")
        return tokenizer

    @cached_property
    def form(self) -> TemplateFormat:
        """What the chat template renders, and how."""
        return template_format(self._tokenizer) if self._tokenizer.chat_template else TemplateFormat()

    @property
    def kept_tokens(self) -> frozenset[int]:
        """Special tokens that belong to the answer: markers. `lm.stream` takes them as `keep_tokens`."""
        tokens = self._tokenizer.added_tokens_decoder.items()
        special = {index: token.content for index, token in tokens if token.special}
        if self._uses_response_template:
            return frozenset(special)
        written, reasoning = self.form.call_format, self.form.reasoning
        offers = bool(self.tools) and self.tool_choice != "none"
        markers = [written.begin, written.middle, written.between or "", written.end] if offers else []
        markers += [reasoning.open, reasoning.close] if reasoning else []
        return frozenset(index for index, name in special.items() if any(name in marker for marker in markers))

    @property
    def _uses_response_template(self) -> bool:
        # Calls in our own format, which the template does not describe, are none of the response template's.
        return parses_calls(self._tokenizer) and (self.form.calls is not None or not self.forced)

    def prompt(self, messages: Sequence[Message], query: str | None = None, /, **template_kwargs: Any) -> Prompt:
        """Render a conversation that offers the tools; none of them with `tool_choice="none"`.

        Args:
            messages: As for `InvariantModel.chat_prompt`; calls and results are described at `render_chat`.
            query: Query that relevance orderings score segments against.
            **template_kwargs: Variables of the chat template, such as `enable_thinking`.

        Raises:
            InvalidPrompt: As for `render_chat`.
        """
        offered = () if self.tool_choice == "none" else self.tools
        return render_chat(messages, self._tokenizer, query, tools=offered, template_kwargs=template_kwargs)

    def constrain(self, prompt: Prompt, *, max_new_tokens: int | None = None, **kwargs: Any) -> Constraint:
        """Return keywords with which a model answers a prompt with well-formed calls.

        A forced answer is nothing but calls; it skips the reasoning that the prompt opened. With `auto`, text is free
        until a call begins. After a call there are only more calls. An answer that needs more tokens than there are
        ends with `finish_reason` "length".

        Args:
            prompt: The prompt.
            max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
            **kwargs: Further keywords of `generate`.

        Raises:
            ExtraRequired: xgrammar is not installed.
            InvalidSchema: The parameters of a tool use what xgrammar does not know.
            UnsupportedCombination: There are keywords that would break a call, as for `structured.constrain`.
        """
        check_kind("prompt", prompt, Prompt, error=InvalidPrompt)
        check_options(kwargs, self.lm.model)
        free = self._uses_response_template and self.form.calls is None  # a format that only its parser knows
        if not self.tools or self.tool_choice == "none" or (free and not self.forced):
            return Constraint({**kwargs, "max_new_tokens": resolve_max_new_tokens(max_new_tokens, kwargs)})
        return follow(self.lm, self._grammar(prompt), max_new_tokens, kwargs, self._turn_ends())

    def _grammar(self, prompt: Prompt) -> Grammar:
        """Return the grammar of calls, `begin NAME middle JSON (between NAME middle JSON)* end`, after free text."""
        written, reasoning, is_open = self.form.call_format, self.form.reasoning, self._reasoning_open(prompt)
        named = [tool for tool in self.tools if tool.name == self.tool_choice] or self.tools
        schemas = {tool.name: json_schema({"type": "object", **tool.parameters}) for tool in named}
        calls = [_sequence(_text(name + written.middle), json_format(each)) for name, each in schemas.items()]
        call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
        further = []
        if self.parallel and written.between is not None:
            further = [{"type": "star", "content": _sequence(_text(written.between), call)}]
        begin = written.begin.lstrip()
        if self.forced:
            before = reasoning.closing if is_open and reasoning else ""
            trigger, begin = "", before + begin
        else:
            trigger = written.trigger
            begin = begin[begin.index(trigger) + len(trigger) :]
        return Grammar(
            format=_sequence(_text(begin), call, *further, _text(written.end)),
            trigger=trigger,
            anchored=written.anchored,
            reasoning=None if reasoning is None else ("" if is_open else reasoning.open, reasoning.close),
            literals="".join((begin, written.middle, written.between or "", written.end)),
        )

    def _turn_ends(self) -> list[int]:
        """Return the token that ends an answer: the one that the template writes there, else the tokenizer's."""
        ending = self.form.turn_end.lstrip()
        special = self._tokenizer.added_tokens_decoder.items()
        written = [index for index, token in special if token.content and ending.startswith(token.content)]
        return [index for index in (*written, self._tokenizer.eos_token_id) if index is not None][:1]

    def _reasoning_open(self, prompt: Prompt) -> bool:
        """Return whether the prompt ends within reasoning, as some templates leave it."""
        reasoning, text = self.form.reasoning, _last_text(prompt, self._tokenizer).rstrip()
        return reasoning is not None and text.endswith(reasoning.open)

    def parser(self, prompt: Prompt) -> AnswerParser:
        """Return a parser of one answer: the tokenizer's response template, else by the chat template's markers.

        It takes text in which the `kept_tokens` are kept.
        """
        offered = () if self.tool_choice == "none" else self.tools
        digest = _digest(prompt)
        if self._uses_response_template:
            prefix = _last_text(prompt, self._tokenizer)
            tools = [tool.to_dict() for tool in offered]
            return ResponseTemplateParser(self._tokenizer.response_template, prefix, tools, prompt=digest)
        names, is_open = [tool.name for tool in offered], self._reasoning_open(prompt)
        return MarkerParser(self.form.call_format, names, self.form.reasoning, reasoning_open=is_open, prompt=digest)

    def answer(self, generation: Generation | str, prompt: Prompt) -> Answer:
        """Take an answer apart.

        Args:
            generation: The generation; or its text, with the `kept_tokens` in it.
            prompt: Its prompt.

        Raises:
            IncompleteObject: It ends within a call, which was not decoded with `constrain`.
            InvalidObject: The tokenizer's response template cannot parse it.
        """
        check_kind("prompt", prompt, Prompt, error=InvalidPrompt)
        if not isinstance(generation, Generation | str):
            raise InvalidChoice(f"generation: expected a Generation or a text, got {shown(generation)}")
        parser = self.parser(prompt)
        text = generation if isinstance(generation, str) else self._text(generation)
        answer = Answer.join([*parser.feed(text), *parser.finish()])
        answer.check_complete()
        return answer

    def _text(self, generation: Generation) -> str:
        kept = self.kept_tokens
        return decode_keeping(self._tokenizer, generation.token_ids, kept) if kept else generation.text

    def generate(self, prompt: Prompt, *, seed: int | None = None, **kwargs: Any) -> tuple[Generation, Answer]:
        """Generate an answer, and take it apart.

        Raises:
            UnsupportedCombination: As for `constrain`.
        """
        generation = self.lm.generate(prompt, seed=seed, **self.constrain(prompt, **kwargs).options)
        if isinstance(generation, list):
            raise UnsupportedCombination(f"expected one answer, got {len(generation)}", hint="Give one prompt.")
        return generation, self.answer(generation, prompt)


def _text(text: str) -> dict[str, Any] | None:
    return {"type": "const_string", "value": text} if text else None


def _sequence(*parts: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "sequence", "elements": [part for part in parts if part is not None]}


def _last_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    text: Text = prompt.suffix
    return text if isinstance(text, str) else str(tokenizer.decode(list(text)))


def _digest(prompt: Prompt) -> str:
    """Return a digest of a prompt that does not depend on the order of its segments."""
    sets = [sorted(segment.content_hash for segment in each) for each in prompt.sets]
    return hashlib.sha256(repr((prompt.texts, sets)).encode()).hexdigest()
