"""Citations: which parts of an answer a node contains, in any order of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, nodes_of
from invariant_rag import InvariantModel, Segment
from llama_index.core.base.llms.types import CitationBlock, TextBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, Field
from tool_models import Writing

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

dispatcher = get_dispatcher(__name__)
FERRY = Segment(TEXTS[0]).content_hash


def writing(llm: InvariantLLM, text: str) -> dict[str, Any]:
    """Return keywords with which one call writes a text and nothing more."""
    processor = Writing(llm.lm, text, only=True)
    return {"logits_processor": [processor], "eos_token_id": llm.lm.tokenizer.eos_token_id}


def asked(order: Sequence[int]) -> list[ChatMessage]:
    blocks = [SegmentBlock.of(Segment(TEXTS[i], title=f"Page {i}")) for i in order]
    return [ChatMessage(role="user", blocks=[*blocks, TextBlock(text=QUERY)])]


@pytest.fixture
def citing(model: InvariantModel) -> InvariantLLM:
    return InvariantLLM(model, max_tokens=80, citations=True)


SENTENCE = "leaves the harbour at noon."


def test_a_sentence_that_a_segment_contains_is_cited_in_every_order(citing: InvariantLLM) -> None:
    said = f"It is blue. {SENTENCE}"
    responses = [citing.chat(asked(order), **writing(citing, said)) for order in ORDERS]
    text, citation = responses[0].message.blocks
    assert text == TextBlock(text=said)
    assert isinstance(citation, CitationBlock)
    assert citation.cited_content == TextBlock(text=TEXTS[0])
    assert (citation.title, citation.additional_location_info) == ("Page 0", {"start": 12, "end": len(said)})
    assert [said[cite["start"] : cite["end"]] for cite in responses[0].raw["citations"]] == [SENTENCE]
    assert [cite["source"] for cite in responses[0].raw["citations"]] == [citation.source]
    assert len({each.message.model_dump_json() for each in responses}) == 1
    assert len({repr(each.raw["citations"]) for each in responses}) == 1


def test_a_stream_ends_with_the_citations(citing: InvariantLLM) -> None:
    whole = citing.chat(asked((0, 1, 2)), **writing(citing, SENTENCE))
    *growing, last = citing.stream_chat(asked((0, 1, 2)), **writing(citing, SENTENCE))
    assert last.message == whole.message
    assert not any(isinstance(block, CitationBlock) for each in growing for block in each.message.blocks)


def test_an_answer_with_citations_goes_back_into_the_conversation_as_its_text(citing: InvariantLLM) -> None:
    said = citing.chat(asked((0, 1, 2)), **writing(citing, SENTENCE)).message
    plain = ChatMessage(SENTENCE, role="assistant")
    more = ChatMessage("Why?")
    answers = {citing.chat([*asked((0, 1, 2)), each, more], max_tokens=8).message.content for each in (said, plain)}
    assert len(answers) == 1


def test_nothing_is_cited_unless_it_is_asked_for(llm: InvariantLLM) -> None:
    response = llm.chat(asked((0, 1, 2)), max_tokens=80, **writing(llm, SENTENCE))
    assert [type(block) for block in response.message.blocks] == [TextBlock]
    assert "citations" not in response.raw
    again = llm.chat(asked((0, 1, 2)), max_tokens=80, citations=True, **writing(llm, SENTENCE))
    assert len(again.raw["citations"]) == 1


def test_a_query_engine_reports_the_citations(model: InvariantModel) -> None:
    said = "The ferry to Ostra leaves the harbour at noon."
    for order in ORDERS:
        llm = InvariantLLM(model, citations=True, max_tokens=80)
        llm.generation_kwargs = writing(llm, said)
        response = RetrieverQueryEngine(ListRetriever(nodes_of(order)), InvariantSynthesizer(llm)).query(QUERY)
        cited = {"start": 0, "end": len(said), "text": said, "source": FERRY, "node_id": "node 0"}
        assert response.metadata["invariant_rag"]["citations"] == [cited]


def test_a_streaming_query_engine_reports_the_citations_once_it_is_read(model: InvariantModel) -> None:
    llm = InvariantLLM(model, citations=True, max_tokens=80)
    llm.generation_kwargs = writing(llm, SENTENCE)
    synthesizer = InvariantSynthesizer(llm, streaming=True)
    response = RetrieverQueryEngine(ListRetriever(nodes_of()), synthesizer).query(QUERY)
    assert str(response) == SENTENCE
    assert [each["source"] for each in response.metadata["invariant_rag"]["citations"]] == [FERRY]


def test_a_number_that_a_citation_query_engine_writes_leads_to_the_same_source_in_every_order(
    model: InvariantModel,
) -> None:
    found = set[tuple[str, str]]()
    for order in ORDERS:
        llm = InvariantLLM(model, max_tokens=80)
        llm.generation_kwargs = writing(llm, "By boat [3].")
        retriever = ListRetriever(nodes_of(order))
        response = CitationQueryEngine(retriever, llm=llm, response_synthesizer=InvariantSynthesizer(llm)).query(QUERY)
        assert response.source_nodes[2].text.startswith("Source 3:\n")
        found.add((str(response), response.source_nodes[2].text))
    assert found == {("By boat [3].", f"Source 3:\n{sorted(TEXTS)[2]}\n")}


def test_objects_cite_nothing(citing: InvariantLLM) -> None:
    class Departure(BaseModel):
        hour: int = Field(ge=0, le=23)

    response = citing.chat(asked((0, 1, 2)), output_cls=Departure)
    assert "citations" not in response.raw
