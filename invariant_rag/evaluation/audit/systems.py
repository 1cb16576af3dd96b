"""Wrap the system under audit, whatever it is, as a function from a question and listed segments to a reply.

The classes of a framework are looked up in `sys.modules`: a caller who passes one of its objects has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import AuditFailed, UnsupportedCombination
from invariant_rag.evaluation.audit.identity import describe
from invariant_rag.evaluation.audit.patience import settle
from invariant_rag.prompts import DEFAULT_SYSTEM, mark
from invariant_rag.segments import Segment, document_rendering

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.questions import Question, Retrieve
    from invariant_rag.generation.model import InvariantModel

ToInput = Callable[[str, Sequence[Segment]], Any]

_MARKED_TEXT_MODELS = (
    ("langchain_invariant_rag.api_models", "CanonicalChatModel"),
    ("langchain_invariant_rag.api_models", "WrappedRunnable"),
    ("llama_index.llms.invariant_rag.canonical", "CanonicalLLM"),
)
"""Module and class of what `canonical` and `vote` return: models that order the segments marked in their text."""


@dataclass(frozen=True)
class Reply:
    """The answer of a system. A function may return one instead of a string, to report its tokens.

    Attributes:
        text: The answer.
        tokens: Prompt and completion tokens; None if unknown.
    """

    text: str
    tokens: int | None = None


@dataclass(frozen=True)
class System:
    """A system under audit.

    Attributes:
        name: Name in reports.
        identity: Digest of everything that its answers depend on, part of the keys of stored answers; "" if the caller
            vouches for the name.
        ask: Calls the system with a question and its segments, listed in the order that it is to be given.
        lm: The `InvariantModel` behind the system, if there is one: methods can be tried on it.
        message: System message for `lm`; None for the default.
        retrieve: Finds segments for a question, if the system has a retriever of its own.
        generation: Keywords of `InvariantModel.generate`.
        may_retrieve: Whether the system could replace the given segments by others.
    """

    name: str
    ask: Callable[[Question, Sequence[Segment]], Reply]
    lm: InvariantModel | None = None
    message: str | None = None
    retrieve: Retrieve | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    may_retrieve: bool = False
    identity: str = ""

    @property
    def key(self) -> str:
        """Name in keys of stored answers: it changes with the system."""
        return f"{self.name} #{self.identity[:16]}" if self.identity else self.name


def as_system(system: Any, to_input: ToInput | None = None, generation: Mapping[str, Any] | None = None) -> System:
    """Wrap a system of any supported kind.

    Args:
        system: An `InvariantModel`, a `RAG` or a `Judge`; a chat model, LLM or any other Runnable of LangChain; an LLM
            or query engine of LlamaIndex; an `Endpoint`, or its URL; or a function `(question, segments) -> answer`,
            which may be async. A framework's wrapper around an `InvariantModel` is audited as that model, with the
            wrapper's parameters.
        to_input: Makes the input of a Runnable or an LLM. By default, language models get `prompt_text` (pairwise
            questions: `pairwise_prompt_text`), with marked documents if `canonical` or `vote` made them, and other
            Runnables a mapping with `question`, `input` (also the question) and `context` (the documents).
        generation: Keywords of `InvariantModel.generate`; they override a wrapper's parameters.

    Raises:
        UnsupportedCombination: The system is none of these, or an argument does not apply to it.
    """
    found = _invariant_rag(system, generation or {})
    if found is not None:
        _refuse(to_input, "to_input", "one of our models, which takes segments as they are")
        return found
    _refuse(generation, "generation keywords", "a system that is not one of our models")
    for wrap in (_endpoint, _langchain, _llama_index):
        found = wrap(system, to_input)
        if found is not None:
            return replace(found, identity=describe((system, to_input)))
    if not callable(system):
        raise UnsupportedCombination(
            f"expected a system that answers questions, got {type(system).__name__}",
            hint="Wrap it in a function (question, segments) -> answer.",
        )
    _refuse(to_input, "to_input", "a function, which takes question and segments as they are")
    name = f"{getattr(system, '__module__', '')}.{getattr(system, '__qualname__', type(system).__qualname__)}"
    return System(
        name.removeprefix("__main__."),
        lambda asked, segments: _as_reply(settle(system(asked.text, segments))),
        identity=describe(system),
    )


def describe_lm(lm: InvariantModel, message: str | None, generation: Mapping[str, Any]) -> str:
    """Return the name of a model together with everything that its answers depend on."""
    options = "".join(f", {key}={value}" for key, value in sorted(generation.items()))
    options += "" if message is None else f", system={message!r}"
    hyper = "".join(f", {key}={value!r}" for key, value in sorted(vars(lm.method).items()))
    loaded = f"{lm.backend.name}, {str(lm.model.dtype).removeprefix('torch.')}"
    loaded += "" if lm.overflow == "error" else f", {lm.overflow}"
    longest = lm.max_segment_tokens
    loaded += "" if longest is None else f", max_segment_tokens={longest}"
    loaded += "" if lm.intervention is None else f", {lm.intervention!r}"
    return f"{lm.name} ({lm.method.name}{hyper}, {lm.ordering!r}, {loaded}{options})"


def prompt_text(
    question: str, segments: Sequence[Segment], rendering: Callable[[Segment], str] = document_rendering
) -> str:
    """Return the default prompt for a language model of a framework: the documents, then the question."""
    documents = "".join(map(rendering, segments))
    return f"{DEFAULT_SYSTEM}\n\n{documents}\nQuestion: {question}\nAnswer:"


def pairwise_prompt_text(question: str, segments: Sequence[Segment]) -> str:
    """Return the default prompt of a pairwise question for a language model of a framework."""
    responses = "\n\n".join(f"Response {label}: {each.text}" for label, each in zip("AB", segments, strict=True))
    return f"Which response answers the question better?\n\nQuestion: {question}\n\n{responses}\n\nReply with A or B."


def _endpoint(system: Any, to_input: ToInput | None) -> System | None:
    from invariant_rag.evaluation.audit.endpoint import Endpoint

    if isinstance(system, str) and system.startswith(("http://", "https://")):
        system = Endpoint(system)
    if not isinstance(system, Endpoint):
        return None
    _refuse(to_input, "to_input", "an endpoint, which is sent a message")
    return System(f"{system.served} at {system.url}", system.ask)


def _refuse(value: Any, what: str, where: str) -> None:
    if value:
        raise UnsupportedCombination(f"{what} mean nothing to {where}")


def _as_reply(said: Any, tokens: int | None = None) -> Reply:
    if isinstance(said, Reply):
        return said
    if not isinstance(said, str):
        raise AuditFailed(
            f"expected an answer as text, got {type(said).__name__}",
            hint="Return a string, or a Reply with its tokens.",
        )
    return Reply(said, tokens)


def _loaded(module: str, name: str) -> tuple[Any, ...]:
    """Return a class of a module if the module is imported, as a tuple for isinstance."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def _is_invariant_model(value: Any) -> bool:
    return isinstance(value, _loaded("invariant_rag.generation.model", "InvariantModel"))


