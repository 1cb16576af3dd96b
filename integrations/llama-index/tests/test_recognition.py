"""What an LLM knows of the nodes of its trace, what it says where it does not, and what an answer reports."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, nodes_of
from entry import HashingLLM
from invariant_rag import InvariantModel, Segment, SegmentSet
from invariant_rag.errors import OrderWarning
from invariant_rag.generation.ledger import ledger
from invariant_rag.prompts import render_chat
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, TextBlock
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.mock import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index_instrumentation import root_dispatcher

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical, vote
from llama_index.llms.invariant_rag.nodes import split_labels
from llama_index.llms.invariant_rag.tracking import RUNS, SpanTracker
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor

dispatcher = get_dispatcher(__name__)
LEDGER = {"sets", "order", "dropped", "trimmed", "cached_tokens", "method", "invariant"}
EIGHT = [f"{prefix}{name}" for name in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")]


def numbered(nodes: list[NodeWithScore]) -> str:
    return "\n".join(f"[{place}] {each.text}" for place, each in enumerate(nodes, start=1)) + f"\n{QUERY}"


async def last_response(llm: Any, way: str, text: str) -> Any:
    """Return the response to a text; of a stream, the last one."""
    response = getattr(llm, way)([ChatMessage(text)] if way.endswith("chat") else text)
    if way.startswith("a"):
        response = await response
    if way.startswith("astream"):
        return [each async for each in response][-1]
    return list(response)[-1] if way.startswith("stream") else response


def said(call: Any) -> list[str]:
    """Return the warnings about order of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, OrderWarning)]


