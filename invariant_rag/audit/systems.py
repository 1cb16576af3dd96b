"""The system under audit, whatever it is, as a function from a question and listed segments to a reply.

The classes of a framework are looked up in `sys.modules`: a caller who passes one of its objects has imported it.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.calls import Endpoint, SystemReply, is_url, settle
from invariant_rag.checks import check_stops
from invariant_rag.errors import AuditFailed, ToyModelWarning, UnsupportedCombination
from invariant_rag.models.embedded import is_toy
from invariant_rag.prompts import DEFAULT_SYSTEM, mark
from invariant_rag.segments import Segment, document_rendering, plain_rendering

if TYPE_CHECKING:
    from invariant_rag.audit.questions import Question, Retrieve
    from invariant_rag.generation.model import InvariantModel

ToInput = Callable[[str, Sequence[Segment]], Any]
Ask = Callable[["Question", Sequence[Segment]], SystemReply]
MakeInput = Callable[["Question", Sequence[Segment]], Any]
Function = Callable[[Any], Any]

QUESTION_NAMES = ("question", "input", "query", "user_input", "q", "user_query", "user_question", "prompt", "text")
CONTEXT_NAMES = tuple(
    "context contexts documents docs segments passages chunks input_documents context_str retrieved_contexts sources "
    "nodes".split()
)
_EMPTY_NAMES = ("chat_history", "history", "agent_scratchpad", "intermediate_steps")
_MARKED_TEXT_MODELS = (  # what `canonical` and `vote` return: they order the segments marked in their text
    ("langchain_invariant_rag.api_models", "CanonicalChatModel", "WrappedRunnable"),
    ("llama_index.llms.invariant_rag.api_models", "CanonicalLLM"),
)


@dataclass(frozen=True)
class System:
    """A system under audit: its name in reports, what asks it about segments in an order, and what is `sent` then."""

    name: str
    ask: Ask
    sent: MakeInput
    toy: bool = False  # whether the embedded toy model answers
    lm: InvariantModel | None = None  # behind it, on which methods can be tried
    message: str | None = None
    retrieve: Retrieve | None = None  # of its own
    generation: Mapping[str, Any] = field(default_factory=dict)


def as_system(system: Any, to_input: ToInput | None = None, generation: Mapping[str, Any] | None = None) -> System:
    """Wrap a system of any supported kind.

    Args:
        system: An `InvariantModel` or a `RAG`; any Runnable of LangChain (models, chains, agents); an LLM, engine,
            synthesizer or agent of LlamaIndex; an `Endpoint`, or its URL; or anything callable, also async. A
            framework's wrapper around an `InvariantModel` is that model, with the wrapper's parameters.
        to_input: Makes the input of the system from question and segments. By default it follows from what the system
            declares: the signature of a function, the input schema of a chain.
        generation: Keywords of `InvariantModel.generate`; they override a wrapper's parameters.

    Raises:
        UnsupportedCombination: The system is none of these, or an argument does not apply to it.
    """
    if (wrapped := _of_our_model(system, generation or {})) is not None:
        _refuse(to_input, "to_input", "one of our models, which takes segments as they are")
        return wrapped
    _refuse(generation, "generation keywords", "a system that is not one of our models")
    for wrap in (_of_url, _of_langchain, _of_llama_index, _of_callable):  # each of one kind; None for others
        if (wrapped := wrap(system, to_input)) is not None:
            return wrapped
    raise UnsupportedCombination(f"expected a system that answers questions, got {type(system).__name__}", hint=_WRAP)


_WRAP = "Wrap it in a function (question, segments) -> answer."
_ANSWERS = ("answer", "output", "response", "result", "text", "output_text", "content")  # names of what is returned


def as_reply(output: Any, tokens: int | None = None) -> SystemReply:
    """Return the answer in whatever a system returns: text, a message, a mapping or an object that holds one."""
    if isinstance(output, SystemReply):
        return output
    if isinstance(output, str):
        return SystemReply(output, tokens)
    usage = getattr(output, "usage_metadata", None)
    if isinstance(usage, Mapping):
        tokens = usage.get("total_tokens", tokens)
    field_of = output.get if isinstance(output, Mapping) else partial(getattr, output)
    content = field_of("content", None)
    if isinstance(content, list) and content:  # blocks of a message
        parts = [each if isinstance(each, str) else each.get("text", "") for each in content]
        return SystemReply("".join(part for part in parts if isinstance(part, str)), tokens)
    if isinstance(output, Mapping) and isinstance(output.get("messages"), Sequence) and output["messages"]:
        return as_reply(output["messages"][-1], tokens)
    for name in _ANSWERS:
        value = field_of(name, None)
        if isinstance(value, str):
            return SystemReply(value, tokens)
        if value is not None and not callable(value) and not isinstance(value, int | float | list | tuple):
            return as_reply(value, tokens)
    what = f"a mapping with {sorted(map(str, output))}" if isinstance(output, Mapping) else type(output).__name__
    expected = f"expected an answer as text, a message, or a mapping with one of {', '.join(_ANSWERS)}"
    raise AuditFailed(f"{expected}; got {what}", hint="Return a string, or a SystemReply with its tokens.")


def loaded(module: str, *names: str) -> tuple[Any, ...]:
    """Return the classes of a module if the module is imported, as a tuple for isinstance."""
    classes = (getattr(sys.modules.get(module), name, None) for name in names)
    return tuple(each for each in classes if each is not None)


def _refuse(value: Any, what: str, where: str) -> None:
    if value:
        raise UnsupportedCombination(f"{what} mean nothing to {where}")


def _is_language_model(value: Any) -> bool:
    models = loaded("langchain_core.language_models", "BaseLanguageModel") + loaded("llama_index.core.llms", "LLM")
    return isinstance(value, models)


def _of_our_model(system: Any, generation: Mapping[str, Any]) -> System | None:
    """Wrap an `InvariantModel`, a `RAG`, or a framework's wrapper of one, whose parameters become keywords."""
    lm, message, retrieve = system, None, None
    if isinstance(system, loaded("invariant_rag.rag.pipeline", "RAG")):
        lm, message, retrieve = system.model, system.system, partial(system.retriever.retrieve, k=system.k)
    elif _is_language_model(system):
        lm, message = getattr(system, "lm", None), getattr(system, "system_prompt", None)
    if not isinstance(lm, loaded("invariant_rag.generation.model", "InvariantModel")):
        return None
    if lm is not system and retrieve is None:
        options = {"max_new_tokens": system.max_tokens, **system.generation_kwargs}
        if system.temperature:
            sampling = {name: getattr(system, name) for name in ("temperature", "top_p", "top_k", "seed")}
            given = {name: each for name, each in sampling.items() if each is not None}
            options = {"do_sample": True, **options, **given}
        generation = {**options, **({"stop_strings": list(system.stop)} if system.stop else {}), **generation}
    settings = "".join(f", {key}={value}" for key, value in sorted(generation.items()))
    settings += "" if message is None else f", system={message!r}"
    name = f"{lm.name} ({lm.method.name}, {lm.ordering!r}, {lm.backend.name}{settings})"

    def sent(question: Question, segments: Sequence[Segment]) -> str:
        return str(lm.tokenizer.decode(lm.prepare(lm.chat_prompt(question.text, segments, message)).input_ids))

    ask, toy = lm_ask_function(lm, message, generation), is_toy(lm.name)
    return System(name, ask, sent, toy, lm, message, retrieve, generation)


