"""One request while it runs: in a thread, with a deadline, until its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from concurrent.futures import CancelledError, Executor
from threading import Event
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from invariant_rag.server.admission import Admission
from invariant_rag.server.errors import ClientLeft, DeadlineExceeded, error_body, status_of
from invariant_rag.server.json_text import encode
from invariant_rag.server.middleware import log_fault

T = TypeVar("T")
Item = TypeVar("Item")


class Running(Generic[Item, T]):
    """Blocking work for one request.

    Its place is given back when the thread ends: a client that leaves does not make room for work that still runs.

    Args:
        work: Called in a thread with a function that takes pieces of the result, and an event: once set, nobody waits
            for the result any more.
        executor: Runs it.
        admission: Where the request takes its place.
        timeout: Seconds until the deadline.

    Raises:
        Busy: There is no place.
    """

    def __init__(
        self,
        work: Callable[[Callable[[Item], None], Event], T],
        executor: Executor,
        admission: Admission,
        timeout: float,
    ) -> None:
        leave = admission.enter()
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Item | None] = asyncio.Queue()
        self._abandoned = Event()
        self._deadline = loop.time() + timeout
        self._timeout = timeout

        def put(piece: Item | None) -> None:
            loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        def run() -> T:
            try:
                if self._abandoned.is_set():
                    raise CancelledError
                return work(put, self._abandoned)
            except CancelledError:  # asyncio would take it for a cancelled request
                raise ClientLeft("nobody waits for the answer") from None
            finally:
                leave()
                put(None)

        self._result = loop.run_in_executor(executor, run)

    def abandon(self) -> None:
        """Stop the work: nobody waits for it."""
        self._abandoned.set()
        self._result.add_done_callback(_forget)

    async def result(self, request: Request) -> T:
        """Wait for the result.

        Raises:
            DeadlineExceeded: It takes too long.
            ClientLeft: The client has closed the connection.
        """
        await self._while_connected(request, self._result)
        return self._result.result()

    async def first(self, request: Request) -> list[Item]:
        """Wait for the first piece: errors before it are answered with their status. Empty if there is none.

        Raises:
            DeadlineExceeded: As for `result`.
            ClientLeft: As for `result`.
        """
        getting = asyncio.ensure_future(self._pieces.get())
        await self._while_connected(request, getting)
        piece = getting.result()
        if piece is None:
            await asyncio.wait({self._result})
            self._result.result()
            return []
        return [piece]

    async def rest(self) -> AsyncIterator[Item]:
        """Yield the other pieces.

        Raises:
            DeadlineExceeded: They take too long.
        """
        try:
            while True:
                piece = await asyncio.wait_for(self._pieces.get(), self._seconds_left())
                if piece is None:
                    return
                yield piece
        except TimeoutError:
            raise self._exceeded() from None

    async def finished(self) -> T:
        """Return the result after the last piece."""
        return await self._result

    async def _while_connected(self, request: Request, waited: asyncio.Future[Any]) -> None:
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            done, _ = await asyncio.wait(
                {waited, gone}, timeout=self._seconds_left(), return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:  # some servers cancel a request whose client leaves
            self.abandon()
            raise
        finally:
            gone.cancel()
        if waited in done:
            return
        self.abandon()
        if gone in done:
            raise ClientLeft("the client has closed the connection")
        raise self._exceeded()

    def _seconds_left(self) -> float:
        return max(self._deadline - asyncio.get_running_loop().time(), 0)

    def _exceeded(self) -> DeadlineExceeded:
        self.abandon()
        return DeadlineExceeded(f"expected an answer within {self._timeout:g} seconds")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _forget(result: asyncio.Future[Any]) -> None:
    """Take the error of work that nobody waits for."""
    if not result.cancelled():
        result.exception()


async def as_events(
    chunks: AsyncIterator[dict[str, Any]], running: Running[Any, Any], noted: MutableMapping[str, Any]
) -> AsyncIterator[dict[str, str]]:
    """Yield chunks as server-sent events, as OpenAI does: an error is the last chunk, else `[DONE]` is.

    Whoever stops reading abandons the work.

    Args:
        chunks: The chunks.
        running: The work that they come from.
        noted: What the log says of the request.
    """
    try:
        async for chunk in chunks:
            yield {"data": encode(chunk)}
        yield {"data": "[DONE]"}
    except Exception as error:  # noqa: BLE001 - the status is sent already: the client is told in the stream
        noted["error"] = type(error).__name__
        if status_of(error) == 500:
            log_fault(error, noted)
        yield {"data": encode(error_body(error))}
    finally:
        running.abandon()
