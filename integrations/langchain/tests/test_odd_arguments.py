"""Arguments of another kind or size than expected are refused with a typed error, at every public door."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import (
    InvalidChoice,
    InvalidPrompt,
    InvalidSchema,
    InvalidSegment,
    InvalidTool,
    InvariantRAGError,
    UnknownName,
    UnknownParameter,
    UnsupportedCombination,
    UnsupportedModel,
)
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, ValidationError

from langchain_invariant_rag import (
    ChatInvariant,
    InvariantEmbeddings,
    InvariantLLM,
    InvariantRAGMiddleware,
    InvariantRetriever,
    Segments,
    SegmentsPlaceholder,
    as_segments,
    canonical,
    create_invariant_documents_chain,
    vote,
)

from .plain_models import Reader
from .shared import DOCUMENTS, QUESTION, Listed

OF_A_CALL: dict[str, list[Any]] = {
    "documents": [3, "text", iter(["a"]), [3], {"page_content": "a"}, [None], [b"x"]],
    "max_tokens": [-1, 0, "3", 1.5, True],
    "temperature": ["x", -1, math.nan],
    "top_p": ["x", -1, 5.0, math.nan],
    "top_k": ["x", -1, 1.5],
    "seed": ["x", 1.5, 1 << 64],
    "stop": [1, [3], math.nan, object()],
    "model": [3, "no/such-model", b"x"],
    "num_beams": ["x"],
    "no_such_option": [1],
}
OF_A_CHAT: dict[str, list[Any]] = {
    "top_logprobs": [-1, "x", 1.5],
    "template_kwargs": [3, "x", [1], {"no_such_variable": 1}],
    "tools": [1, "x", [3], {"a": 1}],
    "tool_choice": [3, {"type": "x"}, "find", ["a"]],
    "json_schema": [3, "x", "{", "[]"],
}
MESSAGES: list[list[Any]] = [
    [],
    [AIMessage("")],
    [HumanMessage([{"type": "image", "base64": "aGk=", "mime_type": "image/png"}])],
    [HumanMessage([{"type": "no such type"}])],
    [HumanMessage([{"type": "text-plain", "text": 3, "extras": {"segment": True}}])],
]


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=2)


@pytest.mark.parametrize("name", [*OF_A_CALL, *OF_A_CHAT])
def test_keywords_of_a_call_are_refused(chat: ChatInvariant, lm: InvariantModel, name: str) -> None:
    models = [chat] if name in OF_A_CHAT else [chat, InvariantLLM(model=lm, max_tokens=2)]
    for model in models:
        for value in {**OF_A_CALL, **OF_A_CHAT}[name]:
            for ask in (model.invoke, lambda *asked, bound=model, **how: list(bound.stream(*asked, **how))):
                with pytest.raises((InvariantRAGError, ValidationError)):  # pydantic's is that of a changed field
                    ask(QUESTION, **{name: value})


@pytest.mark.parametrize("messages", MESSAGES, ids=range(len(MESSAGES)))
def test_messages_that_hold_no_text_are_refused(chat: ChatInvariant, messages: list[Any]) -> None:
    with pytest.raises(InvariantRAGError, match="expected"):
        chat.invoke(messages)


DOORS: dict[str, tuple[type[Exception], Callable[[ChatInvariant], object]]] = {
    "n": (InvariantRAGError, lambda chat: chat.invoke(QUESTION, n=0)),
    "tools": (InvalidTool, lambda chat: chat.bind_tools(3)),  # type: ignore[arg-type]
    "a tool": (InvalidTool, lambda chat: chat.bind_tools([3])),  # type: ignore[list-item]
    "tool_choice": (InvalidTool, lambda chat: chat.bind_tools([], tool_choice={"type": "x"})),
    "schema": (InvalidSchema, lambda chat: chat.with_structured_output(3)),  # type: ignore[arg-type]
    "method": (UnknownName, lambda chat: chat.with_structured_output(BaseModel, method="x")),  # type: ignore[arg-type]
    "votes": (InvalidChoice, lambda _: vote(Reader(), votes="x")),  # type: ignore[arg-type]
    "no votes": (InvalidChoice, lambda _: vote(Reader(), votes=0)),
    "seed": (InvalidChoice, lambda _: vote(Reader(), seed="x")),  # type: ignore[arg-type]
    "answer_of": (ValidationError, lambda _: vote(Reader(), answer_of=3)),  # type: ignore[arg-type]
    "ordering": (UnknownName, lambda _: canonical(Reader(), ordering="alphabetical")),
    "ordering of a text model": (UnknownName, lambda _: vote(FakeListLLM(responses=["a"]), ordering="x")),
    "order given": (UnsupportedCombination, lambda _: canonical(Reader(), ordering="given")),
    "name of a model": (UnsupportedModel, lambda _: canonical("gpt-4")),  # type: ignore[arg-type]
    "no model": (UnsupportedModel, lambda _: vote(None)),  # type: ignore[arg-type]
    "retriever": (ValidationError, lambda _: as_segments(3)),  # type: ignore[arg-type]
    "join_by": (ValidationError, lambda _: as_segments(Listed(documents=[]), join_by=3)),  # type: ignore[arg-type]
    "retriever of the core": (ValidationError, lambda _: InvariantRetriever(retriever=3)),  # type: ignore[arg-type]
    "corpus": (InvalidSegment, lambda _: InvariantRetriever.from_documents(3)),  # type: ignore[arg-type]
    "corpus of one text": (InvalidSegment, lambda _: InvariantRetriever.from_documents("abc")),
    "retriever of a middleware": (InvalidChoice, lambda _: InvariantRAGMiddleware(3)),  # type: ignore[arg-type]
    "prompt": (InvalidPrompt, lambda chat: create_invariant_documents_chain(chat, 3)),  # type: ignore[arg-type]
    "variable": (
        InvalidPrompt,
        lambda chat: create_invariant_documents_chain(chat, ChatPromptTemplate.from_template("{x}")),
    ),
    "name of a placeholder": (ValidationError, lambda _: SegmentsPlaceholder(3)),  # type: ignore[arg-type]
    "text for a placeholder": (InvalidSegment, lambda _: SegmentsPlaceholder("c").format_messages(c="one text")),
    "nothing for a placeholder": (InvalidSegment, lambda _: SegmentsPlaceholder("c").format_messages(c=None)),
    "segments": (InvalidSegment, lambda _: str(Segments([3]))),  # type: ignore[list-item]
    "batch of embeddings": (InvalidChoice, lambda _: InvariantEmbeddings(batch_size=0)),
    "documents, bound": (InvalidSegment, lambda chat: chat.bind(documents=DOCUMENTS[0]).invoke(QUESTION)),
}


@pytest.mark.parametrize("name", DOORS)
def test_arguments_of_every_other_door_are_refused(chat: ChatInvariant, name: str) -> None:
    error, call = DOORS[name]
    with pytest.raises(error):
        call(chat)


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_parameters_are_refused_when_a_model_is_built_or_copied(lm: InvariantModel, kind: Any) -> None:
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({"method": "rotr"}, UnknownName, "unknown method 'rotr'; choose from"),
        ({"ordering": "x"}, UnknownName, "unknown ordering 'x'; choose from"),
        ({"backend": "x"}, UnknownName, "unknown backend 'x'; choose from"),
        ({"model": 3}, ValueError, "expected a hub id, a folder or an InvariantModel, got int"),
        ({"model": lm, "dtype": "bfloat16"}, UnsupportedCombination, "dtype"),
        ({"model_name": "native", "model": "native"}, UnsupportedCombination, "got both"),
        ({"model_id": "x"}, UnknownParameter, "no parameter 'model_id'; did you mean .*'model'"),
        ({"max_new_tokens": 3}, UnknownParameter, "did you mean .*'max_tokens'"),
        ({"torch_dtype": "x"}, UnknownParameter, "did you mean .*'dtype'"),
    ]
    for options, error, message in wrong:
        with pytest.raises(ValidationError if error in (UnknownName, ValueError) else error, match=message):
            kind(**options)
        with pytest.raises(error, match=message):
            kind().model_copy(update=options)
    for options in ({"overflow": "x"}, {"max_tokens": 0}, {"temperature": "x"}, {"top_p": "x"}, {"batch_size": 0}):
        with pytest.raises(ValidationError):
            kind(**options)
