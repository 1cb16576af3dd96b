"""What a tokenizer's chat templates write, detected by rendering probes: control tokens, calls of tools, reasoning.

The name of a control token may be joined from parts, such as `'[|' + role + '|]'`, and need not be flagged as special.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product, takewhile
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
_OURS = {*"add_generation_prompt defined false loop message messages none not tools true".split()}  # words of templates
_ROLES = "developer tool function observation ipython environment context documents critic".split()
_TOOL, _CALL = Tool("f", _CONTENT).to_dict(), ToolCall("a12345678", "f", {}).to_dict()
LONGEST_PROBE = 40  # turns before the last one: some templates number them, and write names such as `T10:`
_warned: set[tuple[str, tuple[str, ...]]] = set()
_found: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, Mapping[int, str]]] = WeakKeyDictionary()


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """Return ids and names of the added tokens that control a model; cached per state of the tokenizer.

    These are the special tokens; those in what the chat template renders and in its literals; those of the shape of a
    rendered one (`[|user|]`, `[|critic|]`) or of `<|user|>`; without a template, every name in brackets. None are white
    space, the unknown token alone, and single characters that are not flagged as special.
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
    """Return names like roles that untrusted text may hold: added ones no template writes, ordinary ones it writes."""
    control, added = control_tokens(tokenizer), tokenizer.added_tokens_decoder
    names = [token.content for index, token in added.items() if index not in control]
    roles = {name for name in names if _ROLE_WORD.search(name) and not name.isalnum()}
    ordinary = [name for name, index in tokenizer.get_vocab().items() if index not in added and _in_brackets(name)]
    candidates = {name for name in ordinary if _ROLE_WORD.search(name) or _BAR.fullmatch(name)}
    output = "\n".join(rendered_probes(tokenizer)) if candidates else ""
    return sorted(roles | {name for name in candidates if name in output})


def warn_of_unprotected_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Issue a `TokenWarning` if there are `unprotected_tokens`, once per tokenizer's name and tokens."""
    name, names = tokenizer.name_or_path, tuple(unprotected_tokens(tokenizer))
    if names and (name, names) not in _warned:
        _warned.add((name, names))
        listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        warning = TokenWarning(
            f"the tokenizer {name!r} has tokens that look like roles, which are no added tokens that its chat template "
            f"writes: {listed}. Documents and questions that hold these names can make these tokens."
        )
        warnings.warn(f"{warning} {warning.hint}", TokenWarning, stacklevel=3)


def templates_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the sources of a tokenizer's chat templates."""
    templates = tokenizer.chat_template or {}
    return (templates,) if isinstance(templates, str) else tuple(templates.values())


def rendered_probes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what the chat templates of a tokenizer make of conversations with every role."""
    return [text for source in templates_of(tokenizer) for text in _render(tokenizer, source)]


def template_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the strings in the programs of chat templates: what they compare, and what they leave away from a text."""
    words = "\n".join(_literals(source, ("string",)) for source in templates_of(tokenizer)).split("\n")
    return sorted({*words} - {""})


def _written_names(tokenizer: PreTrainedTokenizerBase, names: set[str]) -> set[str]:
    sources = templates_of(tokenizer)
    if not sources:
        return set(filter(_in_brackets, names))
    output, literals = "\n".join(rendered_probes(tokenizer)), "\n".join(map(_literals, sources))
    literal = {name for name in names if name in literals and not (name[0].isalnum() or name[-1].isalnum())}
    written = literal | {name for name in names if _occurs(name, output) or _BAR.fullmatch(name)}
    shapes = {shape.groups() for shape in map(_SHAPE.fullmatch, written) if shape}
    return written | {name for name in names if (shape := _SHAPE.fullmatch(name)) and shape.groups() in shapes}


def _in_brackets(name: str) -> bool:
    text = name.strip()
    return len(text) > 2 and _BRACKETS.get(text[0]) == text[-1] and any(map(str.isalnum, text))


def _occurs(name: str, text: str) -> bool:  # and not within a word
    before, after = r"(?<!\w)" if name[0].isalnum() else "", r"(?!\w)" if name[-1].isalnum() else ""
    return name in text and re.search(before + re.escape(name) + after, text) is not None


