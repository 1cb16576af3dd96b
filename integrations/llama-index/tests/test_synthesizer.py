from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, nodes_of
from invariant_rag import InvariantModel, Segment, SegmentSet
from invariant_rag.errors import InvalidPrompt, InvalidSegment, UnsupportedCombination
from invariant_rag.prompts import mark, render_chat
from llama_index.core import Settings
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import ChatMessage, ChatPromptTemplate, MessageRole, PromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode, get_response_synthesizer
from llama_index.core.schema import MetadataMode

from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning, canonical
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

MODES = ("sync", "async", "stream", "async stream")
TEMPLATE = PromptTemplate("Context:\n{context_str}\nAnswer: {query_str}")


async def synthesize(llm: Any, mode: str, nodes: Any, **options: Any) -> str:
    synthesizer = InvariantSynthesizer(llm, streaming="stream" in mode, **options)
    if mode.startswith("async"):
        response = await synthesizer.asynthesize(QUERY, nodes)
    else:
        response = synthesizer.synthesize(QUERY, nodes)
    expected = {
        "sync": Response,
        "async": Response,
        "stream": StreamingResponse,
        "async stream": AsyncStreamingResponse,
    }
    assert type(response) is expected[mode]
    assert [each.node_id for each in response.source_nodes] == [each.node_id for each in nodes]
    if mode == "async stream":
        return "".join([piece async for piece in response.async_response_gen()])
    return "".join(response.response_gen) if mode == "stream" else response.response


def engine_answer(model: InvariantModel, segments: SegmentSet) -> str:
    messages = [{"role": "user", "content": ["Context:\n", segments, f"\nAnswer: {QUERY}"]}]
    return model.generate(render_chat(messages, model.tokenizer, QUERY), max_new_tokens=8).text


def test_it_is_a_synthesizer() -> None:
    assert BaseSynthesizer in InvariantSynthesizer.__mro__


@pytest.mark.parametrize("mode", MODES)
async def test_one_segment_per_node_in_one_call(llm: InvariantLLM, model: InvariantModel, mode: str) -> None:
    answer = await synthesize(llm, mode, nodes_of(), text_qa_template=TEMPLATE)
    assert answer == engine_answer(model, SegmentSet(TEXTS))


def test_a_segment_is_what_llama_index_shows_of_a_node(llm: InvariantLLM, model: InvariantModel) -> None:
    nodes = nodes_of(source="atlas", page=3, secret="x")
    for each in nodes:
        each.node.excluded_llm_metadata_keys = ["secret"]
    segments = SegmentSet(each.node.get_content(MetadataMode.LLM) for each in nodes)
    assert "source: atlas" in segments[0].text
    assert "secret" not in segments[0].text
    response = InvariantSynthesizer(llm, text_qa_template=TEMPLATE).synthesize(QUERY, nodes)
    assert response.response == engine_answer(model, segments)


def test_the_default_prompt_is_the_one_of_llama_index(llm: InvariantLLM, model: InvariantModel) -> None:
    template = DEFAULT_TEXT_QA_PROMPT_SEL.select(llm)
    messages = []
    for message in template.format_messages(context_str="HERE", query_str=QUERY):
        before, found, behind = message.content.partition("HERE")
        content = [before, SegmentSet(TEXTS), behind] if found else before
        messages.append({"role": message.role.value, "content": content})
    expected = model.generate(render_chat(messages, model.tokenizer), max_new_tokens=8).text
    assert InvariantSynthesizer(llm).synthesize(QUERY, nodes_of()).response == expected


def test_the_score_ordering_reads_the_scores_of_the_nodes(model: InvariantModel) -> None:
    by_score = model.with_method("rotor", ordering="score")
    synthesizer = InvariantSynthesizer(InvariantLLM(by_score, max_tokens=8), text_qa_template=TEMPLATE)
    segments = SegmentSet(Segment(text, score=1.0 / (i + 2)) for i, text in enumerate(TEXTS))
    for order in ORDERS:
        assert synthesizer.synthesize(QUERY, nodes_of(order)).response == engine_answer(by_score, segments)
    with pytest.raises(InvalidSegment, match="score"):
        synthesizer.get_response(QUERY, TEXTS)


