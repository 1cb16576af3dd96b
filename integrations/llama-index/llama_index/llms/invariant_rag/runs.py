"""What is retrieved in a run of LlamaIndex, for LLMs of this package that are asked in the same run.

A run is an outermost span, such as a query, a chat or a workflow; it ends with that span, and nothing of it is kept.
Retrievers, postprocessors and LLMs that are called outside of any span belong to the run of their task or thread, which
knows its last few retrievals. Context variables carry it: another task, thread or tenant has another one.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index_instrumentation import root_dispatcher
from llama_index_instrumentation.span import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from llama_index.llms.invariant_rag.reports import Reports

_ANSWERING = (BaseSynthesizer, BaseQueryEngine, BaseChatEngine)
_RESPONSES = (AgentChatResponse, StreamingAgentChatResponse)  # the latter gets its metadata here
_ASKED_ALONE = (BaseRetriever, BaseNodePostprocessor, LLM)
_RESULTS = ("retrieve", "aretrieve", "_postprocess_nodes", "_apostprocess_nodes")
_REMEMBERED = 8


@dataclass(frozen=True)
class Retrieved:
    """What a retriever or postprocessor returned, or a synthesizer was given.

    Attributes:
        query: What was asked; empty if that is not known.
        nodes: The nodes.
    """

    query: str
    nodes: Sequence[NodeWithScore]


@dataclass
class Scope:
    """One span, in the run to which it belongs.

    Attributes:
        instance: The object whose method it is.
        around: The span around it.
        retrievals: What was retrieved in the run, the last ones last.
        given: What a synthesizer was given; else that of the span around.
        reports: What LLMs report below an engine; None if it is none.
        ended: Whether it is over.
    """

    instance: object
    around: Scope | None
    retrievals: deque[Retrieved]
    given: Retrieved | None = None
    reports: Reports | None = None
    ended: bool = field(default=False)

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
_alone: ContextVar[deque[Retrieved] | None] = ContextVar("invariant_rag_alone", default=None)


def current_scope() -> Scope:
    """Return the innermost span of now that has not ended; outside of any, one of this task or thread."""
    return _open() or Scope(None, None, _alone.get() or deque())


def _open() -> Scope | None:
    return next((each for each in scope.path() if not each.ended), None) if (scope := _scope.get()) else None


def _retrievals_of(instance: object, around: Scope | None) -> deque[Retrieved]:
    if around is not None:
        return around.retrievals
    if not isinstance(instance, _ASKED_ALONE):
        return deque()
    if (known := _alone.get()) is None:
        _alone.set(known := deque(maxlen=_REMEMBERED))
    return known


class RunHandler(BaseSpanHandler[BaseSpan]):
    """Keeps what is retrieved in a run with that run, and shows what LLMs report in the responses of engines."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name of this handler."""
        return "InvariantRAGRunHandler"

    def new_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Enter a span, and note the nodes or texts that a synthesizer is given."""
        around, given = _open(), bound_args.arguments
        scope = Scope(instance, around, _retrievals_of(instance, around), around.given if around else None)
        if isinstance(instance, _ANSWERING):
            scope.reports = Reports()
        outer = around.innermost(BaseSynthesizer) if around else None
        if isinstance(instance, BaseSynthesizer) and (outer is None or (outer is instance and "nodes" in given)):
            scope.given = _given(given)
            scope.retrievals.append(scope.given)
        _spans[id_] = scope
        _scope.set(scope)

    def prepare_to_exit_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> None:
        """Note the nodes that a span returns, show what LLMs report in a response, and leave the span."""
        scope = _spans[id_]
        method = id_.split("-")[0].rpartition(".")[2]
        if method in _RESULTS and isinstance(instance, BaseRetriever | BaseNodePostprocessor):
            scope.retrievals.append(Retrieved(_query(bound_args.arguments), list(result)))
        if scope.reports is not None and (hasattr(result, "metadata") or isinstance(result, _RESPONSES)):
            own, *others = scope.sinks
            own.show_in(result, others)
        self.prepare_to_drop_span(id_)

    def prepare_to_drop_span(self, id_: str, *args: Any, **kwargs: Any) -> None:
        """Leave a span; a run ends with its outermost one."""
        scope = _spans.pop(id_)
        scope.ended = True
        if scope.around is None and scope.retrievals.maxlen is None:
            scope.retrievals.clear()


_spans: dict[str, Scope] = {}
"""Spans that are open, by their id."""


def _query(arguments: Any) -> str:
    names = ("str_or_query_bundle", "query", "query_bundle", "query_str")
    asked = next((arguments[name] for name in names if name in arguments), "")
    return asked.query_str if isinstance(asked, QueryBundle) else asked or ""


def _given(arguments: Any) -> Retrieved:
    nodes = arguments.get("nodes")
    if nodes is None:
        texts = [each for each in arguments.get("text_chunks", ()) if isinstance(each, str)]
        nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    return Retrieved(_query(arguments), list(nodes))


root_dispatcher.add_span_handler(RunHandler())
