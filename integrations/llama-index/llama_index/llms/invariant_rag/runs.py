"""What a run of LlamaIndex retrieves, and what LLMs of this package report of their answers in it.

A run is an outermost span, such as a query, a chat or a workflow; it ends with that span. What it retrieved for no LLM,
as `retriever.retrieve(...)` does, is then only a reason to warn of texts that hold it: see `outside_retrievals`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever

from invariant_rag.prompts import Outside, Retrieval, begin_outside, find_set
from invariant_rag.segments import SegmentSet
from llama_index.llms.invariant_rag.nodes import Retrieved

METADATA_KEY = "invariant_rag"
"""Where the metadata of a response holds the report."""


class Reports:
    """What all LLMs that are asked below one engine report, in the metadata of its response."""

    def __init__(self) -> None:
        self._noted: list[Mapping[str, Any]] = []
        self._response: Any = None
        self._below: list[Any] = []  # responses of engines below, which report on them
        self._lock = Lock()

    def note(self, report: Mapping[str, Any]) -> None:
        """Add a report. Of a stream, it comes after the response."""
        with self._lock:
            self._noted.append(report)
            self._show()

    def show_in(self, response: Any, around: Iterable[Reports] = ()) -> None:
        """Write what is reported, now or later, into the metadata of a response, which engines around may return, too.

        A response that an engine below returned says what was read by the calls that wrote it. But it is invariant only
        if all calls are, such as those of a reranker.
        """
        for each in around:
            each._below.append(response)
        with self._lock:
            self._response = response
            self._show()

    def _show(self) -> None:
        if self._response is None or not self._noted:
            return
        metadata = getattr(self._response, "metadata", None) or {}
        if all(each is not self._response for each in self._below):
            metadata[METADATA_KEY] = _joined(self._noted)
            self._response.metadata = metadata
        if METADATA_KEY in metadata:
            report = metadata[METADATA_KEY]
            report["invariant"] = _verdict([report["invariant"], *(each["invariant"] for each in self._noted)])


def _verdict(of_calls: Iterable[bool | None]) -> bool | None:
    """Return whether an answer is invariant: if all calls that read documents are; None if none read any."""
    known = [each for each in of_calls if each is not None]
    return all(known) if known else None


def _joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several reports as one: all sets, all tokens, one verdict; else what the last one says."""
    found = dict(reports[-1])
    for name, last in reports[-1].items():
        every = [report[name] for report in reports if name in report]
        if name in ("sets", "order", "dropped", "trimmed"):
            found[name] = [item for each in every for item in each]
        elif name == "cached_tokens":
            found[name] = sum(every)
        elif name == "usage":
            found[name] = {count: sum(each[count] for each in every) for count in last}
        elif name == "invariant":
            found[name] = _verdict(every)
    return found


@dataclass
class Scope:
    """One span, in the run to which it belongs."""

    instance: object  # whose method it is
    around: Scope | None
    retrievals: list[Retrieved]  # of the whole run, the last ones last
    given: Retrieved | None = None  # what a synthesizer was given; else that of the span around
    reports: Reports | None = None  # of LLMs below an engine
    outside: Outside | None = None  # of a run: where to note, when it ends, what it retrieved for no LLM
    asked: bool = False  # whether an LLM was asked in a run
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

    @property
    def known(self) -> list[Retrieval]:
        """What was retrieved in the run, the last one first, in every form in which LLMs are shown it."""
        inside = self.innermost(BaseRetriever) is not None
        return [replace(form, one_by_one=inside) for each in reversed(self.retrievals) for form in each.forms]

    def find(self, slot: str, *, is_context: bool = False) -> SegmentSet | None:
        """Return the set that a slot is; None if it is none, or, unless it is known to be context, the question."""
        return find_set(slot, [replace(each, query="") for each in self.known] if is_context else self.known)

    def is_set(self, query: str) -> bool:
        """Return whether a question is nothing but nodes, so that it cannot be told from them in every order."""
        return self.find(query, is_context=True) is not None

    def missing(self, in_sets: Sequence[str]) -> list[Retrieval]:
        """Return what is not whole in these texts of segments."""
        found = [each for each in self.known if not all(any(s.text in t for t in in_sets) for s in each.segments)]
        return [replace(each, query="") if self.is_set(each.query) else each for each in found]


_scope: ContextVar[Scope | None] = ContextVar("invariant_rag_scope", default=None)


def current_scope() -> Scope:
    """Return the innermost span of now that has not ended; outside of any, an empty one."""
    inner = _scope.get()
    spans = inner.path() if inner is not None else ()
    return next((each for each in spans if not each.ended), Scope(None, None, [], ended=True))


def enter(instance: object) -> Scope:
    """Begin a span in the run of now, or a run."""
    around = current_scope()
    if not around.ended:
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


def carry(response: Any, scope: Scope) -> None:
    """Let an LLM that is asked when a response is read, after its span has ended, know the run."""
    pieces = getattr(response, "response_gen", None)
    kept = replace(scope, retrievals=list(scope.retrievals), ended=False)
    if isinstance(pieces, Generator):
        context = copy_context()
        context.run(_scope.set, kept)
        response.response_gen = (piece for piece in iter(partial(context.run, next, pieces, None), None))
    elif isinstance(pieces, AsyncGenerator):
        response.response_gen = _carried(pieces, kept)


async def _carried(pieces: AsyncGenerator[str, None], kept: Scope) -> AsyncGenerator[str, None]:
    async with aclosing(pieces):
        while True:
            token = _scope.set(kept)
            try:
                piece = await anext(pieces, None)
            finally:
                _scope.reset(token)
            if piece is None:
                return
            yield piece
