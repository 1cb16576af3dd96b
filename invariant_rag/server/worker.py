"""Processes of Python that work on what a client sends: they can be stopped, and hold no lock that the server needs.

A thread would not do: parsing JSON, validation by pydantic and regular expressions hold the interpreter's lock, and the
event loop waits for it. Nor would `multiprocessing.Process` or anyio's processes: they run the main module again.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from queue import Empty, LifoQueue
from threading import Event
from typing import Any, TypeVar

from invariant_rag.errors import InvariantRAGError

T = TypeVar("T")

_POLL_SECONDS = 0.05
_START_SECONDS = 120.0
"""For a process to start and to import what it needs."""
_MAIN = "import sys; sys.path[:] = {path!r}; from invariant_rag.server.worker import serve; serve({pipe})"


class WorkerFailed(RuntimeError):
    """A worker ended, or a function raised what is no error of this library. It names no contents."""


class Worker:
    """A process that calls functions of this package, one at a time. It starts with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, seconds: float, abandoned: Event, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function of a module returns for arguments, all of them picklable.

        Args:
            seconds: How long it may take, once the process is up; then the process is stopped.
            abandoned: Once set, nobody waits for the result any more: the process is stopped.
            function: The function.
            *arguments: Its arguments.

        Raises:
            CancelledError: It was abandoned.
            InvariantRAGError: As the function raised it.
            TimeoutError: It takes too long.
            WorkerFailed: The process ended, or the function failed otherwise.
        """
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._pipe, pipe = Pipe()
            command = [sys.executable, "-c", _MAIN.format(path=sys.path, pipe=pipe.fileno())]
            # In a session of its own: Ctrl-C is for the server, which finishes what runs. It ends when its pipe does.
            self._process = subprocess.Popen(command, pass_fds=[pipe.fileno()], start_new_session=True)  # noqa: S603
            pipe.close()
            self._exchange(_START_SECONDS, abandoned, _import, function.__module__)
        found: T = self._exchange(seconds, abandoned, function, *arguments)
        return found

    def stop(self) -> None:
        """End the process, in the middle of a call too."""
        if (process := self._process) is not None:
            process.kill()
            process.wait()
            self._pipe.close()
            self._process = None

    def _exchange(self, seconds: float, abandoned: Event, *call: Any) -> Any:
        end = time.monotonic() + seconds
        try:
            self._pipe.send(call)
            while not self._pipe.poll(_POLL_SECONDS):
                if abandoned.is_set():
                    raise CancelledError
                if time.monotonic() > end:
                    raise TimeoutError
            is_error, value = self._pipe.recv()
        except (CancelledError, TimeoutError):
            self.stop()
            raise
        except (EOFError, OSError) as error:
            raise WorkerFailed("the worker ended in the middle of a call") from error
        if isinstance(value, InvariantRAGError) and is_error:
            raise value
        if is_error:
            raise WorkerFailed(f"a worker failed: {value}")
        return value


class Workers:
    """Some workers, each of which a call has for itself.

    Args:
        count: How many there are at most. One that is idle is taken before another one is started.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._all = [Worker() for _ in range(count)]
        self._idle: LifoQueue[Worker] = LifoQueue()
        for each in self._all:
            self._idle.put(each)
        atexit.register(self.stop)

    def call(self, seconds: float, abandoned: Event, function: Callable[..., T], *arguments: object) -> T:
        """Call a function in the next worker that is idle; see `Worker.call`."""
        while not abandoned.is_set():
            try:
                worker = self._idle.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            try:
                return worker.call(seconds, abandoned, function, *arguments)
            finally:
                self._idle.put(worker)
        raise CancelledError

    def stop(self) -> None:
        """End all of them; the next call starts one again."""
        for each in self._all:
            each.stop()


PARSERS = Workers(2)
"""Parse bodies, for all applications of this process. They keep nothing of a request."""


def _import(module: str) -> None:
    """Import what a later call needs, so that its time is not counted."""
    import_module(module)


def serve(number: int) -> None:
    """Answer calls from a pipe until it ends. What functions print goes to standard error."""
    pipe, sys.stdout = Connection(number), sys.stderr
    while True:
        try:
            function, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (False, function(*arguments))
        except InvariantRAGError as error:
            answer = (True, error)
        except Exception as error:  # noqa: BLE001 - the message may hold texts; its class and place do not
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            where = "" if place is None else f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
            answer = (True, f"{type(error).__name__}{where}")
        pipe.send(answer)
