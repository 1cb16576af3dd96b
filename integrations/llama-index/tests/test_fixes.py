"""Every fix that an `OrderWarning` names can be followed by whoever asks, and then there is no warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from cases import QUERY, ListRetriever, WordEmbedding, nodes_of
from invariant_rag import InvariantModel
from llama_index.core import Document, Settings, SummaryIndex
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.evaluation import PairwiseComparisonEvaluator
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import CompactAndRefine, Refine, TreeSummarize
from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning, SegmentBlock
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

dispatcher = get_dispatcher(__name__)
Ask = Callable[[Any], Any]


def said(call: Callable[[], Any]) -> list[str]:
    """Return the warnings about order of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, OrderWarning)]


@dispatcher.span
def retrieve_and_ask(llm: Any, write: Callable[[list[NodeWithScore]], str], nodes: Any = None) -> Any:
    return llm.complete(write(ListRetriever(nodes or nodes_of()).retrieve(QUERY)) + "\n" + QUERY)


@dispatcher.span
def ask_with_blocks(llm: Any) -> Any:
    blocks = [SegmentBlock.of(each.text) for each in ListRetriever(nodes_of()).retrieve(QUERY)]
    return llm.chat([ChatMessage(blocks=[*blocks, TextBlock(text=QUERY)])])


def marked(nodes: list[NodeWithScore]) -> str:
    return "\n".join(
        each.node.get_content(MetadataMode.LLM) for each in SegmentMarkerPostprocessor().postprocess_nodes(nodes)
    )


def scores_around(nodes: list[NodeWithScore]) -> str:
    return "\n".join(f"({each.score:.2f}) {each.text}" for each in nodes)


def query(llm: Any, **options: Any) -> Any:
    return RetrieverQueryEngine.from_args(ListRetriever(nodes_of()), llm=llm, **options).query(QUERY)


def query_summary(**options: Any) -> Any:
    texts = [Document(text=each.text) for each in nodes_of()]
    return SummaryIndex.from_documents(texts).as_query_engine(**options).query(QUERY)


def evaluate(evaluator: Any) -> Any:
    return evaluator.evaluate(query=QUERY, response="At noon.", second_response="At ten.")


