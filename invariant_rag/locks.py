"""Locks that a process forked from this one can take."""

from __future__ import annotations

import os
from _thread import RLock
from weakref import WeakSet


class ForkSafeLock(RLock):  # type: ignore[misc] # of C: entering it costs no call of Python
    """A re-entrant lock. In a child process that `os.fork` makes while another thread holds it, it is free.

    That thread does not run in the child, so nobody would ever release a lock of `threading` there.
    """

    def __init__(self) -> None:
        super().__init__()
        _locks.add(self)


_locks: WeakSet[ForkSafeLock] = WeakSet()


def _free_locks() -> None:
    for lock in _locks:
        if not lock._is_owned():  # type: ignore[attr-defined] # the thread that forked is the one that goes on in the child
            lock._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_free_locks)