@lru_cache(maxsize=64)
def _literals(source: str, kinds: tuple[str, ...] = ("data", "string")) -> str:
    from jinja2 import Environment, TemplateSyntaxError

    try:
        texts = [value for _, kind, value in Environment(autoescape=False).lex(source) if kind in kinds]  # noqa: S701
    except TemplateSyntaxError:  # it can render nothing either
        return source
    return "\n".join(texts)


def _conversations() -> Iterator[list[dict[str, Any]]]:
    probes: list[dict[str, Any]] = [{"role": role, "content": _CONTENT} for role in ("system", "user", "assistant")]
    system, user, answer = probes
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result: dict[str, Any] = {"role": "tool", "name": "f", "tool_call_id": "a12345678", "content": _CONTENT}
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
    """Yield what a template makes of probes that it does not refuse."""
    names = set(re.findall(r"\b(?:if|elif|and|or|not|is)\s+(?:not\s+)?([a-z_]\w*)\b(?![.(\[])", source))
    likely = sorted(names - _OURS)[:12]  # switches of the template, such as `enable_thinking`
    switches: list[dict[str, Any]] = [{name: value} for name in likely for value in (True, False)]
    switches.append({"documents": [{"title": _CONTENT, "text": _CONTENT, "contents": _CONTENT}]})
    for number, messages in enumerate(_conversations()):
        for tools, prompt in product((None, [_TOOL]), (False, True)):
            for switch in ({}, *switches) if number < 2 else ({},):
                options = {"tools": tools, "add_generation_prompt": prompt, "chat_template": source, **switch}
                if (rendered := try_template(tokenizer, messages, **options)) is not None:
                    yield rendered


def try_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """Return what a chat template makes of a probe; None if it refuses it."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
        return None


_PROBED = Tool("probealpha", "probedescription", {"type": "object", "properties": {"probekey": {"type": "string"}}})
_NAMES = (("probe0001", "probealpha", "probeone"), ("probe0002", "probebeta", "probetwo"))
_CALLS = tuple(ToolCall(identifier, name, {"probekey": value}) for identifier, name, value in _NAMES)
_USER, _SPOKEN, _RESULT, _REASONING = "probequestion", "probecontent", "proberesult", "probereasoning"
_ID = re.compile(r""",\s*"(?:id|call_id|tool_call_id)":\s*"probe000\d\"""")
_MARKER = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*\Z")


@dataclass(frozen=True)
class CallFormat:
    """How calls are written in an answer: `begin NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* end`."""

    begin: str
    middle: str
    between: str | None  # None: one call per answer
    end: str

    @property
    def anchored(self) -> bool:
        """Whether a call must be the whole answer: no marker distinguishes it from text inside a text."""
        return len(self.begin.split("{")[0].strip()) < 3

    @property
    def trigger(self) -> str:
        """The text with which a call begins: a marker, or the first character if the call is the whole answer."""
        begin = self.begin.lstrip()
        marker = re.match(r"<[^<>\s]+>|\[[A-Z_]+\]", begin)
        return begin[:1] if self.anchored else marker[0] if marker else begin.split()[0]

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as text."""
        between = self.end + "\n" + self.begin if self.between is None else self.between
        texts = [f"{call.name}{self.middle}{json.dumps(call.arguments, ensure_ascii=False)}" for call in calls]
        return self.begin + between.join(texts) + self.end


_OPEN, _CLOSE = '<tool_call>\n{"name": "', "}\n</tool_call>"
OWN_FORMAT = CallFormat(_OPEN, '", "arguments": ', f"{_CLOSE}\n{_OPEN}", _CLOSE)  # for models whose template has none


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers around the reasoning before an answer."""

    open: str
    close: str
    closing: str  # what the template writes from it to the answer


@dataclass(frozen=True)
class TemplateFormat:
    """What a chat template renders."""

    tools: bool = False  # whether it describes tools to the model, in a format of calls that can be parsed
    calls: CallFormat | None = None  # how it writes calls, if as names that are followed by JSON objects
    renders_calls: bool = False  # whether it writes calls, in a format that can be parsed
    results: bool = False  # whether it writes messages of the role `tool`
    reasoning: ReasoningFormat | None = None  # its markers around reasoning, if it has any
    turn_end: str = ""  # what it writes at the end of an answer

    @property
    def call_format(self) -> CallFormat:
        """How calls are written: as the template does, else our own format."""
        return self.calls or OWN_FORMAT


_formats: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, TemplateFormat]] = WeakKeyDictionary()


