"""Work that can be cancelled between its batches, without an argument for that in every function on the way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

_cancelled: ContextVar[Event | None] = ContextVar("cancelled", default=None)


@contextmanager
def cancellable(event: Event) -> Iterator[None]:
    """Let `check_cancelled` raise in the block, in this thread, once the event is set."""
    token = _cancelled.set(event)
    try:
        yield
    finally:
        _cancelled.reset(token)


def check_cancelled() -> None:
    """Stop here if nobody waits for the result any more. Called between batches, and where a lock was waited for.

    Raises:
        CancelledError: The event of `cancellable` is set.
    """
    event = _cancelled.get()
    if event is not None and event.is_set():
        raise CancelledError


def cancelled_event() -> Event:
    """Return the event of `cancellable`, for work in another thread; outside of it, one that nobody sets."""
    return _cancelled.get() or Event()
