"""Errors of a call reach the user: LlamaIndex takes ValueError and TypeError for answers that cannot be parsed."""

from __future__ import annotations

from typing import Any

import pytest
from cases import EIGHT, QUERY, ListRetriever, consumed, engine_of, nodes_of
from invariant_rag import InvariantModel, errors
from invariant_rag.errors import ContextOverflow, InvalidOption, InvalidPrompt, InvalidSegment
from llama_index.core import get_response_synthesizer
from llama_index.core.base.llms.types import AudioBlock, CitableBlock, DocumentBlock, ImageBlock, TextBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.schema import ImageNode, MediaResource, Node, NodeWithScore
from pydantic import BaseModel

from llama_index.llms.invariant_rag import AnswerFailed, InvariantLLM, UnknownParameter, canonical
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

CAUGHT = (ValueError, TypeError)
CALLS = ("InvalidSegment", "InvalidPrompt", "ContextOverflow", "InvalidSchema", "IncompleteObject", "InvalidObject")
PIXEL = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"
IMAGE = ImageBlock(image=PIXEL, image_mimetype="image/gif")


class Place(BaseModel):
    name: str


@pytest.fixture
def refusing(model: InvariantModel) -> InvariantLLM:
    """An LLM whose calls end with a TypeError of a caller's own function."""

    def fail(ids: Any, scores: Any) -> Any:
        return "concatenate str" + 1  # type: ignore[operator]

    return InvariantLLM(model, max_tokens=8, generation_kwargs={"logits_processor": [fail]})


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "refine"])
@pytest.mark.parametrize("way", ["query", "aquery", "streaming", "object"])
@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
async def test_what_is_wrong_is_no_empty_response(
    model: InvariantModel, refusing: InvariantLLM, way: str, mode: str
) -> None:
    options = {"streaming": way == "streaming", "output_cls": Place if way == "object" else None}
    options |= {"response_mode": mode, "prompt_helper": PromptHelper(context_window=100_000)}  # it thinks that all fits
    wrong = [
        (InvariantLLM(model, max_tokens=4095), ContextOverflow, "4096"),
        (InvariantLLM(model, generation_kwargs={"max_token": 3}), InvalidOption, "max_token"),
    ]
    for llm, error, said in [*wrong, *([(refusing, AnswerFailed, "concatenate str")] if way != "object" else [])]:
        engine = engine_of(nodes_of(), response_synthesizer=get_response_synthesizer(llm=llm, **options))
        with pytest.raises(error, match=said):
            await consumed(engine.aquery(QUERY) if way == "aquery" else engine.query(QUERY))


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
async def test_context_chat_engines_raise_too(refusing: InvariantLLM, kind: Any) -> None:
    for way in ("chat", "achat"):
        with pytest.raises(AnswerFailed):
            await consumed(getattr(kind.from_defaults(ListRetriever(nodes_of()), llm=refusing), way)(QUERY))


def test_nodes_without_a_score_are_no_empty_response_of_canonical() -> None:
    nodes = [NodeWithScore(node=each.node) for each in nodes_of()]
    with pytest.raises(InvalidSegment, match="score"):
        engine_of(nodes, llm=canonical(MockLLM(), ordering="score")).query(QUERY)


@pytest.mark.parametrize("name", [name for name in EIGHT if name.endswith("chat")])
async def test_blocks_that_are_no_text_are_refused_by_name(llm: InvariantLLM, name: str) -> None:
    pdf = DocumentBlock(data=b"x", document_mimetype="application/pdf")
    for block in (IMAGE, AudioBlock(audio=b"RIFF"), pdf, CitableBlock(title="", source="", content=[IMAGE])):
        with pytest.raises(InvalidPrompt, match=r"expected text.*(image|audio|document)"):
            await consumed(getattr(llm, name)([ChatMessage(blocks=[TextBlock(text="What is this?"), block])]))


@pytest.mark.parametrize(
    "node",
    [
        ImageNode(text="A map.", image_url="https://example.org/map.png", id_="the map"),
        Node(text_resource=MediaResource(text="A map."), image_resource=MediaResource(data=PIXEL), id_="the map"),
        Node(audio_resource=MediaResource(data=b"RIFF"), id_="the map"),
    ],
)
async def test_nodes_that_are_no_text_are_refused_by_name(llm: InvariantLLM, node: Any) -> None:
    nodes = [*nodes_of(), NodeWithScore(node=node, score=0.1)]
    ours = [InvariantSynthesizer(each) for each in (llm, canonical(MockLLM()))]
    for synthesizer in (*ours, get_response_synthesizer(llm)):
        with pytest.raises(InvalidPrompt, match="image, audio or video in the map"):
            synthesizer.synthesize(QUERY, nodes)
        with pytest.raises(InvalidPrompt, match="image, audio or video in the map"):
            await synthesizer.asynthesize(QUERY, nodes)


def test_errors_of_a_call_are_none_that_llama_index_catches() -> None:
    for kind in (*(getattr(errors, name) for name in CALLS), UnknownParameter, AnswerFailed):
        assert issubclass(kind, errors.InvariantRAGError)
        assert not issubclass(kind, CAUGHT)


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_raises_what_llama_index_does_not_catch(refusing: InvariantLLM, name: str) -> None:
    with pytest.raises(AnswerFailed, match="TypeError") as caught:
        await consumed(getattr(refusing, name)(QUERY if name.endswith("complete") else [ChatMessage(QUERY)]))
    assert isinstance(caught.value.__cause__, CAUGHT)
