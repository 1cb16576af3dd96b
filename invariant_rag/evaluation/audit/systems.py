"""The system under audit, whatever it is, as one function from a question and listed segments to a reply.

Frameworks are recognised only if they are loaded: whoever holds one of their objects has imported them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import AuditFailed, UnsupportedCombination
from invariant_rag.evaluation.metrics import normalise_answer
from invariant_rag.prompts import DEFAULT_SYSTEM, mark
from invariant_rag.segments import Segment, document_rendering

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.questions import Question, Retrieve
    from invariant_rag.generation.model import InvariantModel

ToInput = Callable[[str, Sequence[Segment]], Any]

_KIND = r"(?i:response|answer|option|assistant|output|candidate|one)"
_BETTER = r"(?i:better|best|stronger|superior|preferable|preferred|winner)"
_CHOICE = rf"(?:{_BETTER}|(?i:prefer|choose|pick|favou?r|verdict|choice))"
_LABEL = r"(?P<label>[AB12]|(?i:first|second))"
_VERDICTS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[\[\s*(?P<label>[AaBb12])\s*\]\]",
        rf"\A\W*(?i:the\s+)?(?:{_BETTER}\s+)?{_KIND}?\W*(?P<label>(?i:[ab12]|first|second))(?:\s+{_KIND})?\W*\Z",
        rf"\b{_LABEL}\b(?:'s)?(?:\s+{_KIND})?\s+(?:is|was)\s+(?!not\b)(?:\w+\s+){{0,2}}?{_BETTER}\b",
        rf"\b{_CHOICE}\b(?:\s+{_KIND})?\W*(?:(?:is|would be)\W+)?(?i:the\s+)?(?:{_KIND}\W+)?{_LABEL}\b",
    )
)
"""Ways to name a response, the clearest first."""
_FIRST = {"a", "1", "first"}

_MARK_READERS = (
    ("langchain_invariant_rag.api_models", "CanonicalChatModel"),
    ("langchain_invariant_rag.wrapped", "CanonicalRunnable"),
    ("langchain_invariant_rag.wrapped", "VotingRunnable"),
    ("llama_index.llms.invariant_rag.api_models", "CanonicalLLM"),
)
"""What `canonical` and `vote` make of a language model: it orders the segments that are marked in its text."""


@dataclass(frozen=True)
class Reply:
    """What a system says. A function may return one instead of a string, to tell what the answer cost.

    Attributes:
        text: The answer.
        tokens: Tokens read and written; None where that is not known.
    """

    text: str
    tokens: int | None = None


@dataclass(frozen=True)
class System:
    """A system under audit.

    Attributes:
        name: What reports call it. Together with the content of a call it decides which stored answer is its own.
        ask: The question and its segments, listed as they are to be given to the system, give the reply.
        model: The model itself where it is one of ours: then the methods can be tried on it.
        message: The system message of that model; None for its default.
        retrieve: What finds segments for a question where the system has a retriever of its own.
        generation: Keywords of `generate` for that model.
        may_retrieve: Whether it could replace the segments that it is given by others.
    """

    name: str
    ask: Callable[[Question, Sequence[Segment]], Reply]
    model: InvariantModel | None = None
    message: str | None = None
    retrieve: Retrieve | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    may_retrieve: bool = False


def as_system(system: Any, to_input: ToInput | None = None, generation: Mapping[str, Any] | None = None) -> System:
    """Recognise a system.

    Args:
        system: An `InvariantModel`, a `RAG` or a `Judge`; a chat model, LLM or any other Runnable of LangChain; an LLM
            or query engine of LlamaIndex; or a function `(question, segments) -> answer`. Our models in wrappers for
            a framework are audited as the models themselves, with the wrapper's parameters.
        to_input: What a Runnable or an LLM is called with. By default language models are given `prompt_text` (for
            pairwise records `judged_text`), with marked documents where `canonical` or `vote` made them, and other
            Runnables a mapping with `question`, `input` (the question too) and `context` (the documents).
        generation: Keywords of `InvariantModel.generate`; they come before a wrapper's parameters.

    Raises:
        UnsupportedCombination: It is none of these, or is given something that it has no use for.
    """
    ours = _own(system, generation or {})
    if ours is not None:
        _refuse(to_input, "to_input", "one of our models, which takes segments as they are")
        return ours
    _refuse(generation, "generation keywords", "a system that is not one of our models")
    for recognise in (_langchain, _llama_index):
        found = recognise(system, to_input)
        if found is not None:
            return found
    if not callable(system):
        raise UnsupportedCombination(
            f"expected a system that answers questions, got {type(system).__name__}",
            hint="Wrap it in a function (question, segments) -> answer.",
        )
    _refuse(to_input, "to_input", "a function, which takes question and segments as they are")
    name = f"{getattr(system, '__module__', '')}.{getattr(system, '__qualname__', type(system).__qualname__)}"
    return System(name.removeprefix("__main__."), lambda asked, segments: _reply(system(asked.text, segments)))


def own_name(model: InvariantModel, message: str | None, generation: Mapping[str, Any]) -> str:
    """Name one of our models with all that its answers depend on."""
    options = "".join(f", {key}={value}" for key, value in sorted(generation.items()))
    options += "" if message is None else f", system={message!r}"
    hyper = "".join(f", {key}={value!r}" for key, value in sorted(vars(model.method).items()))
    loaded = f"{model.backend.name}, {str(model.model.dtype).removeprefix('torch.')}"
    loaded += "" if model.overflow == "error" else f", {model.overflow}"
    longest = model._budget.max_segment_tokens
    loaded += "" if longest is None else f", max_segment_tokens={longest}"
    loaded += "" if model.intervention is None else f", {model.intervention!r}"
    return f"{model.name} ({model.method.name}{hyper}, {model.ordering!r}, {loaded}{options})"


def prompt_text(
    question: str, segments: Sequence[Segment], rendering: Callable[[Segment], str] = document_rendering
) -> str:
    """Return what a language model of a framework is given: the documents, one behind the other, and the question."""
    documents = "".join(map(rendering, segments))
    return f"{DEFAULT_SYSTEM}\n\n{documents}\nQuestion: {question}\nAnswer:"


def judged_text(question: str, segments: Sequence[Segment]) -> str:
    """Return what a language model of a framework is given for a pairwise record."""
    responses = "\n\n".join(f"Response {label}: {each.text}" for label, each in zip("AB", segments, strict=True))
    return f"Which response answers the question better?\n\nQuestion: {question}\n\n{responses}\n\nReply with A or B."


def read_pick(answer: str, segments: Sequence[Segment]) -> int | None:
    """Return which of two responses an answer names: by its text, or by a label (A, B, 1, 2, first, second).

    A label may stand in double brackets, alone, or in a sentence that says which is better. Where sentences of the
    clearest form name both, no pick is read. None: it names neither, or both.

    >>> read_pick("I think response B is better.", [Segment("yes"), Segment("no")])
    1
    """
    said = normalise_answer(answer)
    texts = [normalise_answer(segment.text) for segment in segments]
    if texts.count(said) == 1:
        return texts.index(said)
    for verdict in _VERDICTS:
        named = {int(found["label"].lower() not in _FIRST) for found in verdict.finditer(answer)}
        if named:
            return named.pop() if len(named) == 1 else None
    return None


def _refuse(value: Any, what: str, where: str) -> None:
    if value:
        raise UnsupportedCombination(f"{what} mean nothing to {where}")


def _reply(said: Any, tokens: int | None = None) -> Reply:
    if isinstance(said, Reply):
        return said
    if not isinstance(said, str):
        raise AuditFailed(
            f"expected an answer as text, got {type(said).__name__}",
            hint="Return a string, or a Reply with its tokens.",
        )
    return Reply(said, tokens)


def _loaded(module: str, name: str) -> tuple[Any, ...]:
    """Return a class of a module if that is loaded, as a tuple for isinstance."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def _is_ours(value: Any, module: str, name: str) -> bool:
    return isinstance(value, _loaded(f"invariant_rag.{module}", name))


