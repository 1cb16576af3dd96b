"""The handler of LlamaIndex's spans that keeps what is retrieved in a run with that run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.evaluation import PairwiseComparisonEvaluator
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index_instrumentation import root_dispatcher
from llama_index_instrumentation.span import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from invariant_rag.prompts import Finding, has_marks, report
from llama_index.llms.invariant_rag.nodes import Retrieved
from llama_index.llms.invariant_rag.reading import knows_segments
from llama_index.llms.invariant_rag.runs import METADATA_KEY, Reports, Scope, carry, enter, leave

_ANSWERING = (BaseSynthesizer, BaseQueryEngine, BaseChatEngine)
_RESPONSES = (AgentChatResponse, StreamingAgentChatResponse)  # the latter gets its metadata here
_RETURNS_NODES = ("retrieve", "aretrieve", "_postprocess_nodes", "_apostprocess_nodes")
_NOTHING_READ: Mapping[str, Any] = {"sets": [], "order": [], "dropped": [], "trimmed": [], "invariant": None}
_QUERIES = ("str_or_query_bundle", "query", "query_bundle", "query_str")


class RunHandler(BaseSpanHandler[BaseSpan]):
    """Notes what is retrieved in a run, and shows what LLMs of this package report in the responses of engines."""

    _scopes: dict[str, Scope] = PrivateAttr(default_factory=dict)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of this handler."""
        return "InvariantRAGRunHandler"

    def new_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Enter a span, and note the nodes or texts that a synthesizer is given."""
        scope, given = enter(instance), bound_args.arguments
        self._scopes[id_] = scope
        if isinstance(instance, _ANSWERING):
            scope.reports = Reports()
        if isinstance(instance, BaseSynthesizer):
            outer = scope.around.innermost(BaseSynthesizer) if scope.around else None
            if outer is None or (outer is instance and "nodes" in given):
                scope.given = _given(given)
                if scope.innermost(CitationQueryEngine) is None:  # it has numbered them by their place
                    scope.retrievals.append(scope.given)
        elif isinstance(instance, LLM):
            *_, run = scope.path()
            run.asked = True
            asked = id_.partition("-")[0].endswith(("chat", "complete"))
            if asked and scope.retrievals and not any(knows_segments(each.instance) for each in scope.path()):
                _check_marks(instance, given)

    def prepare_to_exit_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> None:
        """Note the nodes that a span returns, show what LLMs report in a response, and leave the span."""
        scope = self._scopes[id_]
        method = id_.partition("-")[0].rpartition(".")[2]
        if method in _RETURNS_NODES and isinstance(instance, BaseRetriever | BaseNodePostprocessor):
            scope.retrievals.append(Retrieved(_query(bound_args.arguments), list(result)))
        if scope.reports is not None and (hasattr(result, "metadata") or isinstance(result, _RESPONSES)):
            own, *others = scope.sinks
            own.show_in(result, others)
            if isinstance(instance, BaseSynthesizer) and knows_segments(instance._llm):
                if hasattr(result, "response_gen"):
                    carry(result, scope)
                else:  # no LLM was asked, if nothing is there
                    result.metadata = {METADATA_KEY: dict(_NOTHING_READ), **(result.metadata or {})}
        leave(self._scopes.pop(id_))

    def prepare_to_drop_span(self, id_: str, *args: Any, **kwargs: Any) -> None:
        """Leave a span that failed."""
        leave(self._scopes.pop(id_), failed=True)


def _query(arguments: Mapping[str, Any]) -> str:
    asked = next((arguments[name] for name in _QUERIES if name in arguments), "")
    return asked.query_str if isinstance(asked, QueryBundle) else asked or ""


def _given(arguments: Mapping[str, Any]) -> Retrieved:
    nodes = arguments.get("nodes")
    if nodes is None:
        texts = [each for each in arguments.get("text_chunks", ()) if isinstance(each, str)]
        nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    return Retrieved(_query(arguments), list(nodes))


def _check_marks(llm: LLM, arguments: Mapping[str, Any]) -> None:
    """Say that marks of nodes reach an LLM that does not know them."""
    passed = (*arguments.get("args", ()), *arguments.get("kwargs", {}).values(), *arguments.values())
    lists = [each if isinstance(each, list | tuple) else [each] for each in passed]
    texts = [each.content if isinstance(each, ChatMessage) else each for given in lists for each in given]
    if any(isinstance(text, str) and has_marks(text) for text in texts):
        message = f"{type(llm).__name__} does not know segments, and gets text with segment markers."
        report([Finding("marks", message)], fixes={"marks": "Wrap it: canonical(llm)."})


def attach_handler() -> None:
    """Add the handler to LlamaIndex's root dispatcher, unless it is there.

    Comparisons of two answers become spans as well. LlamaIndex traces no evaluator, and one may ask in one order alone.
    """
    if not any(isinstance(each, RunHandler) for each in root_dispatcher.span_handlers):
        root_dispatcher.add_span_handler(RunHandler())
        traced = root_dispatcher.span(PairwiseComparisonEvaluator.aevaluate)
        setattr(PairwiseComparisonEvaluator, "aevaluate", traced)  # noqa: B010 - a class of LlamaIndex
