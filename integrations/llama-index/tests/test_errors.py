"""Errors of a call reach the user: LlamaIndex takes ValueError and TypeError for answers that cannot be parsed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from cases import QUERY, ListRetriever, nodes_of
from invariant_rag import InvariantModel, errors
from invariant_rag.errors import ContextOverflow, InvalidOption, InvalidSegment, InvalidTool, InvariantRAGError
from llama_index.core.base.llms.types import AudioBlock, CitableBlock, ImageBlock, TextBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import ImageNode, MediaResource, Node, NodeWithScore
from pydantic import BaseModel

from llama_index.llms.invariant_rag import AnswerFailed, InvariantLLM, UnknownParameter, canonical
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

CAUGHT = (ValueError, TypeError)
CALLS = ("InvalidSegment", "InvalidPrompt", "ContextOverflow", "InvalidSchema", "IncompleteObject", "InvalidObject")
EIGHT = [f"{prefix}{name}" for name in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")]
WAYS = ("query", "aquery", "streaming", "object")


class Place(BaseModel):
    """A place."""

    name: str


@pytest.fixture
def refusing(model: InvariantModel) -> InvariantLLM:
    """An LLM whose calls end with a TypeError of a caller's own function."""

    def fail(ids: Any, scores: Any) -> Any:
        return "concatenate str" + 1  # type: ignore[operator]

    return InvariantLLM(model, max_tokens=8, generation_kwargs={"logits_processor": [fail]})


@pytest.fixture
def small(model: InvariantModel) -> InvariantLLM:
    """An LLM whose answer does not fit behind any prompt."""
    return InvariantLLM(model, max_tokens=4095)


async def asked(llm: Any, way: str, mode: ResponseMode) -> str:
    """Ask a query engine of LlamaIndex, whose prompt helper thinks that everything fits."""
    options = {"streaming": way == "streaming", **({"output_cls": Place} if way == "object" else {})}
    helper = PromptHelper(context_window=100_000)
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, prompt_helper=helper, **options)
    engine = RetrieverQueryEngine(
        ListRetriever(nodes_of()), synthesizer, node_postprocessors=[SegmentMarkerPostprocessor()]
    )
    return str(await engine.aquery(QUERY) if way == "aquery" else engine.query(QUERY))


async def consumed(response: Any) -> Any:
    """Wait for a response, or for all pieces of a stream."""
    response = await response if inspect.isawaitable(response) else response
    if hasattr(response, "__aiter__"):
        return [each async for each in response]
    return list(response) if inspect.isgenerator(response) else response


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_a_call_are_none_that_llama_index_catches(name: str) -> None:
    assert issubclass(getattr(errors, name), InvariantRAGError)
    assert not issubclass(getattr(errors, name), CAUGHT)
    assert not issubclass(UnknownParameter, CAUGHT)
    assert not issubclass(AnswerFailed, CAUGHT)


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE, ResponseMode.REFINE])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
async def test_a_prompt_that_is_too_long_is_no_empty_response(
    small: InvariantLLM, way: str, mode: ResponseMode
) -> None:
    with pytest.raises(ContextOverflow, match="4096"):
        await asked(small, way, mode)


@pytest.mark.parametrize("way", ["query", "aquery", "streaming"])
async def test_what_a_processor_raises_is_no_empty_response(refusing: InvariantLLM, way: str) -> None:
    with pytest.raises(AnswerFailed, match="concatenate str") as caught:
        await asked(refusing, way, ResponseMode.COMPACT)
    assert isinstance(caught.value.__cause__, CAUGHT)


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_raises_what_llama_index_does_not_catch(refusing: InvariantLLM, name: str) -> None:
    call = getattr(refusing, name)
    with pytest.raises(AnswerFailed) as caught:
        await consumed(call(QUERY if name.endswith("complete") else [ChatMessage(QUERY)]))
    assert type(caught.value.__cause__).__name__ in str(caught.value)


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
@pytest.mark.parametrize("way", ["chat", "achat"])
async def test_context_chat_engines_raise_too(refusing: InvariantLLM, kind: Any, way: str) -> None:
    engine = kind.from_defaults(
        ListRetriever(nodes_of()), llm=refusing, node_postprocessors=[SegmentMarkerPostprocessor()]
    )
    with pytest.raises(AnswerFailed):
        await consumed(getattr(engine, way)(QUERY))


