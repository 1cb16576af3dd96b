"""Which added tokens of a tokenizer control a model: found out by rendering its chat template.

A name may be joined from pieces in a template, such as `'[|' + role + '|]'`, and need not be flagged as special. So
conversations of every role are rendered, and what occurs in the output counts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from invariant_rag.errors import TokenWarning
from invariant_rag.prompts.tools import Tool, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BRACKETS = dict(zip("<[{(\uff1c\u3010\u27e8|", ">]})\uff1e\u3011\u27e9|", strict=True))
_BAR = re.compile(r"<([|\uff5c]).*\1>")
_ROLE_WORD = re.compile(
    r"(?<![a-z])(?:system|user|human|assistant|bot|model|tool|function|role|turn|inst|instruction|sys|"
    r"im_start|im_end|eot|eos|bos|end_of_turn|start_of_turn|endofturn)(?:s|_results?|_calls?)?(?![a-z])",
    re.IGNORECASE,
)
_SHAPE = re.compile(r"(\W{2,})\w+(\W{2,})")
_CONTENT = "\ueca6"  # of every probe: it holds no name of a token
_ROLES = "developer tool function observation ipython environment context documents critic".split()
_TOOL, _CALL = Tool("f", _CONTENT).to_dict(), ToolCall("a12345678", "f", {}).to_dict()
LONGEST_PROBE = 40
"""Turns before the last one: some templates number them, and write names such as `T10:`."""

_warned: set[tuple[str, tuple[str, ...]]] = set()
_found: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, Mapping[int, str]]] = WeakKeyDictionary()


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """Return ids and names of the added tokens that control a model; worked out once per tokenizer as it is.

    These are the special tokens; those in what the chat template renders and in its literals; those of the shape of a
    rendered one (`[|user|]`, `[|critic|]`); and those that look like `<|user|>`. Without a template, every name in
    brackets counts. White space is none, nor is the unknown token, unless it is also bos or eos, nor single characters
    that are not flagged as special: a template writes them by accident.
    """
    added = tokenizer.added_tokens_decoder
    key = (str(tokenizer.chat_template), str(added), tokenizer.all_special_ids)  # by value: all of them may change
    known = _found.get(tokenizer)
    if known is None or known[0] != key:
        special = {*tokenizer.all_special_ids, *[index for index, token in added.items() if token.special]}
        unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
        names = {index: token.content for index, token in added.items() if token.content.strip()}
        written = _written_names(tokenizer, {each for each in names.values() if len(each) > 1})
        kept = [index for index in names if (index in special or names[index] in written) and index not in unknown]
        known = _found[tokenizer] = (key, MappingProxyType({index: names[index] for index in kept}))
    return known[1]


def unprotected_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return names that look like roles and that untrusted text may hold.

    These are added tokens that no template writes, and ordinary pieces of the vocabulary that a template writes.
    """
    control, added = control_tokens(tokenizer), tokenizer.added_tokens_decoder
    names = {token.content for index, token in added.items() if index not in control}
    found = {name for name in names if _ROLE_WORD.search(name) and not name.isalnum()}
    pieces = {
        name
        for name, index in tokenizer.get_vocab().items()
        if index not in added and _in_brackets(name) and (_ROLE_WORD.search(name) or _BAR.fullmatch(name))
    }
    output = "\n".join(rendered_probes(tokenizer)) if pieces else ""
    return sorted(found | {name for name in pieces if name in output})


def warn_of_unprotected_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Issue a `TokenWarning` if there are `unprotected_tokens`, once per tokenizer's name and tokens."""
    name, names = tokenizer.name_or_path, tuple(unprotected_tokens(tokenizer))
    if names and (name, names) not in _warned:
        _warned.add((name, names))
        listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        warning = TokenWarning(
            f"the tokenizer {name!r} has tokens that look like roles, which are no added tokens that its chat template "
            f"writes: {listed}. Documents and questions that hold these names are not kept from making these tokens."
        )
        warnings.warn(f"{warning} {warning.hint}", TokenWarning, stacklevel=3)


def templates_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the sources of a tokenizer's chat templates."""
    templates = tokenizer.chat_template or {}
    return (templates,) if isinstance(templates, str) else tuple(templates.values())


