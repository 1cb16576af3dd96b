"""Processes of Python that work on what a client sends: they can be stopped, and hold no lock that the server needs.

A thread would not do: parsing JSON, validation by pydantic and regular expressions hold the interpreter's lock, and the
event loop waits for it. Nor would `multiprocessing.Process` or anyio's processes: they run the main module again.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from queue import Empty, LifoQueue
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from invariant_rag.errors import InvalidSchema, InvariantRAGError
from invariant_rag.generation.json_schema import compile_tag, validate_value
from invariant_rag.server.admission import POLL_SECONDS, FairQueue

if TYPE_CHECKING:
    from invariant_rag.generation.structured import Vocabulary

T = TypeVar("T")

_START_SECONDS = 120.0  # for a process to start and to import what it needs
_MAIN = "import sys; sys.path[:] = {path!r}; from invariant_rag.server.worker import serve; serve({pipe})"


class WorkerFailed(RuntimeError):
    """A worker ended, or a function raised what is no error of this library. It names no contents."""


class Worker:
    """A process that calls functions of this package, one at a time. It starts with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, seconds: float, abandoned: Event, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function of a module returns for arguments, all of them picklable.

        Raises:
            CancelledError: It was abandoned. The process is stopped.
            InvariantRAGError: As the function raised it.
            TimeoutError: It takes more seconds, once the process is up, which is stopped then.
            WorkerFailed: The process ended, or the function failed otherwise.
        """
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._pipe, pipe = Pipe()
            command = [sys.executable, "-c", _MAIN.format(path=sys.path, pipe=pipe.fileno())]
            # In a session of its own: Ctrl-C is for the server, which finishes what runs. It ends when its pipe does.
            self._process = subprocess.Popen(command, pass_fds=[pipe.fileno()], start_new_session=True)  # noqa: S603
            pipe.close()
            self._exchange(_START_SECONDS, abandoned, callable, function)  # imports what it needs
        result: T = self._exchange(seconds, abandoned, function, *arguments)
        return result

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
            while not self._pipe.poll(POLL_SECONDS):
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
    """So many workers at most, each of which a call has for itself. An idle one is taken before another is started."""

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
                worker = self._idle.get(timeout=POLL_SECONDS)
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


def serve(number: int) -> None:
    """Answer calls from a pipe until it ends. Nothing that is printed gets out: xgrammar's warnings hold texts."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
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
        except Exception as error:  # noqa: BLE001 - the message may hold texts; its class and line do not
            frame = error.__traceback__
            while frame is not None and frame.tb_next is not None:
                frame = frame.tb_next
            where = "" if frame is None else f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
            answer = (True, f"{type(error).__name__}{where}")
        pipe.send(answer)


COMPILING_SECONDS = 20.0  # that a schema may take; one with `maxLength: 200` takes half of that with 150,000 tokens
_MOST = 1000

PARSERS = Workers(2)  # parse bodies, for all applications of this process, and keep nothing of a request
COMPILERS = Workers(1)  # compiles schemas, for all models of this process
VALIDATORS = Workers(2)  # validate answers: patterns may backtrack, and references fan out
VALIDATION_SECONDS = 5.0
VALIDATION_TURNS = FairQueue(VALIDATORS.count, 1)


def validate(value: Any, schema: Mapping[str, Any], tenant: str, abandoned: Event) -> None:
    """Validate an answer's object, in a worker and in turns of tenants; what takes too long is an InvalidSchema."""
    try:
        with VALIDATION_TURNS.turn(tenant, 0.0, abandoned):
            VALIDATORS.call(VALIDATION_SECONDS, abandoned, validate_value, value, dict(schema))
    except TimeoutError:
        raise InvalidSchema(
            f"expected a schema that validates an answer in {VALIDATION_SECONDS:g} seconds, got one that does not",
            hint="Leave away references in circles, and nested repetitions in patterns.",
        ) from None


class SchemaCompiler:
    """Compiles every schema once, however many requests have it, and keeps grammars of so many bytes.

    One is compiled at a time, in turns: a tenant with many slow schemas does not keep those of others waiting.
    """

    def __init__(self, most_bytes: int, turns: FairQueue) -> None:
        self._most_bytes, self._turns = most_bytes, turns
        self._kept: OrderedDict[tuple[Vocabulary, str], Any] = OrderedDict()  # the latest used last

    def compile(self, tenant: str, abandoned: Event, vocabulary: Vocabulary, tag: str) -> Any:
        """Return the `CompiledGrammar` of a structural tag of a tenant."""
        key = vocabulary, hashlib.sha256(tag.encode("utf-8", "surrogatepass")).hexdigest()
        grammar = self._kept.get(key)
        if grammar is None:
            with self._turns.turn(tenant, 0.0, abandoned):
                grammar = self._kept.get(key) or self._store(key, _compiled(abandoned, vocabulary, tag))
        with suppress(KeyError):
            self._kept.move_to_end(key)
        if isinstance(grammar, InvalidSchema):
            raise InvalidSchema(str(grammar), hint=grammar.hint)
        return grammar

    def _store(self, key: tuple[Vocabulary, str], grammar: Any) -> Any:
        self._kept[key] = grammar
        sizes = [getattr(each, "memory_size_bytes", 0) for each in self._kept.values()]
        while len(sizes) > 1 and (sum(sizes) > self._most_bytes or len(sizes) > _MOST):
            self._kept.popitem(last=False)
            del sizes[0]
        return grammar


def _compiled(abandoned: Event, vocabulary: Vocabulary, tag: str) -> Any:
    """Return a `CompiledGrammar`, or the error that the schema causes, which is cached, too."""
    from xgrammar import CompiledGrammar

    COMPILERS.call(_START_SECONDS, abandoned, prepare, vocabulary.serialized)
    try:
        grammar = COMPILERS.call(COMPILING_SECONDS, abandoned, compile_serialized, vocabulary.serialized, tag)
    except InvalidSchema as error:
        return error
    except TimeoutError:
        return InvalidSchema(
            f"expected a schema that compiles within {COMPILING_SECONDS:g} seconds for this model",
            hint="Ask for less, or say it in the prompt: shorter patterns, lower counts, fewer properties.",
        )
    return CompiledGrammar.deserialize_json(grammar, vocabulary.info)


def prepare(vocabulary: str) -> None:
    """Import the compiler, and make that of a vocabulary, in a worker, before the time of a schema is taken."""
    _compiler(vocabulary)


def compile_serialized(vocabulary: str, tag: str) -> str:
    """Return the serialized `CompiledGrammar` of a structural tag for a serialized `TokenizerInfo`, in a worker."""
    return str(compile_tag(_compiler(vocabulary), tag).serialize_json())


@lru_cache(maxsize=2)
def _compiler(vocabulary: str) -> Any:
    from xgrammar import GrammarCompiler, TokenizerInfo

    return GrammarCompiler(TokenizerInfo.deserialize_json(vocabulary), cache_enabled=False)