def template_format(tokenizer: PreTrainedTokenizerBase) -> TemplateFormat:
    """Return what the chat template of a tokenizer renders, detected once per template."""
    key = str(tokenizer.chat_template)
    known = _formats.get(tokenizer)
    if known is None or known[0] != key:
        known = _formats[tokenizer] = (key, _probe(tokenizer) if tokenizer.chat_template else TemplateFormat())
    return known[1]


def _probe(tokenizer: PreTrainedTokenizerBase) -> TemplateFormat:
    tools = [_PROBED.to_dict()]

    def render(*messages: dict[str, Any], **options: Any) -> str:
        return try_template(tokenizer, [{"role": "user", "content": _USER}, *messages], **options) or ""

    listed = [call.to_dict() for call in _CALLS]
    one_call, two_calls = ({"role": "assistant", "content": "", "tool_calls": listed[:count]} for count in (1, 2))
    spoken = {"role": "assistant", "content": _SPOKEN}
    plain = render(spoken, tools=tools) or render(spoken)
    if not plain:
        return TemplateFormat()
    header, _, turn_end = plain.partition(_SPOKEN)
    reasoning = _reasoning(tokenizer, render)
    described = render(tools=tools, add_generation_prompt=True)
    both, one = render(two_calls, tools=tools), render(one_call, tools=tools)
    calls = _call_format(both or one, header, turn_end, 2 if both else 1)
    if calls and reasoning and reasoning.close in calls.begin:
        calls = replace(calls, begin=calls.begin.split(reasoning.close)[-1].lstrip("\n"))
    result = {"role": "tool", "name": _CALLS[0].name, "tool_call_id": _CALLS[0].id, "content": _RESULT}
    return TemplateFormat(
        tools=calls is not None and _PROBED.name in described and _PROBED.description in described,
        calls=calls,
        renders_calls=calls is not None and all(word in one for word in ("probealpha", "probekey", "probeone")),
        results=_RESULT in render(one_call, result, tools=tools, add_generation_prompt=True),
        reasoning=reasoning,
        turn_end=turn_end,
    )


def _call_format(text: str, header: str, turn_end: str, count: int) -> CallFormat | None:
    position = _shared(text, header)
    around = []
    for call in _CALLS[:count]:
        name = text.find(call.name, position)
        start, end = _find_json(text, name + len(call.name), call.arguments) if name >= 0 else (-1, -1)
        if start < 0:
            return None
        around += [text[position:name], text[name + len(call.name) : start]]
        position = end
    ending = text[position:]
    ending = ending[: len(ending) - _shared(ending[::-1], turn_end[::-1])]
    begin, middle, *more = around
    form = CallFormat(begin, middle, _ID.sub("", more[0]) if more else None, _ID.sub("", ending))
    consistent = middle and around[-1] == middle and "probe" not in f"{begin}{middle}{form.between}{form.end}"
    return form if consistent else None


def _shared(text: str, other: str) -> int:
    return sum(takewhile(bool, (one == two for one, two in zip(text, other, strict=False))))


def _find_json(text: str, position: int, expected: Mapping[str, Any]) -> tuple[int, int]:
    for brace in re.compile(r"\{").finditer(text, position):
        with suppress(json.JSONDecodeError):
            value, end = json.JSONDecoder().raw_decode(text, brace.start())
            if value == expected:
                return brace.start(), end
    return -1, -1


def _reasoning(tokenizer: PreTrainedTokenizerBase, render: Callable[..., str]) -> ReasoningFormat | None:
    prompt = render(add_generation_prompt=True)
    for key in ("reasoning_content", "reasoning", "thinking"):
        text = render({"role": "assistant", "content": _SPOKEN, key: _REASONING})
        start, content = text.find(_REASONING), text.find(_SPOKEN)
        if 0 <= start < content:
            before = text[:start]
            marker = _MARKER.search(before)
            opening = before[_shared(prompt, text) :].strip() or (marker[1] if marker else "")
            closing = text[start + len(_REASONING) : content]
            if opening and closing.strip():
                return ReasoningFormat(opening, closing.strip(), closing)
    names = [token.content for token in tokenizer.added_tokens_decoder.values()]
    thinks = "</think>" in names or any("</think>" in source for source in templates_of(tokenizer))
    return ReasoningFormat("<think>", "</think>", "\n</think>\n\n") if thinks else None