def rendered_probes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what the chat templates of a tokenizer make of conversations with every role, but for refused ones."""
    return [text for source in templates_of(tokenizer) for text in _render(tokenizer, source)]


def template_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the strings in the programs of chat templates: what they compare, and what they leave away from a text."""
    words = "\n".join(_literals(source, ("string",)) for source in templates_of(tokenizer)).split("\n")
    return sorted({*words} - {""})


def _written_names(tokenizer: PreTrainedTokenizerBase, names: set[str]) -> set[str]:
    """Return the names that look like those of control tokens, or that a template writes."""
    sources = templates_of(tokenizer)
    if not sources:
        return set(filter(_in_brackets, names))
    output, literals = "\n".join(rendered_probes(tokenizer)), "\n".join(map(_literals, sources))
    written = {
        name
        for name in names
        if _occurs(name, output)
        or (name in literals and not (name[0].isalnum() or name[-1].isalnum()))
        or _BAR.fullmatch(name)
    }
    shapes = {shape.groups() for shape in map(_SHAPE.fullmatch, written) if shape}
    return written | {name for name in names if (shape := _SHAPE.fullmatch(name)) and shape.groups() in shapes}


def _in_brackets(name: str) -> bool:
    text = name.strip()
    return len(text) > 2 and _BRACKETS.get(text[0]) == text[-1] and any(map(str.isalnum, text))


def _occurs(name: str, text: str) -> bool:
    """Return whether a name occurs in a text, and not within a word."""
    before, after = r"(?<!\w)" if name[0].isalnum() else "", r"(?!\w)" if name[-1].isalnum() else ""
    return name in text and re.search(before + re.escape(name) + after, text) is not None


@lru_cache(maxsize=64)
def _literals(source: str, kinds: tuple[str, ...] = ("data", "string")) -> str:
    """Return the text and the strings of a template, without its program."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        pieces = [value for _, kind, value in Environment(autoescape=False).lex(source) if kind in kinds]  # noqa: S701
    except TemplateSyntaxError:  # it can render nothing either
        return source
    return "\n".join(pieces)


def _variables(source: str) -> list[str]:
    """Return the variables of a template that are likely switches, such as `enable_thinking`."""
    found = re.findall(r"\b(?:if|elif|and|or|not|is)\s+(?:not\s+)?([a-z_]\w*)\b(?![.(\[])", source)
    ours = {"messages", "tools", "add_generation_prompt", "defined", "not", "true", "false", "none", "loop", "message"}
    return sorted(set(found) - ours)[:12]


def _conversations() -> Iterator[list[dict[str, Any]]]:
    system, user, answer = ({"role": role, "content": _CONTENT} for role in ("system", "user", "assistant"))
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "name": "f", "tool_call_id": "a12345678", "content": _CONTENT}
    yield from ([system, user], [user], [user, answer], [system, user, answer, user])
    yield [user, answer] * (LONGEST_PROBE // 2) + [user]
    yield from ([user, called, result], [system, user, called, result, answer])
    yield [user, {**called, "tool_calls": [_CALL, _CALL]}, result, result, answer, user]
    yield [user, {**answer, "reasoning_content": _CONTENT, "reasoning": _CONTENT, "thinking": _CONTENT}]
    yield [user, {**called, "reasoning_content": _CONTENT}, result]
    for role in _ROLES:
        yield [user, answer, {"role": role, "content": _CONTENT}]
        yield [{"role": role, "content": _CONTENT}, user]


def _render(tokenizer: PreTrainedTokenizerBase, source: str) -> Iterator[str]:
    """Yield what a template makes of probes; those that it refuses, with whichever error, are left out."""
    switches: list[dict[str, Any]] = [{name: value} for name in _variables(source) for value in (True, False)]
    switches.append({"documents": [{"title": _CONTENT, "text": _CONTENT, "contents": _CONTENT}]})
    for number, messages in enumerate(_conversations()):
        for tools, prompt in product((None, [_TOOL]), (False, True)):
            for switch in ({}, *switches) if number < 2 else ({},):
                options = {"tools": tools, "add_generation_prompt": prompt, **switch}
                rendered = try_template(tokenizer, messages, chat_template=source, **options)
                if rendered is not None:
                    yield rendered


def try_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """Return what a chat template makes of a probe; None if it refuses it, with whichever error."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
        return None
