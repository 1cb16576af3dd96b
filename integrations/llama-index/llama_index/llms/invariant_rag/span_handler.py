"""The handler of LlamaIndex's spans: what is retrieved in a run is kept with the run, and what LLMs report is shown.

A run is an outermost span, such as a query or a workflow. What it retrieved for no LLM, as `retriever.retrieve(...)`
does, is afterwards only a reason to warn of texts that hold it: see `outside_retrievals`.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from contextvars import copy_context
from dataclasses import replace
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
from llama_index_instrumentation.span import BaseSpan, active_span_id
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from invariant_rag.errors import OrderWarning
from invariant_rag.prompts import begin_outside
from llama_index.llms.invariant_rag import runs
from llama_index.llms.invariant_rag.runs import SCOPE, Reports, Retrieved, Scope, current_scope, knows_segments

_RETURNS_NODES = ("retrieve", "aretrieve", "_postprocess_nodes", "_apostprocess_nodes")


class RunHandler(BaseSpanHandler[BaseSpan]):
    """Notes what is retrieved in a run, and shows what LLMs of this package report in the responses of engines."""

    _scopes: dict[str, Scope] = PrivateAttr(default_factory=dict)

    def new_span(self, id_: str, bound_args: Any, instance: Any = None, *args: Any, **kwargs: Any) -> None:
        """Enter a span in the run of now, or begin a run; note the nodes or texts that a synthesizer is given."""
        around, given = current_scope(), bound_args.arguments
        inner = Scope(instance, around, around.retrievals, around.given)
        self._scopes[id_] = scope = Scope(instance, outside=begin_outside()) if around.ended else inner
        SCOPE.set(scope)
        if isinstance(instance, BaseSynthesizer | BaseQueryEngine | BaseChatEngine):
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
                runs.check_marks(instance, given)

    def prepare_to_exit_span(
        self, id_: str, bound_args: Any, instance: Any = None, result: Any = None, **_: Any
    ) -> None:
        """Note the nodes that a span returns, show what LLMs report in a response, and leave the span."""
        scope = self._scopes[id_]
        method = id_.partition("-")[0].rpartition(".")[2]
        if method in _RETURNS_NODES and isinstance(instance, BaseRetriever | BaseNodePostprocessor):
            scope.retrievals.append(Retrieved.of_call(bound_args.arguments, result))
        is_response = hasattr(result, "metadata") or isinstance(result, StreamingAgentChatResponse)
        if scope.reports is not None and is_response:
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
                unread = [] if scope.is_asked else scope.retrievals
                scope.outside.retrievals = [form for each in unread for form in each.forms]
            scope.retrievals.clear()


def _carry(response: Any, scope: Scope) -> None:
    """Let an LLM that is asked when a response is consumed, after its span has ended, know the run."""
    pieces = getattr(response, "response_gen", None)
    context = copy_context()
    context.run(SCOPE.set, replace(scope, retrievals=list(scope.retrievals), ended=False))
    if isinstance(pieces, Generator):
        response.response_gen = (piece for piece in iter(partial(context.run, next, pieces, None), None))
    elif isinstance(pieces, AsyncGenerator):
        response.response_gen = _carried(pieces, context[SCOPE])


async def _carried(pieces: AsyncGenerator[str, None], scope: Scope | None) -> AsyncGenerator[str, None]:
    async with aclosing(pieces):
        while True:
            token = SCOPE.set(scope)
            try:
                piece = await anext(pieces, None)
            finally:
                SCOPE.reset(token)
            if piece is None:
                return
            yield piece


def attach_handler() -> None:
    """Add the handler to the root dispatcher, unless it is there, and trace comparisons, which LlamaIndex does not."""
    if active_span_id.get() is not None:
        message = (
            "What this run has retrieved so far is unknown. Import llama_index.llms.invariant_rag before a run begins."
        )
        warnings.warn(message, OrderWarning, stacklevel=3)
    if not any(isinstance(each, RunHandler) for each in root_dispatcher.span_handlers):
        root_dispatcher.add_span_handler(RunHandler())
        traced = root_dispatcher.span(PairwiseComparisonEvaluator.aevaluate)
        setattr(PairwiseComparisonEvaluator, "aevaluate", traced)  # noqa: B010 - a class of LlamaIndex
