"""What a system is called with: question and documents, in the form that its signature or its input schema declares."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.systems import prompt_text
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
_HINT = "Say what it is called with: to_input=lambda question, segments: ... (in Python)."


def as_text(question: Question, segments: Sequence[Segment], *, marked: bool = False) -> str:
    """Return one text with the documents and the question."""
    return prompt_text(question.text, segments, mark if marked else document_rendering)


def for_runnable(runnable: Any) -> list[MakeInput]:
    """Return what makes the input of a LangChain Runnable, by its input schema; of several, the first that it takes.

    A schema of text takes documents and question; one that says nothing takes text or, if the first text is refused as
    no mapping, a mapping. Fields are filled by their names: the question, and the documents as `Document`s or, where
    the field is a string, as text. Without a field for documents, the question holds them, as does an agent's message.

    Raises:
        UnsupportedCombination: A required field is unknown.
    """
    schema = runnable.get_input_jsonschema()
    fields = schema.get("properties", {})
    if schema.get("type") == "string" or set(fields) == {"root"}:
        return [as_text]
    if not fields and schema.get("type") != "object":
        return [as_text, _mapping]
    unknown = set(schema.get("required", ())) - {*QUESTION_NAMES, *CONTEXT_NAMES, *_EMPTY_NAMES, "messages"}
    if unknown and len(fields) > 1:
        raise UnsupportedCombination(
            f"{runnable.get_name()} wants {', '.join(sorted(fields))}, and nothing is known of "
            f"{', '.join(sorted(unknown))}",
            hint=_HINT,
        )
    takes_context = not fields or bool(set(fields) & set(CONTEXT_NAMES)) or schema.get("additionalProperties") is True
    alone = len(fields) == 1 and not {*fields} & {"messages", *CONTEXT_NAMES}
    asked = [name for name in fields if name in QUESTION_NAMES or alone]
    # Fields that are found in code, or taken over by an assignment, are not all: there may be one for the documents.
    untyped = any(not {"type", "anyOf", "$ref"} & set(each) for each in fields.values())
    partial = untyped or any(each in schema.get("title", "") for each in ("Assign", "Sequence"))

    def make(question: Question, segments: Sequence[Segment]) -> dict[str, Any]:
        if "messages" in fields and not asked:
            return {"messages": [{"role": "user", "content": as_text(question, segments)}]}
        made = _mapping(question, segments)
        documents = made["context"]
        for name in asked:
            holds_all = name in _TEXT_NAMES or not (takes_context or partial)
            made[name] = as_text(question, segments) if holds_all else question.text
        for name in set(fields) & set(CONTEXT_NAMES):
            is_text = fields[name].get("type") == "string"
            made[name] = "\n\n".join(map(plain_rendering, segments)) if is_text else documents
        return made | {name: [] for name in fields if name in _EMPTY_NAMES or name == "messages"}

    return [make]


def _mapping(question: Question, segments: Sequence[Segment]) -> dict[str, Any]:
    return {"question": question.text, "input": question.text, "context": _documents(segments)}


def for_callable(function: Any) -> list[MakeInput]:
    """Return what makes the positional and named arguments of a function, by its signature; the first that it takes.

    Two parameters are question and segments, in this order unless their names say otherwise; one is a text with both,
    or a mapping if it is annotated as one or refuses the text. Segments are texts where the annotation has `str`.

    Raises:
        UnsupportedCombination: It has other parameters without a default.
    """
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        found = None
    if found is None or any(each.kind is each.VAR_POSITIONAL for each in found):
        return [lambda question, segments: ((question.text, segments), {})]
    named = [each for each in found if each.kind is not each.VAR_KEYWORD]
    wanted = [each for each in named if each.default is each.empty]
    if len(wanted) == 1:
        # A second parameter with a default, which is named as documents are, takes them.
        wanted += [each for each in named if each not in wanted and each.name in CONTEXT_NAMES][:1]
    if len(wanted) not in {1, 2}:
        raise UnsupportedCombination(
            f"expected a function of question and segments, got one of {[each.name for each in wanted]}",
            hint="Wrap it in a function (question, segments) -> answer.",
        )
    if len(wanted) == 1:
        return [_arguments(wanted, lambda *asked, make=make: [make(*asked)]) for make in _for_one(wanted[0])]
    backwards = wanted[0].name in CONTEXT_NAMES and wanted[1].name in QUESTION_NAMES
    asked, listed = reversed(wanted) if backwards else wanted
    return [_arguments([asked, listed], lambda question, segments: [question.text, _as_annotated(segments, listed)])]


def _arguments(parameters: Sequence[inspect.Parameter], values: Callable[..., Sequence[Any]]) -> MakeInput:
    """Return what makes positional and named arguments of values: by name, where a parameter can be named."""

    def make(question: Question, segments: Sequence[Segment]) -> tuple[list[Any], dict[str, Any]]:
        pairs = list(zip(parameters, values(question, segments), strict=True))
        named = {each.name: value for each, value in pairs if each.kind is not each.POSITIONAL_ONLY}
        return [value for each, value in pairs if each.kind is each.POSITIONAL_ONLY], named

    return make


def _for_one(parameter: inspect.Parameter) -> list[MakeInput]:
    def mapping(question: Question, segments: Sequence[Segment]) -> dict[str, Any]:
        texts = [plain_rendering(each) for each in segments]
        return {"question": question.text, "input": question.text, "context": texts}

    if parameter.annotation is inspect.Parameter.empty:
        return [as_text, mapping]
    annotation = str(parameter.annotation).lower()
    return [mapping if "dict" in annotation or "mapping" in annotation else as_text]


def _as_annotated(segments: Sequence[Segment], parameter: inspect.Parameter) -> Any:
    annotation = parameter.annotation if isinstance(parameter.annotation, str) else str(parameter.annotation)
    if parameter.annotation is str or annotation == "str":
        return "\n\n".join(map(plain_rendering, segments))
    if "str" in annotation.replace("structure", ""):
        return [each.text for each in segments]
    return tuple(segments)


def metadata_of(segment: Segment) -> dict[str, Any]:
    """Return the metadata of a segment, with its title."""
    return {**segment.metadata, **({} if segment.title is None else {"title": segment.title})}


def _documents(segments: Sequence[Segment]) -> list[Any]:
    document = sys.modules["langchain_core.documents"].Document
    return [document(page_content=each.text, metadata=metadata_of(each)) for each in segments]
