"""Arguments of another kind or size than expected are refused with a typed error, at every public door."""

import math

import pytest
from invariant_rag import KeyValueCache, errors
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, ValidationError

import langchain_invariant_rag as ours
from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote
from langchain_invariant_rag.parameters import InvariantContextOverflowError

from .models import Reader, now
from .shared import DOCUMENTS, PLACEHOLDER, QUESTION, Listed

OF_A_CALL = {
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
OF_A_CHAT = {
    "top_logprobs": [-1, "x", 1.5],
    "template_kwargs": [3, "x", [1], {"no_such_variable": 1}],
    "tools": [1, "x", [3], {"a": 1}],
    "tool_choice": [3, {"type": "x"}, "find", ["a"]],
    "json_schema": [3, "x", "{", "[]"],
}


@pytest.fixture(scope="module")
def chat(lm):
    return ChatInvariant(model=lm, max_tokens=2)


@pytest.mark.parametrize("name", [*OF_A_CALL, *OF_A_CHAT])
def test_keywords_of_a_call_are_refused(chat, lm, name):
    models = [chat] if name in OF_A_CHAT else [chat, InvariantLLM(model=lm, max_tokens=2)]
    for model in models:
        for value in {**OF_A_CALL, **OF_A_CHAT}[name]:
            for ask in (model.invoke, lambda *asked, bound=model, **how: list(bound.stream(*asked, **how))):
                with pytest.raises((errors.InvariantRAGError, ValidationError)):  # pydantic's: of a changed field
                    ask(QUESTION, **{name: value})


BAD = {"title": "Bad", "type": "object", "properties": {"a": {"type": "no such type"}}, "required": ["a"]}
WITHOUT_CONTEXT = ChatPromptTemplate.from_template("{x}")
SEGMENT_BLOCK = {"type": "text-plain", "extras": {"segment": True}}
DOORS = {
    "n": (errors.InvariantRAGError, lambda chat: chat.invoke(QUESTION, n=0)),
    "no messages": (errors.InvalidPrompt, lambda chat: chat.invoke([])),
    "no text": (errors.InvalidPrompt, lambda chat: chat.invoke([AIMessage("")])),
    "an image": (errors.InvalidPrompt, lambda chat: chat.invoke([HumanMessage([{"type": "image", "url": "a.png"}])])),
    "a block": (errors.InvalidPrompt, lambda chat: chat.invoke([HumanMessage([{"type": "no such type"}])])),
    "a segment": (errors.InvalidSegment, lambda chat: chat.invoke([HumanMessage([{**SEGMENT_BLOCK, "text": 3}])])),
    "tools": (errors.InvalidTool, lambda chat: chat.bind_tools(3)),
    "a tool": (errors.InvalidTool, lambda chat: chat.bind_tools([3])),
    "tool_choice": (errors.InvalidTool, lambda chat: chat.bind_tools([], tool_choice={"type": "x"})),
    "schema": (errors.InvalidSchema, lambda chat: chat.with_structured_output(3)),
    "a type in one": (errors.InvalidSchema, lambda chat: chat.with_structured_output(BAD).invoke(QUESTION)),
    "method": (errors.UnknownName, lambda chat: chat.with_structured_output(BaseModel, method="x")),
    "votes": (errors.InvalidChoice, lambda _: vote(Reader(), votes="x")),
    "no votes": (errors.InvalidChoice, lambda _: vote(Reader(), votes=0)),
    "seed": (errors.InvalidChoice, lambda _: vote(Reader(), seed="x")),
    "answer_of": (ValidationError, lambda _: vote(Reader(), answer_of=3)),
    "ordering": (errors.UnknownName, lambda _: canonical(Reader(), ordering="alphabetical")),
    "ordering of a text model": (errors.UnknownName, lambda _: vote(FakeListLLM(responses=["a"]), ordering="x")),
    "order given": (errors.UnsupportedCombination, lambda _: canonical(Reader(), ordering="given")),
    "name of a model": (errors.UnsupportedModel, lambda _: canonical("gpt-4")),
    "no model": (errors.UnsupportedModel, lambda _: vote(None)),
    "retriever": (ValidationError, lambda _: ours.as_segments(3)),
    "join_by": (ValidationError, lambda _: ours.as_segments(Listed(documents=[]), join_by=3)),
    "retriever of the core": (ValidationError, lambda _: ours.InvariantRetriever(retriever=3)),
    "corpus": (errors.InvalidSegment, lambda _: ours.InvariantRetriever.from_documents(3)),
    "corpus of one text": (errors.InvalidSegment, lambda _: ours.InvariantRetriever.from_documents("abc")),
    "retriever of a middleware": (errors.InvalidChoice, lambda _: ours.InvariantRAGMiddleware(3)),
    "prompt": (errors.InvalidPrompt, lambda chat: ours.create_invariant_documents_chain(chat, 3)),
    "variable": (errors.InvalidPrompt, lambda chat: ours.create_invariant_documents_chain(chat, WITHOUT_CONTEXT)),
    "name of a placeholder": (ValidationError, lambda _: ours.SegmentsPlaceholder(3)),
    "text for one": (errors.InvalidSegment, lambda _: PLACEHOLDER.invoke({"context": "a", "question": "b"})),
    "nothing for one": (errors.InvalidSegment, lambda _: PLACEHOLDER.invoke({"context": None, "question": "b"})),
    "segments": (errors.InvalidSegment, lambda _: str(ours.Segments([3]))),
    "batch of embeddings": (errors.InvalidChoice, lambda _: ours.InvariantEmbeddings(batch_size=0)),
    "documents, bound": (errors.InvalidSegment, lambda chat: chat.bind(documents=DOCUMENTS[0]).invoke(QUESTION)),
}


@pytest.mark.parametrize(("error", "call"), DOORS.values(), ids=DOORS)
def test_arguments_of_every_other_door_are_refused(chat, error, call):
    with pytest.raises(error):
        call(chat)


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_parameters_are_refused_when_a_model_is_built_or_copied(lm, kind):
    wrong = [
        ({"method": "rotr"}, errors.UnknownName, "unknown method 'rotr'; choose from"),
        ({"ordering": "x"}, errors.UnknownName, "unknown ordering 'x'; choose from"),
        ({"backend": "x"}, errors.UnknownName, "unknown backend 'x'; choose from"),
        ({"model": 3}, ValueError, "expected a hub id, a folder or an InvariantModel, got int"),
        ({"model": lm, "dtype": "bfloat16"}, errors.UnsupportedCombination, "dtype"),
        ({"model_name": "native", "model": "native"}, errors.UnsupportedCombination, "got both"),
        ({"model_id": "x"}, errors.UnknownParameter, "no parameter 'model_id'; did you mean .*'model'"),
        ({"max_new_tokens": 3}, errors.UnknownParameter, "did you mean .*'max_tokens'"),
        ({"torch_dtype": "x"}, errors.UnknownParameter, "did you mean .*'dtype'"),
    ]
    for options, error, message in wrong:
        with pytest.raises(ValidationError if error in (errors.UnknownName, ValueError) else error, match=message):
            kind(**options)
        with pytest.raises(error, match=message):
            kind().model_copy(update=options)
    for options in ({"overflow": "x"}, {"max_tokens": 0}, {"temperature": "x"}, {"top_p": "x"}, {"batch_size": 0}):
        with pytest.raises(ValidationError):
            kind(**options)


def test_what_a_server_cannot_do_is_refused(base_url, lm):
    remote = ChatInvariant(base_url=base_url, max_tokens=16)
    for error, told, call in (
        (InvariantContextOverflowError, "4096", lambda: remote.invoke("word " * 5000)),
        (errors.UnsupportedCombination, "num_beams", lambda: remote.invoke(QUESTION, num_beams=2)),
        (errors.UnsupportedCombination, "base_url", lambda: remote.lm),
        (errors.RemoteError, "small", lambda: remote.invoke(QUESTION, model="large")),
        (errors.InvalidTool, "search", lambda: remote.invoke(QUESTION, tool_choice="search", tools=[now])),
    ):
        with pytest.raises(error, match=told):
            call()
    for wrong in ({"model": lm}, {"dtype": "float32"}, {"key_value_cache": KeyValueCache()}, {"method": "no"}):
        with pytest.raises((errors.UnsupportedCombination, ValidationError)):
            ChatInvariant(base_url=base_url, **wrong)
    assert remote.context_window is None