def _is_language_model(value: Any) -> bool:
    return isinstance(
        value,
        _loaded("langchain_core.language_models", "BaseLanguageModel") + _loaded("llama_index.core.llms", "LLM"),
    )


def _invariant_rag(system: Any, generation: Mapping[str, Any]) -> System | None:
    """Wrap an `InvariantModel`, a `RAG`, a `Judge`, or a framework's wrapper around an `InvariantModel`."""
    if _is_invariant_model(system):
        return _from_lm(system, None, generation)
    if isinstance(system, _loaded("invariant_rag.rag.pipeline", "RAG")):
        found = _from_lm(system.model, system.system, generation)
        return replace(found, retrieve=lambda question: system.retriever.retrieve(question, system.k))
    if isinstance(system, _loaded("invariant_rag.judge", "Judge")):
        return _from_judge(system)
    lm = _unwrap(system) if _is_language_model(system) else None
    if lm is None:
        return None
    return _from_lm(lm, getattr(system, "system_prompt", None), {**_wrapper_parameters(system), **generation})


def _from_lm(lm: InvariantModel, message: str | None, generation: Mapping[str, Any]) -> System:
    name, ask = describe_lm(lm, message, generation), lm_ask_function(lm, message, generation)
    return System(name, ask, lm, message, generation=generation, identity=lm_identity(lm))


def lm_identity(lm: InvariantModel) -> str:
    """Return the digest of everything about a model that can change an answer."""
    from invariant_rag.generation.identity import identity

    return identity(lm)


def _unwrap(system: Any) -> InvariantModel | None:
    """Return the `InvariantModel` in a language model of a framework, if there is one."""
    lm = getattr(system, "lm", None)
    return lm if _is_invariant_model(lm) else None


def _wrapper_parameters(wrapper: Any) -> dict[str, Any]:
    """Return the parameters of a framework's wrapper as keywords of `InvariantModel.generate`."""
    options = {"max_new_tokens": wrapper.max_tokens, **wrapper.generation_kwargs}
    if wrapper.temperature:
        sampling = {name: getattr(wrapper, name) for name in ("temperature", "top_p", "top_k", "seed")}
        options = {"do_sample": True, **options, **{name: each for name, each in sampling.items() if each is not None}}
    if wrapper.stop:
        options["stop_strings"] = list(wrapper.stop)
    return options


