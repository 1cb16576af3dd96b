"""What was retrieved in which span of LlamaIndex, so that an LLM of the same trace finds it in its prompt.

One span handler at the root dispatcher sees every span of the process. Retrievers and node postprocessors return nodes;
a response synthesizer is given those that the LLM gets, and they replace what was retrieved for it. What LLMs of this
package report of their answers is written into the responses of the engines around them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import AsyncGeneratorType, FrameType, GeneratorType
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import QueryBundle
from llama_index_instrumentation import root_dispatcher
from llama_index_instrumentation.span import BaseSpan, active_span_id
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from invariant_rag.prompts import Finding, KnownDocument, Retrieval, RunDocuments, has_marks, report, without_marks
from invariant_rag.segments import Segment
from llama_index.llms.invariant_rag.nodes import has_media, known_node, known_sources
from llama_index.llms.invariant_rag.reports import Noted, Reports

RUNS = RunDocuments()
"""What was retrieved in which span."""

Asker: TypeAlias = Literal["call", "synthesizer", "chat engine", "postprocessor", "retriever"]
"""What asks an LLM; a user's own code is a `call`."""

_METHOD = re.compile(r"\.(\w+)-[0-9a-f-]{36}$")
_ANSWERING = (BaseSynthesizer, BaseQueryEngine, BaseChatEngine)
_ASKING = (BaseSynthesizer, BaseNodePostprocessor, BaseRetriever)


class SortsMedia:
    """A synthesizer that puts images and their texts in order by itself: they are no segments."""


@dataclass(frozen=True)
class Trace:
    """What an LLM knows of the trace in which it is asked.

    Attributes:
        known: What was retrieved in it.
        elsewhere: What was retrieved in others.
        asker: What asks.
        reports: Where to report the answer, innermost engine first.
    """

    known: Sequence[Retrieval]
    elsewhere: Sequence[KnownDocument]
    asker: Asker
    reports: Sequence[Reports]


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
        asked = bound_args.arguments.get("str_or_query_bundle", "") if isinstance(instance, BaseRetriever) else ""
        query = asked.query_str if isinstance(asked, QueryBundle) else asked
        RUNS.start(id_, parent_span_id, retrieves=isinstance(instance, BaseRetriever), query=query)
        if isinstance(instance, BaseSynthesizer) and not _is_within(id_, BaseSynthesizer):  # else of texts of its own
            _note_input(id_, parent_span_id, instance, bound_args.arguments)
        if isinstance(instance, (*_ANSWERING, *_ASKING)):
            _instances[id_] = instance
        if isinstance(instance, _ANSWERING):
            _reports[id_] = Reports()
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
        """Note the nodes that a span returns, write what LLMs report into a response, and forget the span."""
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
            if id_ in _reports and (
                hasattr(result, "metadata") or isinstance(result, AgentChatResponse | StreamingAgentChatResponse)
            ):
                own, *around = _reports_around(id_)
                own.show_in(result, around)
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
_lock = Lock()
_instances: dict[Any, object] = {}
_reports: dict[Any, Reports] = {}
_streams: MutableMapping[Any, Trace] = WeakKeyDictionary()


def track_spans() -> None:
    """Add the handler to the root dispatcher, unless it is there."""
    with _lock:
        if all(each is not _TRACKER for each in root_dispatcher.span_handlers):
            root_dispatcher.add_span_handler(_TRACKER)


def current_trace() -> Trace:
    """Return what is known of the trace of now; of a stream that is read, that of the synthesizer which returned it."""
    return _streamed() or _trace_of(active_span_id.get())


def current_reports() -> Sequence[Reports]:
    """Return where an answer of now is reported."""
    streamed = _streamed()
    return list(_reports_around(active_span_id.get())) if streamed is None else streamed.reports


def note_answer(said: Mapping[str, Any], *, recognized: bool, reports: Sequence[Reports] | None = None) -> None:
    """Report an answer to the engines around it.

    Args:
        said: The report, with a ledger.
        recognized: Whether every node in the prompt is known to be a segment.
        reports: Where to report; None: to the engines of now.
    """
    for each in current_reports() if reports is None else reports:
        each.note(Noted(said, recognized))


def is_cited() -> bool:
    """Return whether a `CitationQueryEngine` is asking."""
    return _is_within(active_span_id.get(), CitationQueryEngine)


def _around(span: Any) -> Iterator[object]:
    """Yield the engines, synthesizers, postprocessors and retrievers around a span, innermost first."""
    path = [] if span is None else RUNS.path(span)
    return (_instances[each] for each in path if each in _instances)


def _is_within(span: Any, kind: Any) -> bool:
    return any(isinstance(each, kind) for each in _around(span))


def _reports_around(span: Any) -> Iterator[Reports]:
    path = [] if span is None else RUNS.path(span)
    return (_reports[each] for each in path if each in _reports)


def _trace_of(span: Any) -> Trace:
    return Trace(RUNS.of(span), RUNS.elsewhere(span), _asker_in(span), list(_reports_around(span)))


def _asker_in(span: Any) -> Asker:
    asking = next((each for each in _around(span) if isinstance(each, _ASKING)), None)
    if isinstance(asking, BaseNodePostprocessor):
        return "postprocessor"
    if isinstance(asking, BaseRetriever):
        return "retriever"
    if asking is None:
        return "call"
    makes_its_own = (ContextChatEngine, CondensePlusContextChatEngine)
    return "chat engine" if _is_within(span, makes_its_own) else "synthesizer"


def _note_input(span: str, parent: str | None, synthesizer: object, arguments: Mapping[str, Any]) -> None:
    """Note what a synthesizer was given: nodes for the engine that gives them, texts for the call itself."""
    nodes, texts = arguments.get("nodes"), arguments.get("text_chunks")
    if nodes:
        read = [each for each in nodes if not has_media(each.node)] if isinstance(synthesizer, SortsMedia) else nodes
        labelled = _is_within(span, CitationQueryEngine)
        RUNS.add(parent or span, known_sources(read) if labelled else map(known_node, read))
    elif texts:
        RUNS.add(span, [KnownDocument.of(Segment(without_marks(text))) for text in texts])


def _keep_for_stream(span: str, result: Any) -> None:
    """Let an LLM that is asked when a stream is read, after all spans have ended, know what was retrieved for it."""
    streams = isinstance(result, StreamingResponse | AsyncStreamingResponse)
    pieces = result.response_gen if streams else result
    if isinstance(pieces, GeneratorType | AsyncGeneratorType):
        _streams.setdefault(pieces, _trace_of(span))  # of the innermost span, around which are all others


def _streamed() -> Trace | None:
    """Return the trace of the stream that is being read; None if there is none on the stack."""
    traces = {
        each.gi_frame if isinstance(each, GeneratorType) else each.ag_frame: trace
        for each, trace in list(_streams.items())
    }
    frame: FrameType | None = sys._getframe(1) if traces else None
    while frame is not None and frame not in traces:
        frame = frame.f_back
    return traces.get(frame) if frame is not None else None


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
    _instances.pop(span, None)
    _reports.pop(span, None)
