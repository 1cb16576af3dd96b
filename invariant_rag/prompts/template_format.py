"""What a chat template can write, found out by rendering probes: tools, calls, their results, and reasoning.

The text that is rendered around known names and arguments is the model's own format of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from invariant_rag.prompts.control_tokens import templates_of, try_template
from invariant_rag.prompts.tools import Tool, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOL = Tool("probealpha", "probedescription", {"type": "object", "properties": {"probekey": {"type": "string"}}})
_NAMES = (("probe0001", "probealpha", "probeone"), ("probe0002", "probebeta", "probetwo"))
_CALLS = tuple(ToolCall(identifier, name, {"probekey": value}) for identifier, name, value in _NAMES)
_USER, _CONTENT, _RESULT, _REASONING = "probequestion", "probecontent", "proberesult", "probereasoning"
_ID = re.compile(r""",\s*"(?:id|call_id|tool_call_id)":\s*"probe000\d\"""")
_MARKER = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*\Z")


@dataclass(frozen=True)
class CallFormat:
    r"""How calls are written in an answer: `begin NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* end`.

    Attributes:
        begin: Text before the first name, such as `<tool_call>\n{"name": "`.
        middle: Text between a name and its arguments, which are a JSON object.
        between: Text between the arguments of one call and the name of the next. None: one call per answer.
        end: Text after the arguments of the last call.
    """

    begin: str
    middle: str
    between: str | None
    end: str

    @property
    def anchored(self) -> bool:
        """Whether a call must be the whole answer: no marker tells it from text inside a text."""
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
OWN_FORMAT = CallFormat(_OPEN, '", "arguments": ', f"{_CLOSE}\n{_OPEN}", _CLOSE)
"""The format of calls that is described to models whose chat template has none."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers around the reasoning before an answer; `closing` is what the template writes from it to the answer."""

    open: str
    close: str
    closing: str


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
    """Return what the chat template of a tokenizer renders. It is found out once per template."""
    key = str(tokenizer.chat_template)
    known = _formats.get(tokenizer)
    if known is None or known[0] != key:
        known = _formats[tokenizer] = (key, _probe(tokenizer) if tokenizer.chat_template else TemplateFormat())
    return known[1]


def _probe(tokenizer: PreTrainedTokenizerBase) -> TemplateFormat:
    tools = [_TOOL.to_dict()]

    def render(*messages: dict[str, Any], **options: Any) -> str:
        return try_template(tokenizer, [{"role": "user", "content": _USER}, *messages], **options) or ""

    listed = [call.to_dict() for call in _CALLS]
    one_call, two_calls = ({"role": "assistant", "content": "", "tool_calls": listed[:count]} for count in (1, 2))
    spoken = {"role": "assistant", "content": _CONTENT}
    plain = render(spoken, tools=tools) or render(spoken)
    if not plain:
        return TemplateFormat()
    header, _, turn_end = plain.partition(_CONTENT)
    reasoning = _reasoning(tokenizer, render)
    described = render(tools=tools, add_generation_prompt=True)
    both, one = render(two_calls, tools=tools), render(one_call, tools=tools)
    calls = _call_format(both or one, header, turn_end, 2 if both else 1)
    if calls and reasoning and reasoning.close in calls.begin:
        calls = replace(calls, begin=calls.begin.split(reasoning.close)[-1].lstrip("\n"))
    result = {"role": "tool", "name": _CALLS[0].name, "tool_call_id": _CALLS[0].id, "content": _RESULT}
    return TemplateFormat(
        tools=calls is not None and _TOOL.name in described and _TOOL.description in described,
        calls=calls,
        renders_calls=calls is not None and all(word in one for word in ("probealpha", "probekey", "probeone")),
        results=_RESULT in render(one_call, result, tools=tools, add_generation_prompt=True),
        reasoning=reasoning,
        turn_end=turn_end,
    )


def _call_format(text: str, header: str, turn_end: str, count: int) -> CallFormat | None:
    """Take the rendering of probe calls apart."""
    position = _shared(text, header)
    pieces = []
    for call in _CALLS[:count]:
        name = text.find(call.name, position)
        start, end = _find_json(text, name + len(call.name), call.arguments) if name >= 0 else (-1, -1)
        if start < 0:
            return None
        pieces += [text[position:name], text[name + len(call.name) : start]]
        position = end
    ending = text[position:]
    ending = ending[: len(ending) - _shared(ending[::-1], turn_end[::-1])]
    begin, middle, *more = pieces
    found = CallFormat(begin, middle, _ID.sub("", more[0]) if more else None, _ID.sub("", ending))
    consistent = middle and pieces[-1] == middle and "probe" not in f"{begin}{middle}{found.between}{found.end}"
    return found if consistent else None


def _shared(text: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    alike = (one == two for one, two in zip(text, other, strict=False))
    return sum(takewhile(bool, alike))


def _find_json(text: str, position: int, wanted: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a JSON object begins and ends in a text; -1 and -1 if it does not occur."""
    for found in re.compile(r"\{").finditer(text, position):
        with suppress(json.JSONDecodeError):
            value, end = json.JSONDecoder().raw_decode(text, found.start())
            if value == wanted:
                return found.start(), end
    return -1, -1


def _reasoning(tokenizer: PreTrainedTokenizerBase, render: Callable[..., str]) -> ReasoningFormat | None:
    prompt = render(add_generation_prompt=True)
    for key in ("reasoning_content", "reasoning", "thinking"):
        text = render({"role": "assistant", "content": _CONTENT, key: _REASONING})
        start, content = text.find(_REASONING), text.find(_CONTENT)
        if 0 <= start < content:
            before = text[:start]
            marker = _MARKER.search(before)
            opening = before[_shared(prompt, text) :].strip() or (marker[1] if marker else "")
            closing = text[start + len(_REASONING) : content]
            if opening and closing.strip():
                return ReasoningFormat(opening, closing.strip(), closing)
    names = [token.content for token in tokenizer.added_tokens_decoder.values()]
    if "</think>" in names or any("</think>" in source for source in templates_of(tokenizer)):
        return ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
    return None
