"""Decoding that follows a structural tag of xgrammar: an object of a JSON schema, or text that may turn into calls.

Calls are written in the format of the chat template, or, where it has none, in one that the system message describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from invariant_rag.checks import check_flag, check_kind, check_text, require_extra
from invariant_rag.errors import InvalidChoice, InvalidPrompt, InvalidTool, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.answer_parsing import AnswerParser
from invariant_rag.generation.digest import digest_of
from invariant_rag.generation.json_schema import check_expressible, compile_tag, json_format, json_schema, parse_object
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import as_ids, check_options, is_set, resolve_option
from invariant_rag.prompts import Message, Tool, ToolCall, control_tokens, render_chat, template_format
from invariant_rag.prompts.tools import as_tools
from invariant_rag.segments import Prompt

__all__ = ["Tool", "ToolCall", "ToolCalling", "constrain", "generate_structured", "parse_object"]

CACHE_BYTES = 1 << 28  # of compiled grammars that are cached: schemas from outside are without number
# What xgrammar lets into strings of JSON: control characters, overlong forms of UTF-8, and surrogates.
_BROKEN = re.compile(rb"[\x00-\t\v\f\x0e-\x1f]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]")

# Compiles a structural tag for a vocabulary: a server does that in a process that can be stopped. None: here.
compile_in_worker: ContextVar[Callable[[Vocabulary, str], Any] | None] = ContextVar("compile_in_worker", default=None)


def constrain(lm: InvariantModel, schema: Any, **kwargs: Any) -> dict[str, Any]:
    """Return keywords of one call of `generate` or `stream` with which a model writes JSON that follows a schema.

    What a schema requires beyond a grammar is left to `parse_object`; so is a text that runs out of tokens ("length").
    Keywords are those of `generate`, without beams and stop strings. The schema is a pydantic class, another type that
    pydantic knows, or a JSON schema as dict or string; a keyword in it that xgrammar does not follow is an
    `InvalidSchema`.
    """
    described = json_format(check_expressible(json_schema(schema)))
    return _follow(check_kind("lm", lm, InvariantModel), described, kwargs)


def generate_structured(lm: InvariantModel, prompt: Prompt, schema: Any, **kwargs: Any) -> Any:
    """Generate an object: an instance of a pydantic class, or the plain values of a JSON schema; see `constrain`.

    Raises:
        IncompleteObject: The text was cut off: it needs more tokens than `max_new_tokens`.
        InvalidObject: The text breaks a rule of the schema or the class that no grammar expresses.
    """
    if isinstance(prompt, list | tuple):
        raise InvalidChoice(f"expected one prompt for an object, got {len(prompt)}", hint="Ask for one after another.")
    options = constrain(lm, schema, **kwargs)  # which checks the model
    return parse_object(lm.generate(prompt, **options).text, schema)


class ToolCalling:
    """Tools that a model may call in its answer. One object serves any number of prompts and threads.

    Tools are `Tool`s, or dicts in OpenAI's shape; without any, answers are parsed for reasoning only. `tool_choice`
    says whether answers hold calls: `auto`, `none`, `required` (or `any`), or those of a tool by its name; `parallel`,
    whether an answer may hold several.
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
        written, added = "\0".join(filter(None, markers)), self._tokenizer.added_tokens_decoder.items()
        return frozenset(index for index, token in added if token.special and token.content in written)

    def prompt(self, messages: Sequence[Message], query: str | None = None, /, **template_kwargs: Any) -> Prompt:
        """Render a conversation that offers the tools; see `InvariantModel.chat_prompt` and `render_chat`."""
        return render_chat(messages, self._tokenizer, query, tools=self.offered, template_kwargs=template_kwargs)

    def constrain(self, prompt: Prompt, **kwargs: Any) -> dict[str, Any]:
        """Return keywords of `generate` with which calls in the answer to a prompt are well-formed.

        A forced answer is nothing but calls; it skips the reasoning that the prompt opened. With `auto`, text is free
        until a call begins, after which there are only more calls.
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
        return _follow(self.lm, form, kwargs, trigger=trigger, literals=literals, turn_ends=ends[:1])

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
        """Return a parser of answers to a prompt, which takes text with the `kept_tokens` in it."""
        sets = [sorted(segment.content_hash for segment in each) for each in prompt.sets]  # the same in any order
        names, is_open = [tool.name for tool in self.offered], self._reasoning_open(prompt)
        digest = digest_of(prompt.texts, sets)
        return AnswerParser(self.form.call_format, names, self.form.reasoning, reasoning_open=is_open, prompt=digest)


def _sequence(*parts: dict[str, Any] | str | None) -> dict[str, Any]:
    written = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in parts if part]
    return {"type": "sequence", "elements": written}


def _either(*formats: dict[str, Any]) -> dict[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def _follow(
    lm: InvariantModel, form: Any, kwargs: Any, trigger: str = "", literals: str = "", turn_ends: Sequence[int] = ()
) -> dict[str, Any]:
    """Return keywords with which the texts of a model follow a format of xgrammar, after a trigger.

    Behind it, only `literals` may hold control tokens. `turn_ends` end a text as the model's own end tokens do.
    """
    check_options(kwargs, lm.model)
    tokenizer, defaults = lm.tokenizer, lm.model.generation_config
    if tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: an object is written as text")
    if refused := [name for name in ("num_beams", "stop_strings") if is_set(resolve_option(kwargs, name, defaults))]:
        hint = "Leave them away; those of a generation_config too."
        raise UnsupportedCombination(
            f"expected keywords that leave an object whole, got {' and '.join(refused)}", hint=hint
        )
    words = vocabulary(tokenizer, lm.model.config.get_text_config(decoder=True).vocab_size)
    ends = [*as_ids(resolve_option(kwargs, "eos_token_id", defaults)), *as_ids(defaults.eos_token_id), *turn_ends]
    stops = frozenset(ends or as_ids(tokenizer.eos_token_id)).intersection(range(len(words.words)))
    if not stops:
        raise UnsupportedCombination("expected a model with an end token, which ends an object, got none")
    tag = json.dumps({"type": "structural_tag", "format": form})
    processor = GrammarProcessor(words, tag, stops, trigger.encode(), literals)
    return {
        "pad_token_id": min(stops),  # after a text that something else has ended
        **kwargs,
        "eos_token_id": sorted(stops),
        "logits_processor": [*(kwargs.get("logits_processor") or ()), processor],
    }


class Vocabulary:
    """The tokens of a model, for xgrammar (`info`) and as bytes (`words`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        require_extra("xgrammar", "structured")
        import xgrammar

        self.info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        self.words: list[bytes] = self.info.decoded_vocab
        self.controls = {token: name for token, name in control_tokens(tokenizer).items() if token < size}
        self.broken = {  # after each byte
            byte: [token for token, word in enumerate(self.words) if _BROKEN.search(byte + word)]
            for byte in (b"", b"\xe0", b"\xed", b"\xf0")
        }
        self._compiler = xgrammar.GrammarCompiler(self.info, cache_limit_bytes=CACHE_BYTES)

    @cached_property
    def serialized(self) -> str:
        """The tokens as JSON, for another process."""
        return str(self.info.serialize_json())

    def compile(self, tag: str) -> Any:
        compile_remotely = compile_in_worker.get()
        return compile_tag(self._compiler, tag) if compile_remotely is None else compile_remotely(self, tag)


vocabulary = lru_cache(maxsize=8)(Vocabulary)  # of a tokenizer and so many logits, built once


@dataclass(unsafe_hash=True)
class GrammarProcessor(LogitsProcessor):
    """Leaves only tokens that continue the texts of a batch. Two of one tag and model are equal: they share batches."""

    words: Vocabulary
    tag: str
    stops: frozenset[int]
    trigger: bytes
    literals: str

    def __post_init__(self) -> None:
        self.compiled = self.words.compile(self.tag)
        controls = {token for token, name in self.words.controls.items() if name not in self.literals}
        self.banned = {byte: sorted({*each, *controls} - self.stops) for byte, each in self.words.broken.items()}
        self._seen: torch.Tensor | None = None
        self._matchers: list[Any] = []
        self._ends: list[bytes] = []  # of each text, as far as the trigger

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarProcessor:
        """Return a processor of texts that have not begun: a routed model writes two answers."""
        return replace(self)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]`, minus infinity but for tokens that may be chosen."""
        from xgrammar import GrammarMatcher, allocate_token_bitmask, apply_token_bitmask_inplace

        goes_on = self._seen is not None and torch.equal(input_ids[:, :-1], self._seen)
        self._seen = input_ids
        if not goes_on:  # other prompts
            self._matchers = [GrammarMatcher(self.compiled, override_stop_tokens=[*self.stops]) for _ in input_ids]
            self._ends = [b""] * len(input_ids)
        bits, masked = allocate_token_bitmask(len(input_ids), len(self.words.words)), scores.clone()
        for row, (matcher, token) in enumerate(zip(self._matchers, input_ids[:, -1].tolist(), strict=True)):
            word = self.words.words[token]
            if goes_on and self.trigger not in self._ends[row]:
                self._ends[row] = self._ends[row][-len(self.trigger) :] + word
            if goes_on and not (matcher.is_terminated() or matcher.accept_token(token) or token in self.stops):
                raise UnsupportedCombination(
                    f"expected a token of the schema, got {word!r}, which something else than the schema chose",
                    hint="Leave other logits processors and stopping criteria away.",
                )
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(bits, row)
                if self.trigger in self._ends[row]:
                    masked[row, self.banned.get(word[-1:], self.banned[b""])] = -torch.inf
        apply_token_bitmask_inplace(masked, bits.to(scores.device))
        if (masked.amax(-1) == -torch.inf).any():
            hint = "Leave other logits processors away, and patterns with quotes or backslashes."
            raise UnsupportedCombination(
                "expected a token of the schema to choose from, got scores that ban all", hint=hint
            )
        return masked