def lm_ask_function(lm: InvariantModel, message: str | None, generation: Mapping[str, Any]) -> Ask:
    """Return the function that asks an `InvariantModel` through its chat template. Answers end before a stop string."""
    from invariant_rag.generation.answer_parsing import trim_at_stop_string

    stops = check_stops(generation.get("stop_strings"))

    def ask(question: Question, segments: Sequence[Segment]) -> SystemReply:
        result = lm.generate(lm.chat_prompt(question.text, segments, message), **generation)
        return SystemReply(trim_at_stop_string(result.text, stops), result.usage.total_tokens)

    return ask


def _of_url(system: Any, to_input: ToInput | None) -> System | None:
    if not isinstance(endpoint := Endpoint(system) if is_url(system) else system, Endpoint):
        return None
    _refuse(to_input, "to_input", "an endpoint, which is sent a message")
    if endpoint.toy:
        warnings.warn(ToyModelWarning(), stacklevel=4)
    return _system(f"{endpoint.served} at {endpoint.url}", endpoint.complete, [_as_text], toy=endpoint.toy)


def _of_langchain(system: Any, to_input: ToInput | None) -> System | None:
    if not isinstance(system, loaded("langchain_core.runnables", "Runnable")):
        return None
    is_chain = to_input is None and not _is_language_model(system) and not _takes_marks(system)
    makes = _inputs(system) if is_chain else [_text_maker(system, to_input)]
    return _system(system.get_name(), system.invoke, makes)