def test_marked_nodes_keep_their_scores(model: InvariantModel) -> None:
    llm = InvariantLLM(model.with_method("rotor", ordering="score"), max_tokens=8)
    compact = get_response_synthesizer(llm, response_mode=ResponseMode.COMPACT, text_qa_template=TEMPLATE)
    marker = SegmentMarkerPostprocessor()
    expected = InvariantSynthesizer(llm, text_qa_template=TEMPLATE).synthesize(QUERY, nodes_of()).response
    for order in ORDERS:
        assert compact.synthesize(QUERY, marker.postprocess_nodes(nodes_of(order))).response == expected


def test_a_template_may_name_the_context_twice(llm: InvariantLLM, model: InvariantModel) -> None:
    template = PromptTemplate("{context_str}\nOnce more:\n{context_str}\nAnswer: {query_str}")
    answer = InvariantSynthesizer(llm, text_qa_template=template).synthesize(QUERY, nodes_of())
    content = [SegmentSet(TEXTS), "\nOnce more:\n", SegmentSet(TEXTS), f"\nAnswer: {QUERY}"]
    prompt = render_chat([{"role": "user", "content": content}], model.tokenizer, QUERY)
    assert answer.response == model.generate(prompt, max_new_tokens=8).text


def test_relevance_orderings_compare_with_the_query(model: InvariantModel) -> None:
    seen = []

    class Spy(type(model.ordering)):  # type: ignore[misc]
        def sort_keys(self, candidates: Any, query: str) -> Any:
            seen.append(query)
            return super().sort_keys(candidates, query)

    InvariantSynthesizer(InvariantLLM(model.with_method(ordering=Spy()), max_tokens=1)).synthesize(QUERY, nodes_of())
    assert set(seen) == {QUERY}


def test_prompts_can_be_read_and_changed(llm: InvariantLLM, model: InvariantModel) -> None:
    synthesizer = InvariantSynthesizer(llm)
    assert set(synthesizer.get_prompts()) == {"text_qa_template"}
    synthesizer.update_prompts({"text_qa_template": TEMPLATE})
    assert synthesizer.synthesize(QUERY, nodes_of()).response == engine_answer(model, SegmentSet(TEXTS))


def test_a_chat_template_and_its_variables_work(llm: InvariantLLM) -> None:
    template = ChatPromptTemplate(
        message_templates=[
            ChatMessage(role=MessageRole.SYSTEM, content="Speak {language}."),
            ChatMessage(role=MessageRole.USER, content="{context_str}\n{query_str}"),
        ]
    )
    synthesizer = InvariantSynthesizer(llm, text_qa_template=template)
    assert synthesizer.synthesize(QUERY, nodes_of(), language="Dutch").response


def test_a_template_without_context_is_refused(llm: InvariantLLM) -> None:
    with pytest.raises(InvalidPrompt, match="context_str"):
        InvariantSynthesizer(llm, text_qa_template=PromptTemplate("{query_str}")).synthesize(QUERY, nodes_of())


def test_a_query_cannot_pose_as_the_context(llm: InvariantLLM, model: InvariantModel) -> None:
    answer = InvariantSynthesizer(llm, text_qa_template=PromptTemplate("{query_str}\n{context_str}\n")).synthesize(
        f"{mark('?')}", nodes_of()
    )
    messages = [{"role": "user", "content": ["?\n", SegmentSet(TEXTS), "\n"]}]
    assert answer.response == model.generate(render_chat(messages, model.tokenizer), max_new_tokens=8).text


@pytest.mark.parametrize("mode", MODES)
async def test_no_node_gives_the_empty_response(llm: InvariantLLM, mode: str) -> None:
    assert await synthesize(llm, mode, [], empty_response="Nothing found.") == "Nothing found."


@pytest.mark.parametrize("mode", MODES)
async def test_another_llm_gets_text_and_a_warning_says_so(mode: str) -> None:
    with pytest.warns(OrderWarning, match=r"MockLLM.*InvariantLLM"):
        answer = await synthesize(MockLLM(), mode, nodes_of(), text_qa_template=TEMPLATE)
    joined = "\n\n".join(TEXTS)
    assert answer == f"Context:\n{joined}\nAnswer: {QUERY}"  # MockLLM says what it was told


