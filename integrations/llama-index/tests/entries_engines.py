"""Entries: query engines around query engines, retrievers around retrievers, and postprocessors."""

from __future__ import annotations

import json
from typing import Any

import torch
from cases import QUERY, ListRetriever
from entries_query import GLOBAL, longer, marked, query
from entry import NAMES, TEXTS, Entry, Nodes, SayingLLM, engine_of, index_of
from llama_index.core import DocumentSummaryIndex, SimpleKeywordTableIndex, StorageContext, SummaryIndex
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.postprocessor import (
    LLMRerank,
    LongContextReorder,
    MetadataReplacementPostProcessor,
    PrevNextNodePostprocessor,
    SimilarityPostprocessor,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    FLAREInstructQueryEngine,
    MultiStepQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.flare.answer_inserter import DirectLookaheadAnswerInserter
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.retrievers import AutoMergingRetriever, QueryFusionRetriever, RecursiveRetriever
from llama_index.core.schema import Document, IndexNode, NodeRelationship, NodeWithScore, TextNode
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool
from transformers import LogitsProcessor, LogitsProcessorList

from llama_index.llms.invariant_rag import InvariantLLM
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

# --- a random model that writes what has to be parsed, and chooses only the number in it ---


class _Form(LogitsProcessor):
    """Lets a model write a text with one digit of its choice, once."""

    def __init__(self, tokenizer: Any, form: str, largest: int) -> None:
        digits = [tokenizer.encode(str(i))[-1] for i in range(1, largest + 1)]
        self._allowed = [digits if letter == "?" else [tokenizer.encode(letter)[-1]] for letter in form]
        self._start: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        self._start = input_ids.shape[1] if self._start is None else self._start
        allowed = self._allowed[input_ids.shape[1] - self._start]
        kept = torch.full_like(scores, float("-inf"))
        kept[:, allowed] = scores[:, allowed]
        return kept


def filling(llm: InvariantLLM, form: str, largest: int) -> InvariantLLM:
    """Return the LLM for one call, in which it writes this text and chooses the digit for `?`."""
    processor = LogitsProcessorList([_Form(llm.lm.tokenizer, form, largest)])
    return InvariantLLM(llm.lm, max_tokens=len(form), generation_kwargs={"logits_processor": processor})


def cited(llm: InvariantLLM, nodes: Nodes, **options: Any) -> str:
    """Return the text of the source that an answer with one citation leads to."""
    citing = filling(llm, "See [?]", len(nodes))
    if options.pop("synthesizer", False):
        options["response_synthesizer"] = InvariantSynthesizer(citing)
    response = CitationQueryEngine.from_args(index_of(nodes), llm=citing, **options).query(QUERY)
    number = int(str(response).split("[")[1][0])
    return response.source_nodes[number - 1].node.text.partition(":\n")[2]


def reranked(llm: InvariantLLM, nodes: Nodes, **options: Any) -> str:
    """Return the node that the LLM chooses by its number."""
    chooser = LLMRerank(llm=filling(llm, "Doc: ?, Relevance: 9", len(nodes)), top_n=1)
    return engine_of(nodes, llm=llm, node_postprocessors=[chooser], **options).query(QUERY).source_nodes[0].text


def citation(llm: Any, nodes: Nodes, **options: Any) -> str:
    return str(CitationQueryEngine.from_args(index_of(nodes), llm=llm, **options).query(QUERY))


# --- engines around engines ---


def tool(nodes: Nodes, name: str = "harbour", **options: Any) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(engine_of(nodes, **options), name=name, description=f"Knows the {name}.")


def choice(*numbers: int) -> SayingLLM:
    return SayingLLM(says=json.dumps([{"choice": number, "reason": "It fits."} for number in numbers]))


def routed(nodes: Nodes) -> str:
    selector = LLMSingleSelector.from_defaults(choice(1))
    return str(RouterQueryEngine.from_defaults([tool(nodes)], selector=selector).query(QUERY))


def routed_to_two(nodes: Nodes) -> str:
    selector = LLMMultiSelector.from_defaults(choice(1, 2))
    tools = [tool(nodes), tool(nodes, "town")]
    return str(RouterQueryEngine.from_defaults(tools, selector=selector, select_multi=True).query(QUERY))


def sub_questions(nodes: Nodes, **options: Any) -> str:
    asked = [{"sub_question": "When?", "tool_name": "harbour"}, {"sub_question": "Where?", "tool_name": "harbour"}]
    generator = LLMQuestionGenerator.from_defaults(SayingLLM(says=json.dumps(asked)))
    engine = SubQuestionQueryEngine.from_defaults([tool(nodes)], question_gen=generator, verbose=False, **options)
    return str(engine.query(QUERY))


def steps(llm: Any, nodes: Nodes) -> str:
    transform = StepDecomposeQueryTransform(llm=llm)
    return str(MultiStepQueryEngine(engine_of(nodes), transform, index_summary="Boats.", num_steps=2).query(QUERY))


def retried(llm: Any, nodes: Nodes) -> str:
    evaluator = RelevancyEvaluator(llm=llm)
    return str(RetryQueryEngine(engine_of(nodes), evaluator, max_retries=1).query(QUERY))


def looked_ahead(nodes: Nodes) -> str:
    planner = SayingLLM(says=f"The ferry leaves at [Search({QUERY})].")
    inserter = DirectLookaheadAnswerInserter()
    engine = FLAREInstructQueryEngine(
        engine_of(nodes), llm=planner, lookahead_answer_inserter=inserter, max_iterations=1
    )
    return str(engine.query(QUERY))


# --- retrievers around retrievers ---


def over(retriever: Any, **options: Any) -> str:
    return str(engine_of([], **options).with_retriever(retriever).query(QUERY))


def fused(nodes: Nodes, **options: Any) -> str:
    retriever = QueryFusionRetriever(
        [ListRetriever(nodes)], llm=SayingLLM(says="When?"), use_async=False, similarity_top_k=9, **options
    )
    return over(retriever)


def merging(nodes: Nodes) -> str:
    """Retrieve leaves, of which two have one parent, which takes their place."""
    leaves = [*nodes, NodeWithScore(node=TextNode(text="It needs an hour.", id_="leaf"), score=0.5)]
    first = next(each.node for each in nodes if each.node.node_id == "node 0")
    children = [first, leaves[-1].node]
    parent = TextNode(text=f"{TEXTS[0]} It needs an hour.", id_="parent")
    parent.relationships[NodeRelationship.CHILD] = [each.as_related_node_info() for each in children]
    for each in children:
        each.relationships[NodeRelationship.PARENT] = parent.as_related_node_info()
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents([parent, *(each.node for each in leaves)])
    return over(AutoMergingRetriever(ListRetriever(leaves), storage))


def recursive(nodes: Nodes) -> str:
    """Retrieve references, each of which leads to its node."""
    references = [
        NodeWithScore(node=IndexNode(text=each.text[:9], index_id=each.node.node_id), score=0.5) for each in nodes
    ]
    known = {each.node.node_id: each.node for each in nodes}
    return over(RecursiveRetriever("root", {"root": ListRetriever(references)}, node_dict=known))


# --- postprocessors ---


def processed(nodes: Nodes, *processors: BaseNodePostprocessor) -> str:
    return query(nodes, node_postprocessors=list(processors))


def windows(nodes: Nodes) -> Nodes:
    """Return sentences, each with its window of sentences, as a `SentenceWindowNodeParser` writes them."""
    for each in nodes:
        each.node.metadata["window"] = f"Before it. {each.text} After it."
        each.node.excluded_llm_metadata_keys = ["window", "file_name"]
    return nodes


def neighbours(nodes: Nodes) -> PrevNextNodePostprocessor:
    """Return a postprocessor that adds what stands behind each node in its file."""
    store = SimpleDocumentStore()
    for each in nodes:
        following = TextNode(text=f"So much of {each.node.metadata['file_name']}.", id_=f"behind {each.node.node_id}")
        each.node.relationships[NodeRelationship.NEXT] = following.as_related_node_info()
        following.relationships[NodeRelationship.PREVIOUS] = each.node.as_related_node_info()
        store.add_documents([each.node, following])
    return PrevNextNodePostprocessor(docstore=store, num_nodes=1, mode="next")


# --- other indices ---


def documents(nodes: Nodes) -> list[Document]:
    return [Document(text=each.text, id_=each.node.node_id, metadata=each.node.metadata) for each in nodes]


def summaries(nodes: Nodes) -> str:
    synthesized = DocumentSummaryIndex.from_documents(documents(nodes), llm=SayingLLM(says="Of boats."))
    return str(synthesized.as_query_engine(retriever_mode="embedding", similarity_top_k=len(nodes)).query(QUERY))


def keywords(nodes: Nodes) -> str:
    index = SimpleKeywordTableIndex.from_documents(documents(nodes))
    return str(index.as_query_engine(retriever_mode="simple").query(" ".join(NAMES)))


MARKER = SegmentMarkerPostprocessor()
ENTRIES = [
    Entry("`CitationQueryEngine.from_args(index)`", GLOBAL, "invariant", citation, sizes=(3, 4)),
    Entry(
        "`CitationQueryEngine`, `InvariantSynthesizer(llm)`",
        "nothing more",
        "invariant",
        lambda llm, nodes: citation(llm, nodes, response_synthesizer=InvariantSynthesizer(llm)),
    ),
    Entry(
        "`CitationQueryEngine`, `SegmentMarkerPostprocessor`",
        "nothing more",
        "invariant",
        lambda llm, nodes: citation(llm, nodes, **marked()),
    ),
    Entry("the source that `[n]` of a `CitationQueryEngine` leads to", GLOBAL, "invariant", cited),
    Entry(
        "the source that `[n]` leads to, with `InvariantSynthesizer(llm)`",
        "nothing more",
        "invariant",
        lambda llm, nodes: cited(llm, nodes, synthesizer=True),
    ),
    Entry("`RouterQueryEngine`", GLOBAL, "invariant", lambda _, nodes: routed(nodes)),
    Entry("`RouterQueryEngine` to two engines", GLOBAL, "invariant", lambda _, nodes: routed_to_two(nodes)),
    Entry("`SubQuestionQueryEngine`", GLOBAL, "invariant", lambda _, nodes: sub_questions(nodes)),
    Entry(
        "`SubQuestionQueryEngine`, `use_async=False`",
        GLOBAL,
        "invariant",
        lambda _, nodes: sub_questions(nodes, use_async=False),
    ),
    Entry(
        "`SubQuestionQueryEngine`, `InvariantSynthesizer(llm)`",
        GLOBAL,
        "invariant",
        lambda llm, nodes: sub_questions(nodes, response_synthesizer=InvariantSynthesizer(llm)),
    ),
    Entry("`MultiStepQueryEngine`", GLOBAL, "invariant", steps),
    Entry(
        "`TransformQueryEngine` (HyDE)",
        GLOBAL,
        "invariant",
        lambda llm, nodes: str(TransformQueryEngine(engine_of(nodes), HyDEQueryTransform(llm)).query(QUERY)),
    ),
    Entry("`RetryQueryEngine`", GLOBAL, "invariant", retried),
    Entry("`FLAREInstructQueryEngine`", GLOBAL, "invariant", lambda _, nodes: looked_ahead(nodes)),
    Entry(
        "`QueryFusionRetriever`",
        GLOBAL,
        "invariant",
        lambda _, nodes: fused(nodes, num_queries=1, mode="reciprocal_rerank"),
    ),
    Entry("`QueryFusionRetriever` with written queries", GLOBAL, "invariant", lambda _, nodes: fused(nodes)),
    Entry("`AutoMergingRetriever`", GLOBAL, "invariant", lambda _, nodes: merging(nodes)),
    Entry("`RecursiveRetriever`", GLOBAL, "invariant", lambda _, nodes: recursive(nodes)),
    Entry(
        "sentence windows: `MetadataReplacementPostProcessor`",
        GLOBAL,
        "invariant",
        lambda _, nodes: processed(windows(nodes), MetadataReplacementPostProcessor(target_metadata_key="window")),
    ),
    Entry(
        "sentence windows, then `SegmentMarkerPostprocessor`",
        "nothing more",
        "invariant",
        lambda _, nodes: processed(
            windows(nodes), MetadataReplacementPostProcessor(target_metadata_key="window"), MARKER
        ),
    ),
    Entry("`LongContextReorder`", GLOBAL, "invariant", lambda _, nodes: processed(nodes, LongContextReorder())),
    Entry(
        "`LongContextReorder`, then `SegmentMarkerPostprocessor`",
        "nothing more",
        "invariant",
        lambda _, nodes: processed(nodes, LongContextReorder(), MARKER),
    ),
    Entry(
        "`SimilarityPostprocessor`",
        GLOBAL,
        "invariant",
        lambda _, nodes: processed(nodes, SimilarityPostprocessor(similarity_cutoff=0.1)),
    ),
    Entry("`PrevNextNodePostprocessor`", GLOBAL, "invariant", lambda _, nodes: processed(nodes, neighbours(nodes))),
    Entry(
        "`PrevNextNodePostprocessor`, then `SegmentMarkerPostprocessor`",
        "nothing more",
        "invariant",
        lambda _, nodes: processed(nodes, neighbours(nodes), MARKER),
    ),
    Entry(
        "`SegmentMarkerPostprocessor`, then `PrevNextNodePostprocessor`",
        "put the marker last; it is invariant all the same",
        "invariant",
        lambda _, nodes: processed(nodes, MARKER, neighbours(nodes)),
    ),
    Entry(
        "`LLMRerank`: the node that the LLM chooses by number",
        "rerank with a cross-encoder, or ask about one node at a time",
        "warns",
        reranked,
    ),
    Entry(
        "`SummaryIndex(nodes).as_query_engine()`",
        GLOBAL,
        "invariant",
        lambda _, nodes: str(SummaryIndex([each.node for each in nodes]).as_query_engine().query(QUERY)),
    ),
    Entry(
        '`SummaryIndex`, `response_mode="tree_summarize"`',
        GLOBAL,
        "invariant",
        lambda _, nodes: str(
            SummaryIndex([each.node for each in nodes]).as_query_engine(response_mode="tree_summarize").query(QUERY)
        ),
    ),
    Entry("`DocumentSummaryIndex`", GLOBAL, "invariant", lambda _, nodes: summaries(nodes)),
    Entry(
        "`SimpleKeywordTableIndex`, which lists nodes by keyword",
        GLOBAL,
        "invariant",
        lambda _, nodes: keywords(nodes),
        ordered=False,
    ),
]
