"""Iterate over a blocking stream without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def iterate_in_thread(pieces: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Iterate over a generator in a worker thread; closing this iterator closes the generator."""
    loop, worker = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="invariant-rag")
    try:
        while (piece := await loop.run_in_executor(worker, next, pieces, None)) is not None:
            yield piece
    finally:
        worker.submit(pieces.close)  # runs after a step that is still in progress
        worker.shutdown(wait=False)
