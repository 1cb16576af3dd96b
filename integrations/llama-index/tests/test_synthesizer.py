"""InvariantSynthesizer and InvariantChatEngine: nodes as a set, in one call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, consumed, nodes_of
from invariant_rag import InvariantModel, Segment, SegmentSet
from invariant_rag.errors import InvalidPrompt, InvalidSegment, UnsupportedCombination
from invariant_rag.prompts import mark, render_chat
from llama_index.core import Settings
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import ChatMessage, ChatPromptTemplate, MessageRole, PromptTemplate
from llama_index.core.response_synthesizers import BaseSynthesizer, get_response_synthesizer
from llama_index.core.schema import MetadataMode

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning, canonical
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

KINDS = {"sync": Response, "async": Response, "stream": StreamingResponse, "async stream": AsyncStreamingResponse}
TEMPLATE = PromptTemplate("Context:\n{context_str}\nAnswer: {query_str}")
MARKED = {"node_postprocessors": [SegmentMarkerPostprocessor()]}


async def synthesize(llm: Any, mode: str, nodes: Any, **options: Any) -> tuple[str, Any]:
    """Return the text of a response, and the response."""
    synthesizer = InvariantSynthesizer(llm, streaming="stream" in mode, **options)
    text, response = await consumed(
        getattr(synthesizer, "asynthesize" if "async" in mode else "synthesize")(QUERY, nodes)
    )
    assert type(response) is KINDS[mode]
    assert [each.node_id for each in response.source_nodes] == [each.node_id for each in nodes]
    return text, response


def engine_answer(model: InvariantModel, *content: Any) -> str:
    messages = [{"role": "user", "content": list(content)}]
    return model.generate(render_chat(messages, model.tokenizer, QUERY), max_new_tokens=8).text


def answer(llm: Any, nodes: Any, template: Any = TEMPLATE, /, **variables: Any) -> str:
    return str(InvariantSynthesizer(llm, text_qa_template=template).synthesize(QUERY, nodes, **variables))


@pytest.mark.parametrize("mode", KINDS)
async def test_one_segment_per_node_in_one_call(llm: InvariantLLM, model: InvariantModel, mode: str) -> None:
    assert issubclass(InvariantSynthesizer, BaseSynthesizer)
    expected = engine_answer(model, "Context:\n", SegmentSet(TEXTS), f"\nAnswer: {QUERY}")
    for order in ORDERS:
        text, response = await synthesize(llm, mode, nodes_of(order, source=""), text_qa_template=TEMPLATE)
        assert response.metadata["node 1"] == {"source": ""}
        assert response.metadata["invariant_rag"]["sets"] == [3]
        assert order != ORDERS[0] or text
    assert (await synthesize(llm, mode, nodes_of(), text_qa_template=TEMPLATE))[0] == expected
    text, response = await synthesize(llm, mode, [], empty_response="Nothing found.")
    assert text == "Nothing found."
    if "stream" not in mode:
        assert response.metadata["invariant_rag"]["invariant"] is None


def test_a_segment_is_what_llama_index_shows_of_a_node(llm: InvariantLLM, model: InvariantModel) -> None:
    nodes = nodes_of(source="atlas", page=3, secret="x")
    for each in nodes:
        each.node.excluded_llm_metadata_keys = ["secret"]
    segments = SegmentSet(each.node.get_content(MetadataMode.LLM) for each in nodes)
    assert "source: atlas" in segments[0].text
    assert "secret" not in segments[0].text
    assert answer(llm, nodes) == engine_answer(model, "Context:\n", segments, f"\nAnswer: {QUERY}")


def test_scores_and_the_query_reach_the_ordering(model: InvariantModel) -> None:
    seen = set()

    class Spy(type(model.with_method(ordering="score").ordering)):  # type: ignore[misc]
        def sort_keys(self, candidates: Any, query: str) -> Any:
            seen.add(query)
            return super().sort_keys(candidates, query)

    by_score = model.with_method("rotor", ordering=Spy())
    llm = InvariantLLM(by_score, max_tokens=8)
    segments = SegmentSet(Segment(text, score=1.0 / (i + 2)) for i, text in enumerate(TEXTS))
    expected = engine_answer(by_score, "Context:\n", segments, f"\nAnswer: {QUERY}")
    compact = get_response_synthesizer(llm, text_qa_template=TEMPLATE)
    for order in ORDERS:
        assert answer(llm, nodes_of(order)) == expected
        marked = MARKED["node_postprocessors"][0].postprocess_nodes(nodes_of(order))
        assert str(compact.synthesize(QUERY, marked)) == expected, "marks carry scores"
    assert seen == {QUERY}
    with pytest.raises(InvalidSegment, match="score"):
        InvariantSynthesizer(llm).get_response(QUERY, TEXTS)


def test_templates_may_change_and_have_any_variables(llm: InvariantLLM, model: InvariantModel) -> None:
    synthesizer = InvariantSynthesizer(llm)
    assert set(synthesizer.get_prompts()) == {"text_qa_template"}
    twice = PromptTemplate("{context_str}\nAgain:\n{context_str}\n{query_str}")
    synthesizer.update_prompts({"text_qa_template": twice})
    expected = engine_answer(model, SegmentSet(TEXTS), "\nAgain:\n", SegmentSet(TEXTS), f"\n{QUERY}")
    assert str(synthesizer.synthesize(QUERY, nodes_of())) == expected
    forged = InvariantSynthesizer(llm, text_qa_template=PromptTemplate("{query_str}\n{context_str}\n"))
    asked = render_chat([{"role": "user", "content": ["?\n", SegmentSet(TEXTS), "\n"]}], model.tokenizer)
    assert str(forged.synthesize(mark("?"), nodes_of())) == model.generate(asked, max_new_tokens=8).text
    chat = ChatPromptTemplate([
        ChatMessage(role=MessageRole.SYSTEM, content="Speak {language}."), ChatMessage("{context_str}\n{query_str}"),
    ])  # fmt: skip
    assert answer(llm, nodes_of(), chat, language="Dutch")
    for name in ("template", "prompt", "llm", "output_cls", "llm_kwargs", "variables", "messages"):
        template, same = (PromptTemplate(f"{each} {{context_str}} {{query_str}}") for each in (f"{{{name}}}", "Brief."))
        for asked in (llm, canonical(MockLLM())):
            assert answer(asked, nodes_of(), template, **{name: "Brief."}) == answer(asked, nodes_of(), same)


async def test_what_cannot_be_is_refused(llm: InvariantLLM) -> None:
    with pytest.raises(InvalidPrompt, match="context_str"):
        answer(llm, nodes_of(), PromptTemplate("{query_str}"))
    with pytest.raises(UnsupportedCombination, match="streaming"):
        InvariantSynthesizer(llm, streaming=True, output_cls=ChatMessage)
    for name in ("context_str", "query_str", "text_chunks", "string_to_format"):
        with pytest.raises(InvalidPrompt, match=name):
            answer(llm, nodes_of(), **{name: "x"})
        with pytest.raises(InvalidPrompt, match=name):
            await InvariantSynthesizer(llm).asynthesize(QUERY, nodes_of(), **{name: "x"})


@pytest.mark.parametrize("mode", KINDS)
async def test_another_llm_gets_text_and_a_warning_says_so(llm: InvariantLLM, mode: str) -> None:
    with pytest.warns(OrderWarning, match=r"MockLLM.*InvariantLLM"):
        text, _ = await synthesize(MockLLM(), mode, nodes_of(), text_qa_template=TEMPLATE)
    joined = "\n\n".join(TEXTS)
    assert text == f"Context:\n{joined}\nAnswer: {QUERY}"  # MockLLM says what it was told
    Settings.llm = llm
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert InvariantSynthesizer()._llm is llm


# --- the chat engine ---


async def said(engine: InvariantChatEngine, way: str, message: str) -> tuple[str, dict[str, Any]]:
    """Return an answer and its ledger."""
    text, response = await consumed(getattr(engine, way)(message))
    return text, response.metadata["invariant_rag"]


@pytest.mark.parametrize("way", ["chat", "stream_chat", "achat", "astream_chat"])
async def test_a_conversation_ignores_the_order_of_the_nodes_and_tells_what_was_read(
    llm: InvariantLLM, way: str
) -> None:
    found = []
    for order, marks in [*((order, {}) for order in ORDERS[:: 1 if way == "chat" else 2]), (ORDERS[1], MARKED)]:
        options = {"llm": llm, "system_prompt": "Be brief.", **marks}
        engine = InvariantChatEngine.from_defaults(ListRetriever(nodes_of(order)), **options)
        first, second = await said(engine, way, QUERY), await said(engine, way, "And then?")
        found.append((first, second, [each.content for each in engine.chat_history]))
    assert all(each == found[0] for each in found)
    (_, report), _, history = found[0]
    assert (len(history), report["sets"], report["invariant"]) == (4, [3], True)


def test_a_history_is_no_template() -> None:
    history = [ChatMessage("Say {context_str} and {query_str}.", role="user"), ChatMessage("{}", role="assistant")]
    options = {"llm": canonical(MockLLM()), "chat_history": history, "system_prompt": "Be {brief}."}
    asked = str(InvariantChatEngine.from_defaults(ListRetriever(nodes_of()), **options).chat(QUERY))
    assert "Say {context_str} and {query_str}." in asked
    assert "Be {brief}." in asked
    assert all(asked.count(text) == 1 for text in (*TEXTS, QUERY))
