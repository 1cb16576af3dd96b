"""Systems of LangChain and LlamaIndex, and functions, called in the form that they declare."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.systems import (
    Ask,
    Reply,
    System,
    ToInput,
    as_reply,
    is_language_model,
    loaded,
    prompt_text,
    refuse,
    settle,
)
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.prompts import mark
from invariant_rag.segments import Segment, document_rendering, plain_rendering

if TYPE_CHECKING:
    from invariant_rag.audit.questions import Question

MakeInput = Callable[["Question", Sequence[Segment]], Any]

QUESTION_NAMES = ("question", "input", "query", "user_input", "q", "user_query", "user_question", "prompt", "text")
CONTEXT_NAMES = (
    "context", "contexts", "documents", "docs", "segments", "passages", "chunks", "input_documents", "context_str",
    "retrieved_contexts", "sources", "nodes",
)  # fmt: skip
_TEXT_NAMES = ("prompt", "text")
_EMPTY_NAMES = ("chat_history", "history", "agent_scratchpad", "intermediate_steps")
_MARKED_TEXT_MODELS = (
    ("langchain_invariant_rag.api_models", "CanonicalChatModel"),
    ("langchain_invariant_rag.api_models", "WrappedRunnable"),
    ("llama_index.llms.invariant_rag.canonical", "CanonicalLLM"),
)
"""What `canonical` and `vote` return: models that order the segments marked in their text."""


def from_langchain(system: Any, to_input: ToInput | None) -> System | None:
    """Wrap a Runnable: a chain, an agent, a language model. None for anything else."""
    if not isinstance(system, loaded("langchain_core.runnables", "Runnable")):
        return None
    is_chain = to_input is None and not is_language_model(system) and not _takes_marks(system)
    makes = _for_runnable(system) if is_chain else [_text_maker(system, to_input)]
    return System(system.get_name(), _ask(system.invoke, makes), may_retrieve=is_chain)


def from_llama_index(system: Any, to_input: ToInput | None) -> System | None:
    """Wrap an LLM, a query engine, a chat engine, a synthesizer or an agent of LlamaIndex. None for anything else.

    A query engine synthesizes from nodes or, where it cannot, is asked with the documents in the query. A chat engine
    remembers, so it is asked one call at a time, each as the first of a chat.
    """
    name, make, more = type(system).__name__, _text_maker(system, to_input), dict[str, Any]()
    call: Callable[[Any], Any] | None = None
    if isinstance(system, loaded("llama_index.core.llms", "LLM")):
        name, call = f"{name} {system.metadata.model_name}", lambda text: system.complete(text).text
    elif isinstance(system, engines := loaded("llama_index.core.base.base_query_engine", "BaseQueryEngine")):
        refuse(to_input, "to_input", "a query engine, which takes nodes")
        schema: Any = sys.modules["llama_index.core.schema"]
        if type(system).synthesize is engines[0].synthesize:
            call, more = lambda text: str(system.query(text)), {"may_retrieve": True}
        else:
            make, call = _as_nodes, lambda given: str(system.synthesize(schema.QueryBundle(given[0]), given[1]))
            if type(system).retrieve is not engines[0].retrieve:
                more = {"retrieve": lambda question: system.retrieve(schema.QueryBundle(question))}
    elif isinstance(system, loaded("llama_index.core.response_synthesizers", "BaseSynthesizer")):
        make, call = _as_nodes, lambda given: str(system.synthesize(*given))
    elif isinstance(system, loaded("llama_index.core.chat_engine.types", "BaseChatEngine")):
        lock, more = Lock(), {"may_retrieve": to_input is None}

        def call(text: Any) -> str:
            with lock:
                system.reset()
                return str(system.chat(text))

    elif isinstance(system, loaded("llama_index.core.agent.workflow", "BaseWorkflowAgent", "AgentWorkflow")):

        async def call(text: Any) -> str:
            return str(await system.run(user_msg=text))

    return None if call is None else System(name, _ask(call, [make]), **more)


def from_callable(system: Any, to_input: ToInput | None) -> System | None:
    """Wrap anything callable, by its signature; awaitable answers are awaited. None for anything else."""
    if not callable(system):
        return None
    module = getattr(system, "__module__", None) or "__main__"  # of code that is executed, None
    name = f"{module}.{getattr(system, '__qualname__', type(system).__qualname__)}"
    if to_input is not None:
        return System(name, _ask(system, [_text_maker(system, to_input)]))
    return System(name.removeprefix("__main__."), _ask(lambda made: system(*made[0], **made[1]), _for_callable(system)))


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


def _takes_marks(system: Any) -> bool:
    return any(isinstance(system, loaded(*each)) for each in _MARKED_TEXT_MODELS)


def _text_maker(system: Any, to_input: ToInput | None) -> MakeInput:
    if to_input is not None:
        return lambda question, segments: to_input(question.text, segments)
    return partial(_as_text, rendering=mark if _takes_marks(system) else document_rendering)


def _as_text(question: Question, segments: Sequence[Segment], rendering: Any = document_rendering) -> str:
    return prompt_text(question.text, segments, rendering)


def _joined(segments: Sequence[Segment]) -> str:
    return "\n\n".join(map(plain_rendering, segments))


def _as_nodes(question: Question, segments: Sequence[Segment]) -> tuple[str, list[Any]]:
    schema: Any = sys.modules["llama_index.core.schema"]
    nodes = [schema.TextNode(text=each.text, metadata=_metadata(each)) for each in segments]
    scored = zip(nodes, segments, strict=True)
    return question.text, [schema.NodeWithScore(node=node, score=each.score) for node, each in scored]


def _metadata(segment: Segment) -> dict[str, Any]:
    return {**segment.metadata, **({} if segment.title is None else {"title": segment.title})}


def _as_mapping(question: Question, segments: Sequence[Segment]) -> dict[str, Any]:
    document = sys.modules["langchain_core.documents"].Document
    documents = [document(page_content=each.text, metadata=_metadata(each)) for each in segments]
    return {"question": question.text, "input": question.text, "context": documents}


def _for_runnable(runnable: Any) -> list[MakeInput]:
    """Return what makes the input of a LangChain Runnable, by its input schema; of several, the first that it takes.

    A schema of text takes documents and question; one that says nothing takes text or, if the first text is refused as
    no mapping, a mapping. Fields are filled by their names: the question, and the documents as `Document`s or, where
    the field is a string, as text. Without a field for documents, the question holds them, as does an agent's message.
    """
    schema = runnable.get_input_jsonschema()
    fields = schema.get("properties", {})
    if schema.get("type") == "string" or set(fields) == {"root"}:
        return [_as_text]
    if not fields and schema.get("type") != "object":
        return [_as_text, _as_mapping]
    unknown = set(schema.get("required", ())) - {*QUESTION_NAMES, *CONTEXT_NAMES, *_EMPTY_NAMES, "messages"}
    if unknown and len(fields) > 1:
        raise UnsupportedCombination(
            f"{runnable.get_name()} wants {', '.join(sorted(fields))}, and nothing is known of "
            f"{', '.join(sorted(unknown))}",
            hint="Say what it is called with: to_input=lambda question, segments: ... (in Python).",
        )
    contexts = set(fields) & set(CONTEXT_NAMES)
    alone = len(fields) == 1 and not contexts and "messages" not in fields
    asked = [name for name in fields if name in QUESTION_NAMES or alone]
    # Fields that are found in code, or taken over by an assignment, are not all: there may be one for the documents.
    untyped = any(not {"type", "anyOf", "$ref"} & set(each) for each in fields.values())
    partly = untyped or any(each in schema.get("title", "") for each in ("Assign", "Sequence"))
    takes_context = not fields or contexts or schema.get("additionalProperties") is True or partly

    def make(question: Question, segments: Sequence[Segment]) -> dict[str, Any]:
        if "messages" in fields and not asked:
            return {"messages": [{"role": "user", "content": _as_text(question, segments)}]}
        made = _as_mapping(question, segments)
        documents = made["context"]
        for name in asked:
            holds_all = name in _TEXT_NAMES or not takes_context
            made[name] = _as_text(question, segments) if holds_all else question.text
        for name in contexts:
            made[name] = _joined(segments) if fields[name].get("type") == "string" else documents
        return made | {name: [] for name in fields if name in _EMPTY_NAMES or name == "messages"}

    return [make]


def _for_callable(function: Any) -> list[MakeInput]:
    """Return what makes the positional and named arguments of a function, by its signature; the first that it takes.

    Two parameters are question and segments, in this order unless their names say otherwise; one is a text with both,
    or a mapping if it is annotated as one or refuses the text. Segments are texts where the annotation has `str`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return [lambda question, segments: ((question.text, segments), {})]
    found = list(signature.parameters.values())
    if any(each.kind is each.VAR_POSITIONAL for each in found):
        return [lambda question, segments: ((question.text, segments), {})]
    named = [each for each in found if each.kind is not each.VAR_KEYWORD]
    wanted = [each for each in named if each.default is each.empty]
    if len(wanted) == 1:  # a second parameter with a default, which is named as documents are, takes them
        wanted += [each for each in named if each not in wanted and each.name in CONTEXT_NAMES][:1]

    def arguments(*values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind_partial()
        bound.arguments.update(zip((each.name for each in wanted), values, strict=True))
        return bound.args, bound.kwargs

    if len(wanted) == 2:
        if wanted[0].name in CONTEXT_NAMES and wanted[1].name in QUESTION_NAMES:
            wanted.reverse()
        return [lambda question, segments: arguments(question.text, _annotated(segments, wanted[1].annotation))]
    if len(wanted) != 1:
        raise UnsupportedCombination(
            f"expected a function of question and segments, got one of {[each.name for each in wanted]}",
            hint="Wrap it in a function (question, segments) -> answer.",
        )

    def mapping(question: Question, segments: Sequence[Segment]) -> dict[str, Any]:
        return {"question": question.text, "input": question.text, "context": list(map(plain_rendering, segments))}

    annotation = str(wanted[0].annotation).lower()
    makes: list[MakeInput] = [mapping] if "dict" in annotation or "mapping" in annotation else [_as_text]
    makes += [mapping] if wanted[0].annotation is inspect.Parameter.empty else []

    def called_with(make: MakeInput) -> MakeInput:
        return lambda question, segments: arguments(make(question, segments))

    return list(map(called_with, makes))


def _annotated(segments: Sequence[Segment], annotation: Any) -> Any:
    text = annotation if isinstance(annotation, str) else str(annotation)
    if annotation is str or text == "str":
        return _joined(segments)
    return [each.text for each in segments] if "str" in text.replace("structure", "") else tuple(segments)