def test_a_misspelt_option_is_no_empty_response(model: InvariantModel) -> None:
    llm = InvariantLLM(model, generation_kwargs={"max_token": 3})
    synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode.COMPACT)
    with pytest.raises(UnknownParameter, match="did you mean 'max_tokens'"):
        synthesizer.synthesize(QUERY, nodes_of())


def test_segments_without_a_score_are_no_empty_response_of_canonical() -> None:
    nodes = [NodeWithScore(node=each.node) for each in nodes_of()]
    llm = canonical(MockLLM(), ordering="score")
    engine = RetrieverQueryEngine.from_args(
        ListRetriever(nodes), llm=llm, node_postprocessors=[SegmentMarkerPostprocessor()]
    )
    with pytest.raises(InvalidSegment, match="score"):
        engine.query(QUERY)


PIXEL = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"
IMAGE = ImageBlock(image=PIXEL, image_mimetype="image/gif")


@pytest.mark.parametrize(
    "block", [IMAGE, AudioBlock(audio=b"RIFF"), CitableBlock(title="", source="", content=[IMAGE])]
)
@pytest.mark.parametrize("name", [name for name in EIGHT if name.endswith("chat")])
async def test_images_and_sounds_are_refused_by_a_model_of_texts(llm: InvariantLLM, name: str, block: Any) -> None:
    messages = [ChatMessage(blocks=[TextBlock(text="What is this?"), block])]
    chat = getattr(llm, name)
    with pytest.raises(errors.InvalidPrompt, match=r"image|audio"):
        await consumed(chat(messages))


@pytest.mark.parametrize(
    "node",
    [
        ImageNode(text="A map.", image_url="https://example.org/map.png", id_="the map"),
        Node(text_resource=MediaResource(text="A map."), image_resource=MediaResource(data=PIXEL), id_="the map"),
        Node(audio_resource=MediaResource(data=b"RIFF"), id_="the map"),
    ],
)
@pytest.mark.parametrize("way", ["synthesize", "asynthesize"])
async def test_image_nodes_are_refused_by_a_model_of_texts(llm: InvariantLLM, way: str, node: Any) -> None:
    nodes = [*nodes_of(), NodeWithScore(node=node)]
    with pytest.raises(errors.InvalidPrompt, match="in the map") as caught:
        await consumed(getattr(InvariantSynthesizer(llm), way)(QUERY, nodes))
    assert "canonical" in caught.value.hint
    with pytest.raises(errors.InvalidPrompt, match="in the map"):  # a completion model has no place for them either
        InvariantSynthesizer(canonical(MockLLM())).synthesize(QUERY, nodes)


@pytest.mark.parametrize("value", [1, 2.5, True, object(), [3]])
def test_a_call_with_stops_tools_or_a_temperature_that_are_none_is_refused(model: InvariantModel, value: Any) -> None:
    llm = InvariantLLM(model, max_tokens=2)
    for ask in (lambda **more: llm.complete("Q", **more), lambda **more: llm.chat([ChatMessage("Q")], **more)):
        with pytest.raises(InvalidOption, match="stop: expected a list of str"):
            ask(stop=value)
        if not isinstance(value, float | int):
            with pytest.raises(InvalidOption, match="temperature: expected a finite number"):
                ask(temperature=value)
    if not isinstance(value, list):
        with pytest.raises(InvalidTool, match="tools: expected a list of tools"):
            llm.chat([ChatMessage("Q")], tools=value)
