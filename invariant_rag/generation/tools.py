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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from invariant_rag.checks import check_flag, check_kind, check_text
from invariant_rag.errors import InvalidChoice, InvalidPrompt, InvalidTool, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.answer_parsing import AnswerParser, MarkerParser, ResponseTemplateParser
from invariant_rag.generation.answers import Answer, AnswerDelta, CallDelta
from invariant_rag.generation.grammar import vocabulary
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.option_checks import check_options
from invariant_rag.generation.options import as_ids, resolve_max_new_tokens, resolve_option
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.streaming import TextStream, decode_keeping
from invariant_rag.generation.structured import NEUTRAL, Constraint, check_keywords
from invariant_rag.generation.tool_decoding import CallComplete, CallDecoding, CallProcessor
from invariant_rag.generation.tool_grammar import call_grammar
from invariant_rag.prompts import Message, TemplateFormat, Tool, ToolCall, render_chat, template_format
from invariant_rag.prompts.template_format import parses_calls
from invariant_rag.prompts.tools import as_tools
from invariant_rag.segments import Prompt, Text
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["Answer", "AnswerDelta", "AnswerStream", "CallDelta", "Tool", "ToolCall", "ToolCalling", "ToolChoice"]

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
        markers = [written.begin, written.middle, written.between or "", written.end] if self.tools else []
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
        until a call begins, and no call begins that cannot be finished. After a call there are only more calls.

        Args:
            prompt: The prompt.
            max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
            **kwargs: Further keywords of `generate`.

        Raises:
            ExtraRequired: xgrammar is not installed.
            InvalidSchema: The parameters of a tool use what xgrammar does not know.
            UnsupportedCombination: No forced call is known to fit into `max_new_tokens`; or there are keywords that
                would break a call, as for `invariant_rag.generation.structured.constrain`.
        """
        check_kind("prompt", prompt, Prompt, error=InvalidPrompt)
        check_options(kwargs, self.lm.model)
        wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
        free = self._uses_response_template and self.form.calls is None  # a format that only its parser knows
        if not self.tools or (free and not self.forced):
            return Constraint({**kwargs, "max_new_tokens": wanted}, 0)
        defaults = self.lm.model.generation_config
        check_keywords(kwargs, defaults)
        decoding = self._decoding(prompt, wanted, kwargs)
        if self.forced and decoding.shortest > wanted:
            raise UnsupportedCombination(
                f"expected max_new_tokens of at least {decoding.shortest} for a call of these tools, got {wanted}",
                hint="Raise it, or ask for less: fewer arguments, shorter names.",
            )
        rules = NEUTRAL.items() if self.forced else ()
        neutral = {name: value for name, value in rules if resolve_option(kwargs, name, defaults) not in (None, value)}
        options = {
            **kwargs,
            **neutral,
            "max_new_tokens": wanted,
            "logits_processor": [*(kwargs.get("logits_processor") or ()), CallProcessor(decoding)],
            "stopping_criteria": [*(kwargs.get("stopping_criteria") or ()), CallComplete(decoding)],
        }
        return Constraint(options, decoding.shortest if self.forced else 0)

    def _decoding(self, prompt: Prompt, max_new_tokens: int, kwargs: dict[str, Any]) -> CallDecoding:
        model, tokenizer = self.lm.model, self._tokenizer
        size = model.config.get_text_config(decoder=True).vocab_size
        defaults = model.generation_config
        ends = {index for each in (kwargs, {}) for index in as_ids(resolve_option(each, "eos_token_id", defaults))}
        named = next((token for token in self._turn_ends() if token is not None and token < size), None)
        stops = frozenset(ends | ({named} if named is not None else set()))
        chosen = [tool for tool in self.tools if tool.name == self.tool_choice] or self.tools
        is_open = self._reasoning_open(prompt)
        before = self.form.reasoning.closing if is_open and self.forced and self.form.reasoning else ""
        words = vocabulary(tokenizer, size, ends)
        return CallDecoding(
            call_grammar(words, tokenizer, self.form.call_format, chosen, before),
            max_new_tokens,
            forced=self.forced,
            allowed=self.tool_choice != "none",
            parallel=self.parallel,
            stops=stops,
            reasoning=self.form.reasoning,
            reasoning_open=is_open,
            sampled=bool(resolve_option(kwargs, "do_sample")),
        )

    def _turn_ends(self) -> Iterator[int | None]:
        """Yield tokens that end an answer: the one that the template writes there, and the tokenizer's."""
        ending = self.form.turn_end.lstrip()
        special = self._tokenizer.added_tokens_decoder.items()
        yield next((index for index, token in special if token.content and ending.startswith(token.content)), None)
        yield self._tokenizer.eos_token_id

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

    def stream(self, prompt: Prompt, *, seed: int | None = None, **kwargs: Any) -> AnswerStream:
        """Generate an answer, and yield its pieces. Joined, they are the answer of `generate`.

        Raises:
            UnsupportedCombination: As for `constrain`.
        """
        options = self.constrain(prompt, **kwargs).options
        stream = self.lm.stream(prompt, seed=seed, keep_tokens=self.kept_tokens, **options)
        return AnswerStream(stream, self.parser(prompt))


class AnswerStream(Iterator[AnswerDelta]):
    """An iterator over the pieces of an answer. Closing it stops the generation.

    Args:
        pieces: The text, with the `kept_tokens` in it: a `TextStream`.
        parser: A fresh parser.
    """

    def __init__(self, pieces: TextStream, parser: AnswerParser) -> None:
        self._pieces = pieces
        self._deltas = self._parse(parser)

    @property
    def generation(self) -> Generation | None:
        """The complete generation once the stream is exhausted; None before, and after `close`."""
        return self._pieces.generation

    def __next__(self) -> AnswerDelta:
        return next(self._deltas)

    def close(self) -> None:
        """Stop the generation."""
        self._pieces.close()

    def _parse(self, parser: AnswerParser) -> Iterator[AnswerDelta]:
        for piece in self._pieces:
            yield from parser.feed(piece)
        yield from parser.finish()


def _last_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    text: Text = prompt.suffix
    return text if isinstance(text, str) else str(tokenizer.decode(list(text)))


def _digest(prompt: Prompt) -> str:
    """Return a digest of a prompt that does not depend on the order of its segments."""
    sets = [sorted(segment.content_hash for segment in each) for each in prompt.sets]
    return hashlib.sha256(repr((prompt.texts, sets)).encode()).hexdigest()