def _of_llama_index(system: Any, to_input: ToInput | None) -> System | None:
    # A query engine that cannot synthesize from nodes gets the documents in the query. A chat engine remembers, so it
    # is asked one call at a time, each as the first of a chat.
    name, make, more = type(system).__name__, _text_maker(system, to_input), dict[str, Any]()
    call: Function | None = None
    if isinstance(system, loaded("llama_index.core.llms", "LLM")):
        name, call = f"{name} {system.metadata.model_name}", lambda text: system.complete(text).text
    elif isinstance(system, engines := loaded("llama_index.core.base.base_query_engine", "BaseQueryEngine")):
        _refuse(to_input, "to_input", "a query engine, which takes nodes")
        schema: Any = sys.modules["llama_index.core.schema"]
        call = system.query
        if type(system).synthesize is not engines[0].synthesize:
            make, call = _as_nodes, lambda given: system.synthesize(schema.QueryBundle(given[0]), given[1])
            if type(system).retrieve is not engines[0].retrieve:
                more = {"retrieve": lambda question: system.retrieve(schema.QueryBundle(question))}
    elif isinstance(system, loaded("llama_index.core.response_synthesizers", "BaseSynthesizer")):
        make, call = _as_nodes, lambda given: system.synthesize(*given)
    elif isinstance(system, loaded("llama_index.core.chat_engine.types", "BaseChatEngine")):
        lock = Lock()

        def call(text: Any) -> Any:
            with lock:
                system.reset()
                return system.chat(text)

    elif isinstance(system, loaded("llama_index.core.agent.workflow", "BaseWorkflowAgent", "AgentWorkflow")):

        async def call(text: Any) -> Any:
            return await system.run(user_msg=text)

    return None if call is None else _system(name, call, [make], str, **more)


def _of_callable(system: Any, to_input: ToInput | None) -> System | None:
    if not callable(system):
        return None
    module = getattr(system, "__module__", None) or "__main__"  # of code that is executed, None
    name = f"{module}.{getattr(system, '__qualname__', type(system).__qualname__)}".removeprefix("__main__.")
    if to_input is not None:
        return _system(name, system, [_text_maker(system, to_input)])
    return _system(name, lambda made: system(*made.args, **made.kwargs), _arguments(system))


def _system(name: str, call: Function, makes: Sequence[MakeInput], read: Function | None = None, **more: Any) -> System:
    """Return a system that is called with the first input that it takes, and whose answer is in what it returns."""
    known = list(makes)

    def ask(question: Question, segments: Sequence[Segment]) -> SystemReply:
        make, *others = known
        try:
            output = settle(call(make(question, segments)))
        except (TypeError, AttributeError, KeyError):
            if not others:
                raise
            make = others[0]
            output = settle(call(make(question, segments)))
        known[:] = [make]
        return as_reply(output if read is None else read(output))

    def sent(question: Question, segments: Sequence[Segment]) -> Any:
        return known[0](question, segments)

    return System(name, ask, sent, **more)


def _takes_marks(system: Any) -> bool:
    return any(isinstance(system, loaded(*each)) for each in _MARKED_TEXT_MODELS)


def _text_maker(system: Any, to_input: ToInput | None) -> MakeInput:
    if to_input is not None:
        return lambda question, segments: to_input(question.text, segments)
    return partial(_as_text, rendering=mark if _takes_marks(system) else document_rendering)


def _as_text(question: Question, segments: Sequence[Segment], rendering: Any = document_rendering) -> str:
    return f"{DEFAULT_SYSTEM}\n\n{''.join(map(rendering, segments))}\nQuestion: {question.text}\nAnswer:"


def _as_nodes(question: Question, segments: Sequence[Segment]) -> tuple[str, list[Any]]:
    schema: Any = sys.modules["llama_index.core.schema"]
    nodes = [schema.TextNode(text=each.text, metadata=_metadata(each)) for each in segments]
    scored = zip(nodes, segments, strict=True)
    return question.text, [schema.NodeWithScore(node=node, score=each.score) for node, each in scored]


