"""The synthesizer, the chat engine and the evaluator, and what responses, events and callbacks tell."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, HashingLLM, ListRetriever, consumed, engine_of, nodes_of
from invariant_rag import InvariantModel, Segment, SegmentSet
from invariant_rag.errors import ContextOverflow, InvalidPrompt, InvalidSegment, UnknownName, UnsupportedCombination
from invariant_rag.judge import Judge
from invariant_rag.prompts import mark, render_chat
from llama_index.core import Settings, get_response_synthesizer
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.evaluation import PairwiseComparisonEvaluator
from llama_index.core.evaluation.pairwise import DEFAULT_EVAL_TEMPLATE, EvaluationSource
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank
from llama_index.core.prompts import ChatPromptTemplate, MessageRole, PromptTemplate
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode
from pydantic import BaseModel, Field

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning, SegmentBlock, canonical, vote
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


@pytest.mark.parametrize("way", ["chat", "stream_chat", "achat", "astream_chat"])
async def test_a_conversation_ignores_the_order_of_the_nodes_and_tells_what_was_read(
    llm: InvariantLLM, way: str
) -> None:
    found = []
    for order, marks in [*((order, {}) for order in ORDERS[:: 1 if way == "chat" else 2]), (ORDERS[1], MARKED)]:
        options = {"llm": llm, "system_prompt": "Be brief.", **marks}
        engine = InvariantChatEngine.from_defaults(ListRetriever(nodes_of(order)), **options)
        replies = [await consumed(getattr(engine, way)(message)) for message in (QUERY, "And then?")]
        said = [(text, response.metadata["invariant_rag"]) for text, response in replies]
        found.append((said, [each.content for each in engine.chat_history]))
    assert all(each == found[0] for each in found)
    ((_, report), _), history = found[0]
    assert (len(history), report["sets"], report["invariant"]) == (4, [3], True)


def test_a_history_is_no_template() -> None:
    history = [ChatMessage("Say {context_str} and {query_str}.", role="user"), ChatMessage("{}", role="assistant")]
    options = {"llm": canonical(MockLLM()), "chat_history": history, "system_prompt": "Be {brief}."}
    asked = str(InvariantChatEngine.from_defaults(ListRetriever(nodes_of()), **options).chat(QUERY))
    assert "Say {context_str} and {query_str}." in asked
    assert "Be {brief}." in asked
    assert all(asked.count(text) == 1 for text in (*TEXTS, QUERY))


pytestmark = pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")

HASHES = {Segment(text).content_hash for text in TEXTS}
WAYS = ("query", "aquery", "stream", "astream")


class Word(BaseModel):
    word: str = Field(max_length=8)


async def response_of(llm: Any, way: str, nodes: Any = None, **options: Any) -> Any:
    """Return a response, of a stream once it is read."""
    engine = engine_of(nodes_of() if nodes is None else nodes, llm=llm, streaming="stream" in way, **options)
    return (await consumed(engine.aquery(QUERY) if way.startswith("a") else engine.query(QUERY)))[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
@pytest.mark.parametrize("wrapper", ["InvariantLLM", "canonical", "vote"])
async def test_a_query_engine_of_llamaindex_tells_what_was_read(
    model: InvariantModel, wrapper: str, mode: str, way: str
) -> None:
    llms = {"canonical": canonical(HashingLLM()), "vote": vote(HashingLLM())}
    llm = llms.get(wrapper) or InvariantLLM(model, max_tokens=4)
    found = [await response_of(llm, way, nodes_of(order), response_mode=mode) for order in (ORDERS[0], ORDERS[-1])]
    assert {"node 0", "node 1", "node 2", "invariant_rag"} == set(found[0].metadata)
    first, last = (each.metadata["invariant_rag"] for each in found)
    assert first == last
    assert (first["sets"], first["invariant"], set(first["order"])) == ([3], True, HASHES)


@pytest.mark.parametrize("way", WAYS)
async def test_several_calls_are_one_report_that_is_invariant_only_if_all_are(
    llm: InvariantLLM, model: InvariantModel, way: str
) -> None:
    report = (await response_of(llm, way, response_mode="refine")).metadata["invariant_rag"]
    assert (report["sets"], report["invariant"], set(report["order"])) == ([], False, set())
    assert report["usage"]["completion_tokens"] == 24
    reranked = await response_of(llm, way, node_postprocessors=[RankGPTRerank(llm=llm, top_n=3)])
    report = reranked.metadata["invariant_rag"]  # of what wrote the answer; but what chose the nodes may change it
    assert (report["sets"], report["invariant"], report["usage"]["completion_tokens"]) == ([3], False, 8)
    if "stream" in way:
        return
    Settings.llm = llm  # LlamaIndex gives a synthesizer without text no other
    for options in ({"nodes": []}, {"response_mode": "no_text"}):
        report = (await response_of(llm, way, **options)).metadata["invariant_rag"]
        assert (report["sets"], report["invariant"]) == ([], None)
    assert set((await response_of(HashingLLM(), way)).metadata) == {"node 0", "node 1", "node 2"}
    structured = InvariantLLM(model, max_tokens=100).as_structured_llm(Word)
    report = (await response_of(structured, way)).metadata["invariant_rag"]
    assert (report["sets"], report["invariant"]) == ([3], True)


async def test_concurrent_queries_do_not_report_for_one_another(llm: InvariantLLM) -> None:
    orders = [(0,), (0, 1), (0, 1, 2)]
    found = await asyncio.gather(*(engine_of(nodes_of(order), llm=llm).aquery(QUERY) for order in orders))
    assert [each.metadata["invariant_rag"]["sets"] for each in found] == [[1], [2], [3]]
    assert llm.complete(QUERY).raw["invariant"] is None
    by_hand = get_response_synthesizer(llm=llm).synthesize(QUERY, nodes_of((0,)))
    assert by_hand.metadata["invariant_rag"]["sets"] == [1]


# --- events ---


class Events(BaseEventHandler):
    """Remembers every event."""

    events: list[BaseEvent] = []  # noqa: RUF012 - a pydantic field: every handler has its own

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        """Names of the events, those of progress once."""
        names = [event.class_name().removesuffix("Event") for event in self.events]
        return [name for i, name in enumerate(names) if not (name.endswith("InProgress") and names[i - 1] == name)]


@pytest.fixture
def told() -> Iterator[Events]:
    handler, root = Events(), get_dispatcher("root")
    before = list(root.event_handlers)
    root.event_handlers = [*before, handler]
    yield handler
    root.event_handlers = before


@pytest.mark.parametrize("kind", ["Completion", "Chat"])
@pytest.mark.parametrize("way", ["", "a", "stream_", "astream_"])
async def test_a_call_starts_progresses_and_ends(llm: InvariantLLM, told: Events, way: str, kind: str) -> None:
    messages = [ChatMessage(blocks=[SegmentBlock.of("one"), *ChatMessage(QUERY).blocks])]
    call = getattr(llm, way + ("chat" if kind == "Chat" else "complete"))
    _, response = await consumed(call(messages if kind == "Chat" else QUERY))
    progress = [f"LLM{kind}InProgress"] if "stream" in way else []
    assert told.names == [f"LLM{kind}Start", *progress, f"LLM{kind}End"]
    start, *_, end = told.events
    assert end.response == response
    assert start.model_dict["method"] == "rotor"
    assert start.model_dump(mode="json")
    assert start.span_id == end.span_id is not None


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_a_query_tells_its_steps_in_order(llm: InvariantLLM, told: Events, way: str, streaming: bool) -> None:
    engine = engine_of(nodes_of(), response_synthesizer=InvariantSynthesizer(llm, streaming=streaming))
    await consumed(getattr(engine, way)(QUERY))
    begun = ["QueryStart", "RetrievalStart", "RetrievalEnd", "SynthesizeStart", "GetResponseStart", "LLMPredictStart"]
    ended = ["GetResponseEnd", "SynthesizeEnd", "QueryEnd"]
    if streaming:
        assert told.names == [*begun, "LLMChatStart", *ended, "LLMChatInProgress", "LLMChatEnd"]
    else:
        assert told.names == [*begun, "LLMChatStart", "LLMChatEnd", "LLMPredictEnd", *ended]
    [start] = [event for event in told.events if event.class_name() == "LLMChatStartEvent"]
    assert "\n\n".join(TEXTS) in start.messages[-1].content, "events show segments as text"


def test_callbacks_see_one_call_per_query_its_tokens_and_its_failure(llm: InvariantLLM) -> None:
    debug, counter = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    manager = CallbackManager([debug, counter])
    synthesizer = InvariantSynthesizer(llm.model_copy(), callback_manager=manager)
    engine_of(nodes_of(), response_synthesizer=synthesizer, callback_manager=manager).query(QUERY)
    [(_, end)] = debug.get_event_pairs(CBEventType.LLM)
    usage = end.payload["response"].raw["usage"]
    assert counter.completion_llm_token_count == usage["completion_tokens"] == 8
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert [len(debug.get_event_pairs(kind)) for kind in (CBEventType.QUERY, CBEventType.SYNTHESIZE)] == [1, 1]
    with pytest.raises(ContextOverflow):
        llm.model_copy(update={"callback_manager": manager}).complete("x" * 5000)
    assert isinstance(debug.get_event_pairs(CBEventType.LLM)[-1][1].payload["exception"], ContextOverflow)


ONE, OTHER = "It leaves at noon.", "It leaves at six."
NAMES = ["response", "second_response"]


@pytest.mark.parametrize("options", [{}, {"by": "texts"}, {"criteria": {"brevity": "few words"}}], ids=str)
async def test_the_result_is_the_verdict_of_the_judge_and_swaps_exactly(
    model: InvariantModel, options: dict[str, Any]
) -> None:
    for lm in (model, model.with_routing(0.0)):
        evaluator = InvariantPairwiseEvaluator(InvariantLLM(lm, max_tokens=8), **options)
        assert isinstance(evaluator, PairwiseComparisonEvaluator)
        asked = {"query": QUERY, "reference": "noon"}
        one = evaluator.evaluate(response=ONE, second_response=OTHER, **asked)
        two = await evaluator.aevaluate(response=OTHER, second_response=ONE, **asked)
        verdict = evaluator.judge.compare(QUERY, ONE, OTHER, reference="noon")
        assert Judge(lm, **options).compare(QUERY, ONE, OTHER, reference="noon") == verdict
        assert one.feedback == one.response == verdict.describe(NAMES)
        assert (one.passing, one.score) == {0: (True, 1.0), 1: (False, 0.0)}[verdict.winner]
        assert (one.passing, one.score) == (not two.passing, 1 - two.score)
        assert [one.pairwise_source, two.pairwise_source] == [EvaluationSource.ORIGINAL] * 2
        first, second = (str(each.feedback).partition(".\n")[0].rstrip(".") for each in (one, two))
        numbers = [[part.split()[-1] for part in each.split(", ")] for each in (first, second)]
        assert numbers[0][:2] == numbers[1][1::-1]
    tie = evaluator.evaluate(query=QUERY, response=ONE, second_response=ONE)
    assert (tie.score, tie.passing, tie.invalid_result) == (0.5, None, False)


def test_another_prompt_another_llm_and_wrong_options_are_refused_before_a_model_is_loaded() -> None:
    nowhere = InvariantLLM("no/such-model")
    evaluator = InvariantPairwiseEvaluator(nowhere)
    assert evaluator.get_prompts() == {}
    for options, error, said in (
        ({"eval_template": DEFAULT_EVAL_TEMPLATE}, UnsupportedCombination, "eval_template.*\n.*criteria="),
        ({"parser_function": lambda text: text}, UnsupportedCombination, "parser_function"),
        ({"by": "numbers"}, UnknownName, "'letters', 'texts'"),
        ({"criteria": ["brevity"]}, InvalidPrompt, "criteria"),
    ):
        with pytest.raises(error, match=said):
            InvariantPairwiseEvaluator(nowhere, **options)
    with pytest.raises(UnsupportedCombination, match="eval_template"):
        evaluator.update_prompts({"eval_template": DEFAULT_EVAL_TEMPLATE})
    with pytest.raises(ValueError, match="must be provided"):
        evaluator.evaluate(query=QUERY, response=ONE)
    Settings.llm = MockLLM()
    with pytest.raises(UnsupportedCombination, match="MockLLM"):
        InvariantPairwiseEvaluator()
