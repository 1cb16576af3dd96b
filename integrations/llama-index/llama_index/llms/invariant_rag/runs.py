"""What is retrieved in a run of LlamaIndex, for LLMs of this package that are asked in the same run.

A run is an outermost span, such as a query, a chat or a workflow; it ends with that span. What it retrieved for no LLM,
as `retriever.retrieve(...)` does, is then only a reason to warn of texts that hold it: see `outside_retrievals`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing, closing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from invariant_rag.prompts import Outside, begin_outside
from llama_index.llms.invariant_rag.nodes import Retrieved
from llama_index.llms.invariant_rag.reports import Reports

T = TypeVar("T")


@dataclass
class Scope:
    """One span, in the run to which it belongs.

    Attributes:
        instance: The object whose method it is.
        around: The span around it.
        retrievals: What was retrieved in the run, the last ones last.
        given: What a synthesizer was given; else that of the span around.
        reports: What LLMs report below an engine; None if it is none.
        outside: Where to note, when a run ends, what it retrieved for no LLM.
        asked: Whether an LLM was asked in a run.
        ended: Whether it is over.
    """

    instance: object
    around: Scope | None
    retrievals: list[Retrieved]
    given: Retrieved | None = None
    reports: Reports | None = None
    outside: Outside | None = None
    asked: bool = False
    ended: bool = False

    def path(self) -> Iterator[Scope]:
        """Yield this span and those around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.around

    def innermost(self, *kinds: type) -> Any:
        """Return the innermost object of these classes around; None if there is none."""
        return next((each.instance for each in self.path() if isinstance(each.instance, kinds)), None)

    @property
    def sinks(self) -> tuple[Reports, ...]:
        """Where LLMs report, innermost engine first."""
        return tuple(each.reports for each in self.path() if each.reports is not None)


_scope: ContextVar[Scope | None] = ContextVar("invariant_rag_scope", default=None)


def current_scope() -> Scope:
    """Return the innermost span of now that has not ended; outside of any, an empty one."""
    return _open() or Scope(None, None, [])


def _open() -> Scope | None:
    inner = _scope.get()
    return None if inner is None else next((each for each in inner.path() if not each.ended), None)


def enter(instance: object) -> Scope:
    """Begin a span in the run of now, or a run."""
    around = _open()
    if around is not None:
        scope = Scope(instance, around, around.retrievals, around.given)
    else:
        scope = Scope(instance, None, [], outside=begin_outside())
    _scope.set(scope)
    return scope


def leave(scope: Scope, *, failed: bool = False) -> None:
    """End a span; with the outermost one, its run ends."""
    scope.ended = True
    if scope.outside is not None:
        if scope.retrievals and not failed:
            scope.outside.retrievals = [] if scope.asked else [form for each in scope.retrievals for form in each.forms]
        scope.retrievals.clear()


def keep(scope: Scope) -> Scope:
    """Return a copy of a span that does not end with its run: for a stream that is read later."""
    return replace(scope, retrievals=list(scope.retrievals), ended=False)


def carried(pieces: Generator[T, None, None], kept: Scope) -> Generator[T, None, None]:
    """Read a stream in the span that returned it: an LLM may be asked when it is read, after that span has ended."""
    with closing(pieces):
        while True:
            token = _scope.set(kept)
            try:
                piece = next(pieces)
            except StopIteration:
                return
            finally:
                _scope.reset(token)
            yield piece


async def acarried(pieces: AsyncGenerator[T, None], kept: Scope) -> AsyncGenerator[T, None]:
    """Read an asynchronous stream in the span that returned it."""
    async with aclosing(pieces):
        while True:
            token = _scope.set(kept)
            try:
                piece = await anext(pieces)
            except StopAsyncIteration:
                return
            finally:
                _scope.reset(token)
            yield piece
