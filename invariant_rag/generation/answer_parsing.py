"""Answers parsed incrementally: reasoning, text, and calls of tools. A stop string ends the text only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import regex

from invariant_rag.generation.answers import AnswerDelta, CallDelta
from invariant_rag.prompts import CallFormat, ReasoningFormat
from invariant_rag.prompts.tools import call_id


class AnswerParser:
    """Parses answers by the markers that their chat template writes. No part of a marker is yielded as text.

    What looks like a call, but names none of the tools, is text. Ids of calls follow from the text `prompt`, too.
    """

    def __init__(
        self,
        written: CallFormat,
        tools: Collection[str],
        reasoning: ReasoningFormat | None = None,
        *,
        reasoning_open: bool = False,  # by the prompt
        prompt: str = "",
    ) -> None:
        self._format, self._tools, self._prompt = written, frozenset(tools), prompt
        self._reasoning, self._reasoning_open = reasoning, reasoning_open
        befores = [written.begin[written.begin.index(written.trigger) :], *filter(None, (written.between,))]
        names, middle, end = "|".join(map(regex.escape, self._tools)), _loose(written.middle), _loose(written.end)
        first, *following = (rf"\s*{_loose(each)}\s*({names})\s*{middle}\s*(?=\{{)" for each in befores)
        self._first, self._opening = regex.compile(first), regex.compile("|".join([first, *following]))
        self._next_or_end, self._end = regex.compile("|".join([*following, end])), regex.compile(rf"\s*{end}")

    def parse(self, texts: Iterable[str]) -> Iterator[AnswerDelta]:
        """Yield the parts of an answer as its text comes, which is consumed to its end."""
        source = _Pieces(texts)
        if self._reasoning:
            yield from (AnswerDelta(reasoning=text) for text in self._thoughts(source, self._reasoning) if text)
        trigger = self._format.trigger if self._tools else ""
        began, calls = False, 0  # whether there was text, and how many calls
        while source.text or source.more():
            if self._format.anchored and (began or calls or not source.text.startswith(trigger)):
                trigger = ""
            for text in filter(None, source.before(trigger, strips=calls > 0)):
                began = True
                yield AnswerDelta(text)
            match = source.match(self._first) if source.text else None
            if source.text and not match:  # its marker is text
                began = True
                yield AnswerDelta(source.stripped(source.space + source.take(len(trigger))))
            elif match and match.partial:
                yield AnswerDelta(call=CallDelta(calls, "", "", source.take(len(source.text))))
            while match and not match.partial:
                source.take(match.end())
                yield AnswerDelta(call=CallDelta(calls, call_id(self._prompt, calls, match[1]), match[1]))
                yield from (AnswerDelta(call=CallDelta(calls, arguments=text)) for text in source.object())
                calls += 1
                match = source.match(self._next_or_end)
                if match is None or match.partial:
                    yield from self._without_end(source, calls)
                elif match.lastindex is None:  # it is no name, but the end
                    source.take(match.end())
                    source.skips_space, match = not began, None

    def _thoughts(self, source: _Pieces, reasoning: ReasoningFormat) -> Iterator[str]:
        """Yield the reasoning, and leave what is after it."""
        if not self._reasoning_open:
            begun = source.match(regex.compile(rf"\s*{regex.escape(reasoning.open)}"))
            if begun is None or begun.partial:
                return
            source.take(begun.end())
        source.skips_space = True
        yield from source.before(reasoning.close, strips=True)
        source.skips_space |= bool(source.take(len(reasoning.close)))

    def _without_end(self, source: _Pieces, calls: int) -> Iterator[AnswerDelta]:
        """Yield what an answer ends with after a call: half of the next one, or text; nothing for half of the end."""
        while source.more():
            pass
        rest = source.take(len(source.text))
        if not self._end.fullmatch(rest, partial=True):
            cut = AnswerDelta(call=CallDelta(calls, "", "", rest))
            yield cut if self._opening.fullmatch(rest, partial=True) else AnswerDelta(source.stripped(rest))


class _Pieces:
    """A text that comes in deltas: `text` is what has come and was not consumed."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self.text = ""
        self.skips_space = False  # whether white space at the beginning of what comes is left away
        self.space = ""  # before the marker

    def more(self) -> bool:
        """Wait for more of the text; return False at its end."""
        for delta in self._texts:
            if delta:
                self.text += delta
                return True
        return False

    def match(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Return the beginning of the text that has a pattern, or all of it, if it ends before; None: it has not."""
        while (match := pattern.match(self.text, partial=True)) and match.partial and self.more():
            pass
        return match

    def take(self, length: int) -> str:
        taken, self.text = self.text[:length], self.text[length:]
        return taken

    def stripped(self, text: str) -> str:
        text = text.lstrip() if self.skips_space else text
        self.skips_space = self.skips_space and not text
        return text

    def before(self, marker: str, *, strips: bool) -> Iterator[str]:
        """Yield the text before a marker. What may begin the marker, and white space before it, wait for more."""
        while (at := self.text.find(marker) if marker else -1) < 0:
            ready = self.text[: len(self.text) - _partial_length(self.text, [marker])]
            yield self.stripped(self.take(len(ready.rstrip() if marker or strips else ready)))
            if not self.more():
                rest = self.take(len(self.text))
                yield self.stripped(rest.rstrip() if strips else rest)
                return
        before = self.take(at)
        self.space = before[len(before.rstrip()) :]
        yield self.stripped(before.rstrip())

    def object(self) -> Iterator[str]:
        """Yield a JSON object, as far as it comes."""
        depth, quoted, escaped = 0, False, False
        while self.text or self.more():
            for length, character in enumerate(self.text, 1):
                if quoted:
                    quoted = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                elif character == '"':
                    quoted = True
                else:
                    depth += (character in "{[") - (character in "}]")
                    if not depth:
                        yield self.take(length)
                        return
            yield self.take(len(self.text))


def _loose(literal: str) -> str:
    """Return a pattern of a literal in which white space between words and signs may differ."""
    return r"\s*".join(map(regex.escape, regex.findall(r"\w+|[^\w\s]", literal)))


def until_stop_string(deltas: Iterable[AnswerDelta], stops: Sequence[str]) -> Iterator[AnswerDelta]:
    """Yield the parts of an answer before the first stop string in one run of its text. All parts are consumed.

    Text that may begin a stop string is held back until it is known.

    >>> [each.content for each in until_stop_string(map(AnswerDelta, ["ab", "c", "d", "e"]), ["cd"])]
    ['ab']
    """
    held, stopped, end = "", False, AnswerDelta()
    for delta in chain(deltas, [end]):
        if stopped:
            continue
        held += delta.content
        is_text = not (delta.reasoning or delta.call or delta is end)
        safe = len(held) - (_partial_length(held, stops) if is_text else 0)
        trimmed = trim_at_stop_string(held, stops)
        stopped = len(trimmed) < len(held) and len(trimmed) <= safe
        ready = trimmed if stopped else held[:safe]
        held = held[len(ready) :]
        if ready:
            yield AnswerDelta(ready)
        if not (stopped or is_text or delta is end):
            yield delta


def trim_at_stop_string(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string.

    >>> trim_at_stop_string("one. two. three.", [". t"])
    'one'
    """
    return text[: min((index for index in map(text.find, stops) if index >= 0), default=None)]


def _partial_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of a text that is the beginning of a marker, and not all of it."""
    lengths = range(1, min(len(text), max(map(len, markers), default=1) - 1) + 1)
    return max((n for n in lengths if any(each.startswith(text[-n:]) for each in markers)), default=0)
