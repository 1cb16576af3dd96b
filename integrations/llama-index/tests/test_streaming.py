from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from llama_index.llms.invariant_rag.calls import iterate_in_thread


async def test_an_error_in_the_thread_is_raised_where_the_stream_is_read() -> None:
    def pieces() -> Iterator[str]:
        yield "a"
        raise ArithmeticError("here")

    with pytest.raises(ArithmeticError, match="here"):
        assert [piece async for piece in iterate_in_thread(pieces())] == []


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
        async for _ in iterate_in_thread(pieces()):
            pass

    task = asyncio.create_task(read())
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(closed.wait, 5)