def _is_language_model(value: Any) -> bool:
    return isinstance(
        value,
        _loaded("langchain_core.language_models", "BaseLanguageModel") + _loaded("llama_index.core.llms", "LLM"),
    )


def _own(system: Any, generation: Mapping[str, Any]) -> System | None:
    if _is_ours(system, "generation.model", "InvariantModel"):
        return _own_system(system, None, generation)
    if _is_ours(system, "rag.pipeline", "RAG"):
        found = _own_system(system.model, system.system, generation)
        return replace(found, retrieve=lambda question: system.retriever.retrieve(question, system.k))
    model = _wrapped(system) if _is_language_model(system) else None
    if model is not None:
        message = getattr(system, "system_prompt", None)
        return _own_system(model, message, {**_parameters(system), **generation})
    return _judge(system) if _is_ours(system, "judge", "Judge") else None


def _own_system(model: InvariantModel, message: str | None, generation: Mapping[str, Any]) -> System:
    name, ask = own_name(model, message, generation), own_asker(model, message, generation)
    return System(name, ask, model, message, generation=generation)


def _wrapped(system: Any) -> InvariantModel | None:
    """Return the model of ours in a language model of a framework, if there is one."""
    lm = getattr(system, "lm", None)
    return lm if _is_ours(lm, "generation.model", "InvariantModel") else None