def _metadata(segment: Segment) -> dict[str, Any]:
    return {**segment.metadata, **({} if segment.title is None else {"title": segment.title})}


def _inputs(runnable: Any) -> list[MakeInput]:
    """Return what makes the input of a LangChain Runnable, by its input schema; of several, the first that it takes.

    A schema of text takes documents and question; one that says nothing takes text or, if that is refused, a mapping.
    Fields are filled by their names: the question, and the documents as `Document`s or, where the field is a string, as
    text. Without a field for documents, the question holds them, as does an agent's message.
    """

    def mapping(question: Question, segments: Sequence[Segment]) -> dict[str, Any]:
        document = sys.modules["langchain_core.documents"].Document
        documents = [document(page_content=each.text, metadata=_metadata(each)) for each in segments]
        return {"question": question.text, "input": question.text, "context": documents}

    schema = runnable.get_input_jsonschema()
    fields = schema.get("properties", {})
    if schema.get("type") == "string" or set(fields) == {"root"}:
        return [_as_text]
    if not fields and schema.get("type") != "object":
        return [_as_text, mapping]
    unknown = set(schema.get("required", ())) - {*QUESTION_NAMES, *CONTEXT_NAMES, *_EMPTY_NAMES, "messages"}
    if unknown and len(fields) > 1:
        known_fields, unknown_fields = (", ".join(sorted(each)) for each in (fields, unknown))
        hint = "Say what it is called with: to_input=lambda question, segments: ... (in Python)."
        message = f"{runnable.get_name()} wants {known_fields}, and nothing is known of {unknown_fields}"
        raise UnsupportedCombination(message, hint=hint)
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
        made = mapping(question, segments)
        for name in asked:
            holds_all = name in {"prompt", "text"} or not takes_context
            made[name] = _as_text(question, segments) if holds_all else question.text
        documents, text = made["context"], "\n\n".join(map(plain_rendering, segments))
        made |= {name: text if fields[name].get("type") == "string" else documents for name in contexts}
        return made | {name: [] for name in fields if name in _EMPTY_NAMES or name == "messages"}

    return [make]


def _annotated(segments: Sequence[Segment], annotation: str) -> Any:
    if annotation in {"str", "<class 'str'>"}:
        return "\n\n".join(map(plain_rendering, segments))
    return [each.text for each in segments] if "str" in annotation.replace("structure", "") else tuple(segments)


def _arguments(function: Any) -> list[MakeInput]:
    """Return what makes the arguments of a function, by its signature; of several, the first that it takes.

    Two parameters are question and segments, in this order unless their names say otherwise; one is a text with both,
    or a mapping if it is annotated as one or refuses the text. Segments are texts where the annotation has `str`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = inspect.signature(lambda *_: _)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    if any(each.kind is each.VAR_POSITIONAL for each in named):
        return [lambda question, segments: signature.bind_partial(question.text, segments)]
    required = [each for each in named if each.default is each.empty]
    if len(required) == 1:  # a second parameter with a default, which is named as documents are, takes them
        required += [each for each in named if each not in required and each.name in CONTEXT_NAMES][:1]
    if len(required) not in {1, 2}:
        names = [each.name for each in required]
        raise UnsupportedCombination(f"expected a function of question and segments, got one of {names}", hint=_WRAP)

    def bound(*values: Any) -> inspect.BoundArguments:
        arguments = signature.bind_partial()
        arguments.arguments.update(zip((each.name for each in required), values, strict=True))
        return arguments

    def mapping(question: Question, segments: Sequence[Segment]) -> Any:
        texts = list(map(plain_rendering, segments))
        return bound({"question": question.text, "input": question.text, "context": texts})

    if len(required) == 2:
        if required[0].name in CONTEXT_NAMES and required[1].name in QUESTION_NAMES:
            required.reverse()
        return [lambda question, segments: bound(question.text, _annotated(segments, str(required[1].annotation)))]
    annotation = str(required[0].annotation).lower()
    if "dict" in annotation or "mapping" in annotation:
        return [mapping]
    texts: list[MakeInput] = [lambda question, segments: bound(_as_text(question, segments))]
    return texts + ([mapping] if required[0].annotation is inspect.Parameter.empty else [])
