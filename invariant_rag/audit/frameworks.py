"""Systems of LangChain and LlamaIndex, and functions, wrapped for an audit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.calling import settle
from invariant_rag.audit.inputs import as_text, for_callable, for_runnable, metadata_of
from invariant_rag.audit.systems import (
    Ask,
    Reply,
    System,
    ToInput,
    as_reply,
    is_language_model,
    loaded,
    refuse,
)
from invariant_rag.segments import Segment

if TYPE_CHECKING:
    from invariant_rag.audit.inputs import MakeInput
    from invariant_rag.audit.questions import Question

_MARKED_TEXT_MODELS = (
    ("langchain_invariant_rag.api_models", "CanonicalChatModel"),
    ("langchain_invariant_rag.api_models", "WrappedRunnable"),
    ("llama_index.llms.invariant_rag.canonical", "CanonicalLLM"),
)
"""Module and class of what `canonical` and `vote` return: models that order the segments marked in their text."""


def from_langchain(system: Any, to_input: ToInput | None) -> System | None:
    """Wrap a Runnable: a chain, an agent, a language model. None for anything else."""
    if not isinstance(system, loaded("langchain_core.runnables", "Runnable")):
        return None
    takes_text = is_language_model(system) or _takes_marks(system)
    if to_input is not None:
        makes = [_given(to_input)]
    else:
        makes = [partial(as_text, marked=_takes_marks(system))] if takes_text else for_runnable(system)
    return System(system.get_name(), _ask(system.invoke, makes), may_retrieve=to_input is None and not takes_text)


def from_llama_index(system: Any, to_input: ToInput | None) -> System | None:
    """Wrap an LLM, a query engine, a chat engine, a synthesizer or an agent of LlamaIndex. None for anything else."""
    name = type(system).__name__
    make = _given(to_input) if to_input is not None else partial(as_text, marked=_takes_marks(system))
    if isinstance(system, loaded("llama_index.core.llms", "LLM")):
        name = f"{name} {system.metadata.model_name}"
        return System(name, lambda question, segments: as_reply(system.complete(make(question, segments)).text))
    if isinstance(system, loaded("llama_index.core.base.base_query_engine", "BaseQueryEngine")):
        refuse(to_input, "to_input", "a query engine, which takes nodes")
        return _query_engine(system)
    if isinstance(system, loaded("llama_index.core.response_synthesizers", "BaseSynthesizer")):
        return System(
            name, lambda question, segments: as_reply(str(system.synthesize(question.text, _nodes(segments))))
        )
    if isinstance(system, loaded("llama_index.core.chat_engine.types", "BaseChatEngine")):
        return System(name, _chat(system, make), may_retrieve=to_input is None)
    if isinstance(system, loaded("llama_index.core.agent.workflow", "BaseWorkflowAgent", "AgentWorkflow")):

        async def run(text: Any) -> Any:
            return await system.run(user_msg=text)

        return System(name, lambda question, segments: as_reply(str(settle(run(make(question, segments))))))
    return None


def from_callable(system: Any, to_input: ToInput | None) -> System | None:
    """Wrap anything callable, by its signature; awaitable answers are awaited. None for anything else."""
    if not callable(system):
        return None
    name = f"{getattr(system, '__module__', '')}.{getattr(system, '__qualname__', type(system).__qualname__)}"
    if to_input is not None:
        return System(name, _ask(system, [_given(to_input)]))
    return System(name.removeprefix("__main__."), _ask(lambda made: system(*made[0], **made[1]), for_callable(system)))


def _ask(call: Callable[[Any], Any], makes: Sequence[MakeInput]) -> Ask:
    """Return what calls a system with the first input that it takes, and finds the answer in what it returns."""
    known = list(makes)

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        make, *others = known
        try:
            said = settle(call(make(question, segments)))
        except (TypeError, AttributeError, KeyError):
            if not others:
                raise
            make = others[0]
            said = settle(call(make(question, segments)))
        known[:] = [make]
        return as_reply(said)

    return ask


def _given(to_input: ToInput) -> MakeInput:
    return lambda question, segments: to_input(question.text, segments)


def _takes_marks(system: Any) -> bool:
    return any(isinstance(system, loaded(*each)) for each in _MARKED_TEXT_MODELS)


def _nodes(segments: Sequence[Segment]) -> list[Any]:
    schema: Any = sys.modules["llama_index.core.schema"]
    return [
        schema.NodeWithScore(node=schema.TextNode(text=each.text, metadata=metadata_of(each)), score=each.score)
        for each in segments
    ]


def _query_engine(system: Any) -> System:
    """Wrap a query engine: it synthesizes from nodes or, where it cannot, is asked with the documents in the query."""
    schema: Any = sys.modules["llama_index.core.schema"]
    base: Any = loaded("llama_index.core.base.base_query_engine", "BaseQueryEngine")[0]

    def synthesize(question: Question, segments: Sequence[Segment]) -> Reply:
        return as_reply(str(system.synthesize(schema.QueryBundle(question.text), _nodes(segments))))

    def query(question: Question, segments: Sequence[Segment]) -> Reply:
        return as_reply(str(system.query(as_text(question, segments))))

    retrieves = type(system).retrieve is not base.retrieve
    name = type(system).__name__
    if type(system).synthesize is base.synthesize:
        return System(name, query, may_retrieve=True)
    retrieve = (lambda question: system.retrieve(schema.QueryBundle(question))) if retrieves else None
    return System(name, synthesize, retrieve=retrieve)


def _chat(system: Any, make: MakeInput) -> Any:
    """Return what asks a chat engine, which remembers: one call at a time, each as the first of a chat."""
    lock = Lock()

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        with lock:
            system.reset()
            return as_reply(str(system.chat(make(question, segments))))

    return ask