def _parameters(wrapper: Any) -> dict[str, Any]:
    """Return the parameters of a wrapper of ours as keywords of `generate`."""
    options = {"max_new_tokens": wrapper.max_tokens, **wrapper.generation_kwargs}
    if wrapper.temperature:
        sampling = {name: getattr(wrapper, name) for name in ("temperature", "top_p", "top_k", "seed")}
        options = {"do_sample": True, **options, **{name: each for name, each in sampling.items() if each is not None}}
    if wrapper.stop:
        options["stop_strings"] = list(wrapper.stop)
    return options


def own_asker(
    model: InvariantModel, message: str | None, generation: Mapping[str, Any]
) -> Callable[[Question, Sequence[Segment]], Reply]:
    """Return the function that asks one of our models through its chat template. Answers end before a stop string.

    Of a pairwise record it takes the more probable letter. Letters are given out as the responses are listed, which is
    what judges do, or by content where the model's ordering reads contents: there is no listing then.
    """
    from invariant_rag.generation.streaming import before_stop

    stops = generation.get("stop_strings") or ()
    stops = [stops] if isinstance(stops, str) else stops

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        if question.pairwise:
            return _verdict(model, message, question, segments)
        result = model.generate(model.chat_prompt(question.text, segments, message), **generation)
        return Reply(before_stop(result.text, stops), result.usage.prompt_tokens + result.usage.completion_tokens)

    return ask


def _verdict(model: InvariantModel, message: str | None, question: Question, segments: Sequence[Segment]) -> Reply:
    listed = list(segments)
    if model.ordering.invariant:
        listed.sort(key=attrgetter("canonical_key"))
    lettered = [replace(segment, title=letter) for letter, segment in zip("AB", listed, strict=True)]
    asked = f"{question.text}\nWhich document answers this better? Reply with its title only."
    first, second = model.score(model.chat_prompt(asked, lettered, message), ["A", "B"])
    return Reply("" if first == second else listed[int(second > first)].text)


def _judge(judge: Any) -> System:
    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        if not question.pairwise:
            raise AuditFailed("a Judge compares two responses", hint="Mark the questions as pairwise.")
        winner = judge.compare(question.text, *(segment.text for segment in segments)).winner
        return Reply("" if winner is None else segments[winner].text)

    return System(f"Judge by {judge.by} with {own_name(judge.lm, None, {})}", ask)


def _langchain(system: Any, to_input: ToInput | None) -> System | None:
    if not isinstance(system, _loaded("langchain_core.runnables", "Runnable")):
        return None
    reads_text = _is_language_model(system) or _reads_marks(system)
    chosen = _input_of(to_input, _text_for(system) if reads_text else _chain_input)

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        said = system.invoke(chosen(question, segments))
        if isinstance(said, Mapping):
            said = next((said[key] for key in ("answer", "output", "result", "text") if key in said), said)
        usage = getattr(said, "usage_metadata", None) or {}
        content = getattr(said, "content", said)
        if isinstance(content, list):  # blocks of a chat message
            content = "".join(each if isinstance(each, str) else each.get("text", "") for each in content)
        return _reply(content, usage.get("total_tokens"))

    return System(system.get_name(), ask, may_retrieve=to_input is None and not reads_text)


def _input_of(
    to_input: ToInput | None, default: Callable[[Question, Sequence[Segment]], Any]
) -> Callable[[Question, Sequence[Segment]], Any]:
    return default if to_input is None else lambda question, segments: to_input(question.text, segments)


def _reads_marks(system: Any) -> bool:
    return any(isinstance(system, _loaded(*each)) for each in _MARK_READERS)


def _text_for(system: Any) -> Callable[[Question, Sequence[Segment]], str]:
    """Return what writes the text that a system reads."""
    rendering = mark if _reads_marks(system) else document_rendering

    def text(question: Question, segments: Sequence[Segment]) -> str:
        if question.pairwise:
            return judged_text(question.text, segments)
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
        chosen = _input_of(to_input, _text_for(system))
        name = f"{name} {system.metadata.model_name}"
        return System(name, lambda question, segments: _reply(system.complete(chosen(question, segments)).text))
    if not isinstance(system, _loaded("llama_index.core.base.base_query_engine", "BaseQueryEngine")):
        return None
    _refuse(to_input, "to_input", "a query engine, which takes nodes")
    schema: Any = sys.modules["llama_index.core.schema"]

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        nodes = [
            schema.NodeWithScore(node=schema.TextNode(text=each.text, metadata=_metadata(each)), score=each.score)
            for each in segments
        ]
        return _reply(str(system.synthesize(schema.QueryBundle(question.text), nodes)))

    return System(name, ask, retrieve=lambda question: system.retrieve(schema.QueryBundle(question)))
