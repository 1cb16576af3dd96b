"""Locks that a process forked from this one can take."""

from __future__ import annotations

import os
from threading import RLock, get_ident
from weakref import WeakSet


class ForkSafeLock:
    """A re-entrant lock. In a child process that `os.fork` makes while another thread holds it, it is free.

    That thread does not run in the child, so nobody would ever release a lock of `threading` there.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._depth = 0
        self._holder: int | None = None
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        self._holder = get_ident()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()

    def free_in_child(self) -> None:
        """Forget whoever holds it, unless that is the thread that forked: it is the one that goes on in the child."""
        if self._holder != get_ident():
            self._lock, self._depth, self._holder = RLock(), 0, None


_locks: WeakSet[ForkSafeLock] = WeakSet()


def _free_locks() -> None:
    for lock in _locks:
        lock.free_in_child()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_free_locks)
