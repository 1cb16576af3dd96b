"""Answers taken apart, piece by piece: reasoning, text, and calls of tools. A stop string ends the text only."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from invariant_rag.generation.answers import AnswerDelta, CallDelta
from invariant_rag.generation.streaming import stream_until_stop_string
from invariant_rag.prompts import CallFormat, ReasoningFormat
from invariant_rag.prompts.tools import call_id


class AnswerParser:
    """Parses an answer by the markers that its chat template writes. No part of a marker is given as text.

    Args:
        written: The format of calls.
        tools: Names of the tools. What looks like a call of another name is text.
        reasoning: Markers around reasoning. None: there is none.
        reasoning_open: Whether the prompt opened the reasoning.
        prompt: What tells the prompt from others, for ids of calls.
    """

    def __init__(
        self,
        written: CallFormat,
        tools: Collection[str],
        reasoning: ReasoningFormat | None = None,
        *,
        reasoning_open: bool = False,
        prompt: str = "",
    ) -> None:
        self._tools = frozenset(tools)
        self._format = written
        self._reasoning = reasoning
        self._prompt = prompt
        self._first = _pattern(written.begin.lstrip()[written.begin.lstrip().index(written.trigger) :], written.middle)
        self._next = None if written.between is None else _pattern(written.between, written.middle)
        self._end = re.compile(_loose(written.end))
        self._longest = len(written.begin) + len(written.middle) + max(map(len, self._tools), default=0) + 64
        self._buffer = ""
        self._calls = 0
        self._began = False  # whether there was content
        self._parse = self._in_reasoning if reasoning_open else self._at_start
        self._skip_space = reasoning_open

    def feed(self, text: str) -> list[AnswerDelta]:
        """Return what is known after more of the text."""
        self._buffer += text
        return self._run(last=False)

    def finish(self) -> list[AnswerDelta]:
        """Return what is known at the end of the text. Where it ends within a call, that call has no end."""
        return self._run(last=True)

    def _run(self, *, last: bool) -> list[AnswerDelta]:
        found: list[AnswerDelta] = []
        while self._parse(found, last):
            pass
        return found

    # Each state takes from the buffer what it can, and says whether the next one can go on with what is left.

    def _at_start(self, found: list[AnswerDelta], last: bool) -> bool:
        text = self._buffer.lstrip()
        if self._reasoning and text.startswith(self._reasoning.open):
            self._buffer, self._skip_space = text[len(self._reasoning.open) :], True
            self._parse = self._in_reasoning
            return True
        if self._reasoning and self._reasoning.open.startswith(text) and not last:
            return False
        self._parse = self._in_text
        return True

    def _in_reasoning(self, found: list[AnswerDelta], last: bool) -> bool:
        close = self._reasoning.close  # type: ignore[union-attr]
        before, marker, after = self._buffer.partition(close)
        if marker:
            self._emit(found, before.rstrip(), "reasoning")
            self._buffer, self._skip_space, self._parse = after, True, self._in_text
            return True
        self._release(found, close, last, "reasoning")
        return False

    def _in_text(self, found: list[AnswerDelta], last: bool) -> bool:
        trigger = self._format.trigger if self._tools else ""
        at = self._buffer.find(trigger) if trigger else -1
        if trigger and self._format.anchored and (self._began or self._calls or at > 0):
            trigger, at = "", -1
        if at < 0:
            self._release(found, trigger, last, "content")
            return False
        self._emit(found, self._buffer[:at].rstrip(), "content")
        self._before, self._buffer, self._parse = self._buffer[:at], self._buffer[at:], self._in_opening
        return True

    def _in_opening(self, found: list[AnswerDelta], last: bool) -> bool:
        match = self._first.match(self._buffer)
        if match and match[1] in self._tools and match.end() <= self._longest:
            self._open(found, match)
            return True
        if not match and len(self._buffer) <= self._longest and not last:
            return False
        trigger = self._format.trigger  # no call: its marker is text
        space = self._before[len(self._before.rstrip()) :]
        self._emit(found, space + trigger, "content")
        self._buffer, self._parse = self._buffer[len(trigger) :], self._in_text
        return True

    def _open(self, found: list[AnswerDelta], match: re.Match[str]) -> None:
        identifier = call_id(self._prompt, self._calls, match[1])
        found.append(AnswerDelta(call=CallDelta(self._calls, identifier, match[1])))
        self._buffer, self._parse = self._buffer[match.end() :], self._in_arguments
        self._depth, self._quoted, self._escaped = 0, False, False

    def _in_arguments(self, found: list[AnswerDelta], last: bool) -> bool:
        for position, character in enumerate(self._buffer):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    self._arguments(found, position + 1)
                    self._calls += 1
                    self._parse = self._after_call
                    return True
        self._arguments(found, len(self._buffer))
        return False

    def _arguments(self, found: list[AnswerDelta], length: int) -> None:
        if length:
            found.append(AnswerDelta(call=CallDelta(self._calls, arguments=self._buffer[:length])))
        self._buffer = self._buffer[length:]

    def _after_call(self, found: list[AnswerDelta], last: bool) -> bool:
        match = self._next.match(self._buffer) if self._next else None
        if match and match[1] in self._tools:
            self._open(found, match)
            return True
        end = self._end.match(self._buffer)
        if end:
            self._buffer, self._skip_space = self._buffer[end.end() :], not self._began
            self._parse = self._in_text
            return True
        if last:
            rest, self._buffer = self._buffer, ""
            ends = (self._format.end, *(f"{self._format.between}{name}{self._format.middle}" for name in self._tools))
            is_part = any("".join(each.split()).startswith("".join(rest.split())) for each in ends)
            self._emit(found, "" if is_part else rest, "content")
        return False

    def _release(self, found: list[AnswerDelta], marker: str, last: bool, kind: str) -> None:
        """Give the buffer as text. White space and what may begin a marker, at its end, wait for more."""
        ready = self._buffer
        if not last:
            lengths = range(min(len(marker) - 1, len(ready)), 0, -1)
            ready = ready[: len(ready) - next((n for n in lengths if ready.endswith(marker[:n])), 0)]
        ends_stripped = kind == "reasoning" or self._calls > 0
        rest = self._buffer[len(ready.rstrip()) :] if (marker or ends_stripped) and not last else ""
        self._emit(found, ready.rstrip() if rest or (last and ends_stripped) else ready, kind)
        self._buffer = rest

    def _emit(self, found: list[AnswerDelta], text: str, kind: str) -> None:
        text = text.lstrip() if self._skip_space else text
        if text:
            self._skip_space = False
            self._began = self._began or kind == "content"
            found.append(AnswerDelta(text) if kind == "content" else AnswerDelta(reasoning=text))


def _loose(literal: str) -> str:
    """Return a pattern of a literal in which white space between words and signs may differ."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", literal)))