@pytest.mark.parametrize("way", EIGHT)
@pytest.mark.parametrize("wrapper", ["InvariantLLM", "canonical", "vote"])
async def test_every_method_knows_the_nodes_of_its_span_and_reports_them(
    model: InvariantModel, wrapper: str, way: str
) -> None:
    llms = {
        "InvariantLLM": InvariantLLM(model, max_tokens=4),
        "canonical": canonical(MockLLM()),
        "vote": vote(MockLLM()),
    }

    @dispatcher.span
    async def ask(order: Any) -> Any:
        return await last_response(llms[wrapper], way, numbered(ListRetriever(nodes_of(order)).retrieve(QUERY)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", OrderWarning)
        reports = [(await ask(order)).raw for order in ORDERS]
    assert all({name: each[name] for name in LEDGER} == {name: reports[0][name] for name in LEDGER} for each in reports)
    assert (reports[0]["sets"], reports[0]["invariant"]) == ([3], True)
    assert set(reports[0]["order"]) == {Segment(text).content_hash for text in TEXTS}


def test_it_can_be_switched_off(model: InvariantModel) -> None:
    @dispatcher.span
    def ask(llm: Any) -> Any:
        return llm.complete("\n\n".join(each.text for each in ListRetriever(nodes_of()).retrieve(QUERY)) + QUERY).raw

    assert ask(InvariantLLM(model, max_tokens=1))["sets"] == [3]
    assert ask(InvariantLLM(model, max_tokens=1, find_documents=False))["sets"] == []
    assert ask(canonical(HashingLLM(), find_documents=False))["invariant"] is False


def test_strict_raises_what_is_a_warning_else(model: InvariantModel) -> None:
    text = numbered(ListRetriever(nodes_of()).retrieve(QUERY))
    assert len(said(lambda: InvariantLLM(model, max_tokens=1).complete(text))) == 1
    for llm in (
        InvariantLLM(model, max_tokens=1, strict=True),
        canonical(MockLLM(), strict=True),
        vote(MockLLM(), strict=True),
    ):
        with pytest.raises(OrderWarning, match=r"another run.*dispatcher\.span"):
            llm.complete(text)
        llm.complete("Hello.")


def test_segments_may_be_required(model: InvariantModel) -> None:
    for llm in (
        InvariantLLM(model, max_tokens=1, require_segments=True),
        canonical(MockLLM(), require_segments=True),
        vote(MockLLM(), require_segments=True),
    ):
        with pytest.raises(OrderWarning, match="expected segments"):
            llm.complete("Hello.")
        assert llm.chat([ChatMessage(blocks=[SegmentBlock.of("a"), TextBlock(text=QUERY)])]).raw["sets"] == [1]


@pytest.mark.parametrize(("order", "count"), [("given", 1), ("canonical", 0)])
def test_a_router_whose_plain_model_reads_the_order_given_says_so(
    model: InvariantModel, order: Any, count: int
) -> None:
    llm = InvariantLLM(model.with_routing(plain_order=order), max_tokens=1)
    message = ChatMessage(blocks=[*map(SegmentBlock.of, TEXTS), TextBlock(text=QUERY)])
    assert len(said(lambda: llm.chat([message]))) == count
    assert said(lambda: llm.chat([ChatMessage(blocks=[message.blocks[0], message.blocks[-1]])])) == []


def test_marks_that_reach_an_llm_which_does_not_know_them_raise_a_warning(llm: InvariantLLM) -> None:
    def engine(other: Any) -> Any:
        return RetrieverQueryEngine.from_args(
            ListRetriever(nodes_of()), llm=other, node_postprocessors=[SegmentMarkerPostprocessor()]
        )

    (message,) = said(lambda: engine(MockLLM()).query(QUERY))
    assert "MockLLM" in message
    assert "canonical(llm)" in message
    assert said(lambda: engine(canonical(MockLLM())).query(QUERY)) == []


class Asking(BaseRetriever):
    """A retriever that asks an LLM about what another one found."""

    def __init__(self, inner: BaseRetriever, llm: Any) -> None:
        super().__init__()
        self._inner, self._llm, self.sets = inner, llm, None

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._inner.retrieve(query_bundle)
        self.sets = self._llm.complete("\n\n".join(each.text for each in found) + QUERY).raw["sets"]
        return found[:2]


def test_an_llm_within_a_retriever_gets_a_set_and_what_it_chose_from_is_forgotten(llm: InvariantLLM) -> None:
    retriever = Asking(ListRetriever(nodes_of()), llm)

    @dispatcher.span
    def ask() -> Any:
        return llm.complete("\n\n".join(each.text for each in retriever.retrieve(QUERY)) + QUERY)

    answers: list[Any] = []
    assert said(lambda: answers.append(ask())) == []
    assert retriever.sets == [3]
    assert answers[0].raw["sets"] == [2]


def test_two_retrievals_of_one_trace_may_share_nodes(llm: InvariantLLM) -> None:
    engines = [RetrieverQueryEngine.from_args(ListRetriever(nodes_of(each)), llm=llm) for each in ((0, 1), (1, 2))]

    @dispatcher.span
    def ask() -> list[str]:
        return [str(each.query(QUERY)) for each in engines]

    assert said(ask) == []


def test_a_warning_comes_once_per_line_and_names_it(llm: InvariantLLM) -> None:
    text = numbered(ListRetriever(nodes_of()).retrieve(QUERY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            llm.complete(text)
        llm.complete(text)
    places = [(each.filename, each.lineno) for each in caught if issubclass(each.category, OrderWarning)]
    assert len(places) == len(set(places)) == 2
    assert {filename for filename, _ in places} == {__file__}


class Citing(CustomLLM):
    """An LLM that cites the document with a word."""

    word: str

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        number = next(line for line in prompt.splitlines() if self.word in line).partition("]")[0].lstrip("[")
        return CompletionResponse(text=f"So says [{number}].")

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        text = self.complete(prompt, formatted=True).text
        return (CompletionResponse(text=text[: i + 1], delta=text[i]) for i in range(len(text)))


@pytest.mark.parametrize("way", [each for each in EIGHT if "complete" in each])
@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_a_number_in_an_answer_leads_to_the_node_that_was_meant(wrap: Any, way: str) -> None:
    @dispatcher.span
    async def ask(order: Any) -> tuple[str, list[NodeWithScore]]:
        nodes = ListRetriever(nodes_of(order)).retrieve(QUERY)
        return (await last_response(wrap(Citing(word="barley")), way, numbered(nodes))).text, nodes

    for order in ORDERS:
        text, nodes = await ask(order)
        number = int(text.removeprefix("So says [").removesuffix("]."))
        assert "barley" in nodes[number - 1].text


def test_labels_of_places_are_split_off_and_no_others() -> None:
    assert split_labels(["Source 1:\na\n", "x: y\n\nSource 2:\nb"]) == [
        ("Source 1:\n", "a"),
        ("Source 2:\n", "x: y\n\nb"),
    ]
    assert split_labels(["Source 2:\na", "Source 1:\nb"]) is None


def test_spans_that_ended_are_forgotten(llm: InvariantLLM) -> None:
    before = len(RUNS._runs)
    RetrieverQueryEngine.from_args(ListRetriever(nodes_of()), llm=llm).query(QUERY)
    with pytest.raises(OrderWarning):
        InvariantLLM(llm.lm, require_segments=True).complete("Hello.")
    assert len(RUNS._runs) == before


def test_the_handler_is_added_once(model: InvariantModel) -> None:
    for _ in range(3):
        InvariantLLM(model)
        canonical(MockLLM())
    assert sum(isinstance(each, SpanTracker) for each in root_dispatcher.span_handlers) == 1


def test_the_ledger_of_a_response_is_that_of_the_core(llm: InvariantLLM, model: InvariantModel) -> None:
    prompt = render_chat([{"role": "user", "content": [SegmentSet(TEXTS), QUERY]}], model.tokenizer)
    expected = ledger(model.generate(prompt, max_new_tokens=8), prompt)
    raw = llm.chat([ChatMessage(blocks=[*map(SegmentBlock.of, TEXTS), TextBlock(text=QUERY)])]).raw
    assert {name: raw[name] for name in LEDGER} == expected
