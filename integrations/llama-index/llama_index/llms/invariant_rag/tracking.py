"""What was retrieved in which span of LlamaIndex, so that an LLM of the same trace finds it in its prompt.

One span handler at the root dispatcher sees every span of the process. Retrievers and node postprocessors return nodes;
a response synthesizer is given those that the LLM gets, and they replace what was retrieved for it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar
from threading import Lock
from typing import Any, TypeVar, cast

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index_instrumentation import root_dispatcher
from llama_index_instrumentation.span import BaseSpan, active_span_id
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from invariant_rag.prompts import Finding, KnownDocument, Retrieval, RunDocuments, has_marks, report, without_marks
from invariant_rag.segments import Segment
from llama_index.llms.invariant_rag.nodes import has_media, known_node, known_sources

T = TypeVar("T")

RUNS = RunDocuments()
"""What was retrieved in which span."""

_METHOD = re.compile(r"\.(\w+)-[0-9a-f-]{36}$")


class SortsMedia:
    """A synthesizer that puts images and their texts in order by itself: they are no segments."""


class SpanTracker(BaseSpanHandler[BaseSpan]):
    """Notes which span belongs to which, and which nodes are read in it."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name of this handler."""
        return "InvariantRAGSpanTracker"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note a span, and the nodes or texts that a synthesizer is given."""
        RUNS.start(id_, parent_span_id, retrieves=isinstance(instance, BaseRetriever))
        if isinstance(instance, CitationQueryEngine):
            _citing.add(id_)
        elif isinstance(instance, BaseSynthesizer):
            if _synthesizing.isdisjoint(RUNS.path(id_)):  # else it combines texts of its own
                _note_input(id_, parent_span_id, instance, bound_args.arguments)
            _synthesizing.add(id_)
        elif isinstance(instance, LLM):
            _check_marks(instance, bound_args.arguments)

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        result: Any = None,
        **kwargs: Any,
    ) -> None:
        """Note the nodes that a span returns, and forget the span."""
        try:
            method = _METHOD.search(id_)
            name = method[1] if method else ""
            if isinstance(instance, BaseRetriever) and name in {"retrieve", "aretrieve"}:
                RUNS.add(id_, map(known_node, result))
            elif isinstance(instance, BaseNodePostprocessor) and name in {"_postprocess_nodes", "_apostprocess_nodes"}:
                engine = RUNS.path(id_)[1:2] or [id_]
                RUNS.add(engine[0], map(known_node, result))
            elif isinstance(instance, BaseSynthesizer):
                _keep_for_stream(id_, result)
        finally:
            _forget(id_)

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        """Forget a span that ended with an error."""
        _forget(id_)


_TRACKER = SpanTracker()
_STREAMED: ContextVar[tuple[Sequence[Retrieval], Sequence[KnownDocument]] | None] = ContextVar(
    "_STREAMED", default=None
)
_lock = Lock()
_citing: set[Any] = set()
_synthesizing: set[Any] = set()


def track_spans() -> None:
    """Add the handler to the root dispatcher, unless it is there."""
    with _lock:
        if all(each is not _TRACKER for each in root_dispatcher.span_handlers):
            root_dispatcher.add_span_handler(_TRACKER)


def retrieved() -> tuple[Sequence[Retrieval], Sequence[KnownDocument]]:
    """Return what was retrieved in this trace, and what was retrieved in others."""
    span = active_span_id.get()
    return _STREAMED.get() or (RUNS.of(span), RUNS.elsewhere(span))


def is_cited() -> bool:
    """Return whether a `CitationQueryEngine` is asking."""
    span = active_span_id.get()
    return span is not None and not _citing.isdisjoint(RUNS.path(span))


def _note_input(span: str, parent: str | None, synthesizer: object, arguments: Mapping[str, Any]) -> None:
    """Note what a synthesizer was given: nodes for the engine that gives them, texts for the call itself."""
    nodes, texts = arguments.get("nodes"), arguments.get("text_chunks")
    if nodes:
        read = [each for each in nodes if not has_media(each.node)] if isinstance(synthesizer, SortsMedia) else nodes
        labelled = not _citing.isdisjoint(RUNS.path(span))
        RUNS.add(parent or span, known_sources(read) if labelled else map(known_node, read))
    elif texts:
        RUNS.add(span, [KnownDocument.of(Segment(without_marks(text))) for text in texts])


def _keep_for_stream(span: str, response: Any) -> None:
    """Let an LLM that is asked when a stream is read, after all spans have ended, know what was retrieved for it."""
    known = RUNS.of(span), RUNS.elsewhere(span)
    if isinstance(response, StreamingResponse):
        response.response_gen = _knowing(response.response_gen, known)
    elif isinstance(response, AsyncStreamingResponse):
        response.response_gen = _aknowing(response.response_gen, known)


def _knowing(pieces: Generator[T, None, None], known: Any) -> Generator[T, None, None]:
    done = object()
    with closing(pieces):
        while True:
            token = _STREAMED.set(known)
            try:
                piece = next(pieces, done)
            finally:
                _STREAMED.reset(token)
            if piece is done:
                return
            yield cast(T, piece)


async def _aknowing(pieces: AsyncGenerator[T, None], known: Any) -> AsyncGenerator[T, None]:
    done = object()
    async with aclosing(pieces):
        while True:
            token = _STREAMED.set(known)
            try:
                piece = await anext(pieces, done)
            finally:
                _STREAMED.reset(token)
            if piece is done:
                return
            yield cast(T, piece)


def _check_marks(llm: LLM, arguments: Mapping[str, Any]) -> None:
    """Say that marks reach an LLM that does not know them."""
    inner = llm.llm if isinstance(llm, StructuredLLM) else llm
    if getattr(inner, "parses_marks", False):
        return
    passed = (*arguments.get("args", ()), *arguments.get("kwargs", {}).values(), *arguments.values())
    lists = [each if isinstance(each, list | tuple) else [each] for each in passed]
    texts = [each.content if isinstance(each, ChatMessage) else each for given in lists for each in given]
    if any(isinstance(text, str) and has_marks(text) for text in texts):
        message = f"{type(inner).__name__} does not know segments, and gets text with segment markers."
        report([Finding("marks", message)], fixes={"marks": "Wrap it: canonical(llm)."})


def _forget(span: str) -> None:
    RUNS.end(span)
    _citing.discard(span)
    _synthesizing.discard(span)