def _pattern(before: str, middle: str) -> re.Pattern[str]:
    return re.compile(rf"\s*{_loose(before)}\s*([\w./:-]+?)\s*{_loose(middle)}\s*(?=\{{)")


def parse_answer(parser: AnswerParser, texts: Iterable[str], stops: Sequence[str] = ()) -> Iterator[AnswerDelta]:
    """Yield the pieces of an answer.

    The whole text is parsed, so that a `TextStream` ends by itself and has its `generation`.

    Args:
        parser: A fresh parser.
        texts: Pieces of the text.
        stops: Strings that end the answer where they occur in its text; not in reasoning, nor in calls.
    """
    stopped = False
    for is_content, run in groupby(_parsed(parser, texts), key=lambda delta: bool(delta.content)):
        if stopped:
            continue
        if not is_content or not stops:
            yield from run
            continue
        counted = _Counted(delta.content for delta in run)
        kept = _Counted(stream_until_stop_string(counted, stops))
        yield from map(AnswerDelta, kept)
        stopped = kept.characters < counted.characters


def _parsed(parser: AnswerParser, texts: Iterable[str]) -> Iterator[AnswerDelta]:
    for text in texts:
        yield from parser.feed(text)
    yield from parser.finish()


class _Counted(Iterator[str]):
    """Texts, and how many characters they had so far."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self.characters = 0

    def __next__(self) -> str:
        text = next(self._texts)
        self.characters += len(text)
        return text