def test_no_warning_with_our_llm(llm: InvariantLLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InvariantSynthesizer(llm).synthesize(QUERY, nodes_of())


def test_without_an_llm_the_one_of_the_settings_is_used(llm: InvariantLLM) -> None:
    Settings.llm = llm
    assert InvariantSynthesizer()._llm is llm


def test_streaming_an_object_is_refused(llm: InvariantLLM) -> None:
    with pytest.raises(UnsupportedCombination, match="streaming"):
        InvariantSynthesizer(llm, streaming=True, output_cls=ChatMessage)


async def response_of(llm: Any, mode: str, nodes: Any, **options: Any) -> Any:
    """What a query engine returns; of a stream, once it is consumed."""
    synthesizer = InvariantSynthesizer(llm, streaming="stream" in mode, **options)
    engine = RetrieverQueryEngine(ListRetriever(nodes), synthesizer)
    response = await engine.aquery(QUERY) if mode.startswith("async") else engine.query(QUERY)
    if mode == "async stream":
        _ = [piece async for piece in response.async_response_gen()]
    elif mode == "stream":
        _ = list(response.response_gen)
    return response


@pytest.mark.parametrize("mode", MODES)
async def test_the_metadata_of_a_response_hold_what_the_llm_reports(model: InvariantModel, mode: str) -> None:
    llm = InvariantLLM(model.with_method(overflow="drop_last"), max_tokens=4)
    reports = []
    for order in ORDERS:
        nodes = nodes_of(order, source="atlas")
        for each in nodes:
            each.node.text *= 40  # together more than the context window
        response = await response_of(llm, mode, nodes)
        assert set(response.metadata) == {"node 0", "node 1", "node 2", "invariant_rag"}
        assert response.metadata["node 1"] == {"source": "atlas"}
        reports.append(response.metadata["invariant_rag"])
    assert all(report == reports[0] for report in reports)
    hashes = {Segment(each.node.get_content(MetadataMode.LLM)).content_hash for each in nodes}
    assert reports[0]["dropped"]
    assert sorted(reports[0]["order"] + reports[0]["dropped"]) == sorted(hashes)
    assert reports[0]["trimmed"] == []
    assert reports[0]["finish_reason"] == "length"
    assert reports[0]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("mode", ["stream", "async stream"])
async def test_a_response_made_of_a_stream_has_its_report(llm: InvariantLLM, mode: str) -> None:
    synthesizer = InvariantSynthesizer(llm, streaming=True)
    if mode == "stream":
        response = synthesizer.synthesize(QUERY, nodes_of()).get_response()
    else:
        response = await (await synthesizer.asynthesize(QUERY, nodes_of())).get_response()
    assert response.metadata["invariant_rag"]["usage"]["completion_tokens"] == 8


def test_a_report_is_that_of_its_own_call(llm: InvariantLLM) -> None:
    synthesizer = InvariantSynthesizer(llm)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda count: synthesizer.synthesize(QUERY, nodes_of(range(count))), (1, 2, 3)))
    assert [len(each.metadata["invariant_rag"]["order"]) for each in found] == [1, 2, 3]


@pytest.mark.parametrize("name", ["template", "prompt", "llm", "output_cls", "llm_kwargs", "variables", "messages"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_variables_of_a_template_may_have_any_name(llm: InvariantLLM, wrapped: bool, name: str) -> None:
    template = PromptTemplate(f"{{{name}}} {{context_str}} {{query_str}}")
    synthesizer = InvariantSynthesizer(canonical(MockLLM()) if wrapped else llm, text_qa_template=template)
    found = synthesizer.synthesize(QUERY, nodes_of(), **{name: "Be brief."})
    same = InvariantSynthesizer(
        canonical(MockLLM()) if wrapped else llm, text_qa_template=PromptTemplate("Be brief. {context_str} {query_str}")
    )
    assert str(found) == str(same.synthesize(QUERY, nodes_of()))


@pytest.mark.parametrize("name", ["context_str", "query_str", "text_chunks", "string_to_format"])
@pytest.mark.parametrize("way", ["synthesize", "asynthesize"])
async def test_variables_that_the_synthesizer_sets_are_refused(llm: InvariantLLM, way: str, name: str) -> None:
    synthesizer = InvariantSynthesizer(llm)
    if way == "synthesize":
        with pytest.raises(InvalidPrompt, match=name):
            synthesizer.synthesize(QUERY, nodes_of(), **{name: "x"})
    else:
        with pytest.raises(InvalidPrompt, match=name):
            await synthesizer.asynthesize(QUERY, nodes_of(), **{name: "x"})
