"""Pieces of an answer as they are parsed: a stop string ends its text, but no call and no reasoning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from invariant_rag.generation.answer_parsing import AnswerParser
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.generation.streaming import stream_until_stop_string


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