MARKED_OR_BLOCKS = [lambda llm: retrieve_and_ask(llm, marked), ask_with_blocks]
RERANKED = [lambda llm: query(llm, node_postprocessors=[LLMRerank(llm=llm, choice_batch_size=3)])]
CASES: dict[str, tuple[Ask, str, list[Ask]]] = {
    "own call, other text around each": (
        lambda llm: retrieve_and_ask(llm, scores_around),
        "Mark the nodes (SegmentMarkerPostprocessor) or give SegmentBlocks, in one message",
        MARKED_OR_BLOCKS,
    ),
    "own call, cut": (
        lambda llm: retrieve_and_ask(llm, lambda nodes: "\n".join(each.text[:30] for each in nodes)),
        "Pass nodes whole, and mark them (SegmentMarkerPostprocessor) or give SegmentBlocks",
        MARKED_OR_BLOCKS,
    ),
    "own call, one of three": (
        lambda llm: retrieve_and_ask(llm, lambda nodes: nodes[0].text),
        "Pass all nodes of a question in one call, or retrieve fewer",
        [
            lambda llm: retrieve_and_ask(llm, lambda nodes: "\n".join(each.text for each in nodes)),
            lambda llm: retrieve_and_ask(llm, lambda nodes: nodes[0].text, nodes_of([0])),
        ],
    ),
    "own call, retrieved elsewhere": (
        lambda llm: llm.complete("\n".join(each.text for each in ListRetriever(nodes_of()).retrieve(QUERY)) + QUERY),
        "@dispatcher.span, or in one workflow; or mark the nodes (SegmentMarkerPostprocessor), or give SegmentBlocks",
        [
            lambda llm: retrieve_and_ask(llm, lambda nodes: "\n".join(each.text for each in nodes)),
            lambda llm: llm.complete(marked(ListRetriever(nodes_of()).retrieve(QUERY)) + QUERY),
            ask_with_blocks,
        ],
    ),
    "synthesizer": (
        lambda llm: query(llm, response_mode="refine"),
        "response_synthesizer=InvariantSynthesizer(llm)",
        [lambda llm: query(llm, response_synthesizer=InvariantSynthesizer(llm))],
    ),
    "RankGPTRerank": (
        lambda llm: query(llm, node_postprocessors=[RankGPTRerank(llm=llm)]),
        "Use LLMRerank, with a choice_batch_size of at least the number of nodes",
        RERANKED,
    ),
    "LLMRerank in batches": (
        lambda llm: query(llm, node_postprocessors=[LLMRerank(llm=llm, choice_batch_size=2)]),
        "Use LLMRerank, with a choice_batch_size of at least the number of nodes",
        RERANKED,
    ),
    "a retriever that asks": (
        lambda llm: query_summary(retriever_mode="llm"),
        "Retrieve without the LLM (another retriever_mode), and choose by LLMRerank behind it",
        [
            lambda llm: query_summary(node_postprocessors=[LLMRerank(choice_batch_size=3)]),
            lambda llm: query_summary(retriever_mode="embedding", node_postprocessors=[LLMRerank(choice_batch_size=3)]),
        ],
    ),
    "PairwiseComparisonEvaluator": (
        lambda llm: evaluate(PairwiseComparisonEvaluator(llm, enforce_consensus=False)),
        "Use InvariantPairwiseEvaluator(llm), or enforce_consensus=True",
        [
            lambda llm: evaluate(InvariantPairwiseEvaluator(llm)),
            lambda llm: evaluate(PairwiseComparisonEvaluator(llm, enforce_consensus=True)),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_named_fix_is_for_whoever_asks_and_works(llm: InvariantLLM, name: str) -> None:
    Settings.llm, Settings.embed_model = llm, WordEmbedding()
    warned, fix, followed = CASES[name]
    messages = said(lambda: warned(llm))
    assert messages
    assert all(fix in each for each in messages)
    assert [said(lambda ask=ask: ask(llm)) for ask in followed] == [[]] * len(followed)


def test_a_chat_engine_that_makes_its_own_synthesizer_is_to_be_exchanged(
    model: InvariantModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_index.core.global_tokenizer", model.tokenizer.encode)
    nodes = nodes_of()
    for each in nodes:
        each.node.text *= 40  # together more than the context window
    llm = InvariantLLM(model.with_method(overflow="drop_last"), max_tokens=4)
    messages = said(lambda: ContextChatEngine.from_defaults(ListRetriever(nodes), llm=llm).chat(QUERY))
    assert messages
    assert all(
        each.endswith("Use InvariantChatEngine, which passes all nodes whole, in one call.") for each in messages
    )
    assert said(lambda: InvariantChatEngine.from_defaults(ListRetriever(nodes), llm=llm).chat(QUERY)) == []


@pytest.mark.parametrize("kind", [CompactAndRefine, TreeSummarize])
@pytest.mark.parametrize("way", ["get_response", "aget_response"])
async def test_a_stream_that_is_read_after_its_span_knows_its_nodes(llm: InvariantLLM, kind: Any, way: str) -> None:
    texts = [each.text for each in ListRetriever(nodes_of()).retrieve(QUERY)]

    async def text_of(given: list[str]) -> str:
        synthesizer = kind(llm=llm, streaming=True)
        if way == "get_response":
            return "".join(synthesizer.get_response(QUERY, given))
        return "".join([piece async for piece in await synthesizer.aget_response(QUERY, given)])

    with warnings.catch_warnings():
        warnings.simplefilter("error", OrderWarning)
        assert await text_of(texts) == await text_of(texts[::-1])
    with pytest.warns(OrderWarning, match=r"InvariantSynthesizer\(llm\)"):
        "".join(Refine(llm=llm, streaming=True).get_response(QUERY, texts))
