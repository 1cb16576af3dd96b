"""Pieces of an answer as they are parsed: stop strings end its text, and citations lead to the caller's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from invariant_rag.generation.answer_parsing import AnswerDelta, AnswerParser, CallDelta
from invariant_rag.generation.streaming import stream_until_stop_string
from invariant_rag.prompts.labels import Labels, translate_stream


def parse_answer(
    parser: AnswerParser, texts: Iterable[str], stops: Sequence[str], labels: Labels
) -> Iterator[AnswerDelta]:
    """Yield the pieces of an answer, with citations translated.

    The whole text is parsed, so that a `TextStream` ends by itself and has its `generation`.

    Args:
        parser: A fresh parser.
        texts: Pieces of the text.
        stops: Strings that end the answer where they occur in its text; not in reasoning, nor in calls.
        labels: How the numbers of documents translate.

    Raises:
        IncompleteObject: The text ends within a call.
    """
    stopped = False
    for (kind, _), run in groupby(_parsed(parser, texts), key=_kind):
        if stopped:
            continue
        if kind == "call":
            yield from _call(run, labels)
        elif kind == "reasoning":
            yield from (AnswerDelta(reasoning=each) for each in translate_stream((d.reasoning for d in run), labels))
        else:
            counted = _Counted(delta.content for delta in run)
            kept = _Counted(stream_until_stop_string(counted, stops))
            yield from map(AnswerDelta, translate_stream(kept, labels))
            stopped = kept.characters < counted.characters


def _parsed(parser: AnswerParser, texts: Iterable[str]) -> Iterator[AnswerDelta]:
    for text in texts:
        yield from parser.feed(text)
    yield from parser.finish()


def _kind(delta: AnswerDelta) -> tuple[str, int]:
    if delta.call:
        return "call", delta.call.index
    return "reasoning" if delta.reasoning else "content", 0


def _call(run: Iterator[AnswerDelta], labels: Labels) -> Iterator[AnswerDelta]:
    pieces = (delta.call for delta in run if delta.call)
    first = next(pieces)
    yield AnswerDelta(call=replace(first, arguments=""))
    written = (each.arguments for each in (first, *pieces) if each.arguments)
    yield from (AnswerDelta(call=CallDelta(first.index, arguments=each)) for each in translate_stream(written, labels))


class _Counted(Iterator[str]):
    """Texts, and how many characters they had so far."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self.characters = 0

    def __next__(self) -> str:
        text = next(self._texts)
        self.characters += len(text)
        return text
