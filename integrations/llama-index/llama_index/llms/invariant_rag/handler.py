"""The handler of LlamaIndex's spans: what is retrieved in a run is kept with the run, and what LLMs report is shown.

A run is an outermost span, such as a query, a chat or a workflow; it ends with that span. What it retrieved for no LLM,
as `retriever.retrieve(...)` does, is then only a reason to warn of texts that hold it: see `outside_retrievals`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.chat_engine.types import BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.evaluation import PairwiseComparisonEvaluator
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index_instrumentation import root_dispatcher
from llama_index_instrumentation.span import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from invariant_rag.prompts import Outside, begin_outside
from llama_index.llms.invariant_rag.nodes import Retrieved
from llama_index.llms.invariant_rag.reports import Reports, check_marks, knows_segments

_ANSWERING = (BaseSynthesizer, BaseQueryEngine, BaseChatEngine)
_RETURNS_NODES = ("retrieve", "aretrieve", "_postprocess_nodes", "_apostprocess_nodes")


@dataclass
class Scope:
    """One span, in the run to which it belongs."""

    instance: object = None  # whose method it is
    around: Scope | None = None
    retrievals: list[Retrieved] = field(default_factory=list)  # of the whole run, the last ones last
    given: Retrieved | None = None  # what a synthesizer was given; else that of the span around
    reports: Reports | None = None  # of LLMs below an engine
    outside: Outside | None = None  # of a run: where to note, when it ends, what it retrieved for no LLM
    is_asked: bool = False  # whether an LLM was asked in a run
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


_scope: ContextVar[Scope | None] = ContextVar("invariant_rag_scope", default=None)


def current_scope() -> Scope:
    """Return the innermost span of now that has not ended; outside of any, an empty one."""
    inner = _scope.get()
    spans = inner.path() if inner is not None else ()
    return next((each for each in spans if not each.ended), Scope(ended=True))


class RunHandler(BaseSpanHandler[BaseSpan]):
    """Notes what is retrieved in a run, and shows what LLMs of this package report in the responses of engines."""

    _scopes: dict[str, Scope] = PrivateAttr(default_factory=dict)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of this handler."""
        return "InvariantRAGRunHandler"

    def new_span(self, id_: str, bound_args: Any, instance: Any = None, *args: Any, **kwargs: Any) -> None:
        """Enter a span in the run of now, or begin a run; note the nodes or texts that a synthesizer is given."""
        around, given = current_scope(), bound_args.arguments
        if around.ended:
            scope = Scope(instance, outside=begin_outside())
        else:
            scope = Scope(instance, around, around.retrievals, around.given)
        self._scopes[id_] = scope
        _scope.set(scope)
        if isinstance(instance, _ANSWERING):
            scope.reports = Reports()
        if isinstance(instance, BaseSynthesizer):
            outer = around.innermost(BaseSynthesizer)
            if outer is None or (outer is instance and "nodes" in given):
                scope.given = Retrieved.of_call(given)
                if scope.innermost(CitationQueryEngine) is None:  # it has numbered them by their place
                    scope.retrievals.append(scope.given)
        elif isinstance(instance, LLM):
            *_, run = scope.path()
            run.is_asked = True
            is_call = id_.partition("-")[0].endswith(("chat", "complete"))
            if is_call and scope.retrievals and not any(knows_segments(each.instance) for each in scope.path()):
                check_marks(instance, given)

    def prepare_to_exit_span(
        self, id_: str, bound_args: Any, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> None:
        """Note the nodes that a span returns, show what LLMs report in a response, and leave the span."""
        scope = self._scopes[id_]
        method = id_.partition("-")[0].rpartition(".")[2]
        if method in _RETURNS_NODES and isinstance(instance, BaseRetriever | BaseNodePostprocessor):
            scope.retrievals.append(Retrieved.of_call(bound_args.arguments, result))
        if scope.reports is not None and (
            hasattr(result, "metadata") or isinstance(result, StreamingAgentChatResponse)
        ):
            is_read = isinstance(instance, BaseSynthesizer) and knows_segments(instance._llm)
            scope.reports.show_in(result, is_read=is_read)
            if is_read:
                _carry(result, scope)
        self.prepare_to_drop_span(id_, failed=False)

    def prepare_to_drop_span(self, id_: str, *args: Any, failed: bool = True, **kwargs: Any) -> None:
        """Leave a span; with the outermost one, its run ends."""
        scope = self._scopes.pop(id_)
        scope.ended = True
        if scope.outside is not None:
            if scope.retrievals and not failed:
                scope.outside.retrievals = [
                    form for each in scope.retrievals for form in each.forms if not scope.is_asked
                ]
            scope.retrievals.clear()


def _carry(response: Any, scope: Scope) -> None:
    """Let an LLM that is asked when a response is consumed, after its span has ended, know the run."""
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


def attach_handler() -> None:
    """Add the handler to LlamaIndex's root dispatcher, unless it is there.

    Comparisons of two answers become spans as well: LlamaIndex traces no evaluator, and one may ask in one order alone.
    """
    if not any(isinstance(each, RunHandler) for each in root_dispatcher.span_handlers):
        root_dispatcher.add_span_handler(RunHandler())
        traced = root_dispatcher.span(PairwiseComparisonEvaluator.aevaluate)
        setattr(PairwiseComparisonEvaluator, "aevaluate", traced)  # noqa: B010 - a class of LlamaIndex
