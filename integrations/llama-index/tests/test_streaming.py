from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import pytest

from llama_index.llms.invariant_rag.streaming import read_in_thread, until_stop


@pytest.mark.parametrize("stops", [[], ["ab"], ["aab", "ba"], ["bbbb", "c"], ["abc"]])
def test_pieces_end_where_the_whole_text_would_whatever_the_pieces(stops: list[str]) -> None:
    dice = random.Random(0)
    for _ in range(300):
        text = "".join(dice.choices("abc", k=dice.randrange(12)))
        whole = text[: min((text.index(stop) for stop in stops if stop in text), default=None)]
        pieces, rest = [], text
        while rest:
            size = dice.randrange(1, 4)
            pieces, rest = [*pieces, rest[:size]], rest[size:]
        assert "".join(until_stop(pieces, stops)) == whole


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    assert list(until_stop(["xa", "b", "y"], ["abc"])) == ["x", "aby"]


def test_nothing_more_is_asked_for_behind_a_stop_string() -> None:
    pieces = iter(["a", "b", "c"])
    assert list(until_stop(pieces, ["b"])) == ["a"]
    assert list(pieces) == ["c"]


async def test_an_error_in_the_thread_is_raised_where_the_stream_is_read() -> None:
    def pieces() -> Iterator[str]:
        yield "a"
        raise ArithmeticError("here")

    with pytest.raises(ArithmeticError, match="here"):
        assert [piece async for piece in read_in_thread(pieces())] == []


async def test_a_cancelled_reader_closes_what_it_read() -> None:
    closed, started = threading.Event(), threading.Event()

    def pieces() -> Iterator[str]:
        try:
            while True:
                started.set()
                yield "a"
        finally:
            closed.set()

    async def read() -> None:
        async for _ in read_in_thread(pieces()):
            pass

    task = asyncio.create_task(read())
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(closed.wait, 5)