def lm_ask_function(
    lm: InvariantModel, message: str | None, generation: Mapping[str, Any]
) -> Callable[[Question, Sequence[Segment]], Reply]:
    """Return the function that asks an `InvariantModel` through its chat template. Answers end before a stop string.

    For a pairwise question the answer is the response with the more probable letter. Letters are assigned in the order
    in which the responses are listed, as judges do; if the model's ordering is by content, in the order of the content.
    """
    from invariant_rag.generation.streaming import trim_at_stop_string

    stops = generation.get("stop_strings") or ()
    stops = [stops] if isinstance(stops, str) else stops

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        if question.pairwise:
            return _choose_response(lm, message, question, segments)
        result = lm.generate(lm.chat_prompt(question.text, segments, message), **generation)
        return Reply(trim_at_stop_string(result.text, stops), result.usage.total_tokens)

    return ask


def _choose_response(lm: InvariantModel, message: str | None, question: Question, segments: Sequence[Segment]) -> Reply:
    """Return the text of the response with the more probable letter, empty for a tie."""
    listed = list(segments)
    if lm.ordering.invariant:
        listed.sort(key=attrgetter("canonical_key"))
    lettered = [replace(segment, title=letter) for letter, segment in zip("AB", listed, strict=True)]
    asked = f"{question.text}\nWhich document answers this better? Reply with its title only."
    first, second = lm.score(lm.chat_prompt(asked, lettered, message), ["A", "B"])
    return Reply("" if first == second else listed[int(second > first)].text)


def _from_judge(judge: Any) -> System:
    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        if not question.pairwise:
            raise AuditFailed("a Judge compares two responses", hint="Mark the questions as pairwise.")
        winner = judge.compare(question.text, *(segment.text for segment in segments)).winner
        return Reply("" if winner is None else segments[winner].text)

    name = f"Judge by {judge.by} with {describe_lm(judge.lm, None, {})}"
    return System(name, ask, identity=lm_identity(judge.lm))


def _langchain(system: Any, to_input: ToInput | None) -> System | None:
    if not isinstance(system, _loaded("langchain_core.runnables", "Runnable")):
        return None
    takes_text = _is_language_model(system) or _takes_marked_text(system)
    make_input = _input_function(to_input, _prompt_function(system) if takes_text else _chain_input)

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        said = system.invoke(make_input(question, segments))
        if isinstance(said, Mapping):
            said = next((said[key] for key in ("answer", "output", "result", "text") if key in said), said)
        usage = getattr(said, "usage_metadata", None) or {}
        content = getattr(said, "content", said)
        if isinstance(content, list):  # blocks of a chat message
            content = "".join(each if isinstance(each, str) else each.get("text", "") for each in content)
        return _as_reply(content, usage.get("total_tokens"))

    return System(system.get_name(), ask, may_retrieve=to_input is None and not takes_text)


def _input_function(
    to_input: ToInput | None, default: Callable[[Question, Sequence[Segment]], Any]
) -> Callable[[Question, Sequence[Segment]], Any]:
    return default if to_input is None else lambda question, segments: to_input(question.text, segments)


def _takes_marked_text(system: Any) -> bool:
    return any(isinstance(system, _loaded(*each)) for each in _MARKED_TEXT_MODELS)


def _prompt_function(system: Any) -> Callable[[Question, Sequence[Segment]], str]:
    """Return the function that writes the prompt of a language model."""
    rendering = mark if _takes_marked_text(system) else document_rendering

    def text(question: Question, segments: Sequence[Segment]) -> str:
        if question.pairwise:
            return pairwise_prompt_text(question.text, segments)
        return prompt_text(question.text, segments, rendering)

    return text


def _chain_input(question: Question, segments: Sequence[Segment]) -> dict[str, Any]:
    document = _loaded("langchain_core.documents", "Document")[0]
    documents = [document(page_content=each.text, metadata=_metadata(each)) for each in segments]
    return {"question": question.text, "input": question.text, "context": documents}


def _metadata(segment: Segment) -> dict[str, Any]:
    return {**segment.metadata, **({} if segment.title is None else {"title": segment.title})}


def _llama_index(system: Any, to_input: ToInput | None) -> System | None:
    name = type(system).__name__
    if isinstance(system, _loaded("llama_index.core.llms", "LLM")):
        make_input = _input_function(to_input, _prompt_function(system))
        name = f"{name} {system.metadata.model_name}"
        return System(name, lambda question, segments: _as_reply(system.complete(make_input(question, segments)).text))
    if not isinstance(system, _loaded("llama_index.core.base.base_query_engine", "BaseQueryEngine")):
        return None
    _refuse(to_input, "to_input", "a query engine, which takes nodes")
    schema: Any = sys.modules["llama_index.core.schema"]

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        nodes = [
            schema.NodeWithScore(node=schema.TextNode(text=each.text, metadata=_metadata(each)), score=each.score)
            for each in segments
        ]
        return _as_reply(str(system.synthesize(schema.QueryBundle(question.text), nodes)))

    return System(name, ask, retrieve=lambda question: system.retrieve(schema.QueryBundle(question)))
