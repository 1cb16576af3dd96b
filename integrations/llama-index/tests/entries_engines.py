"""Entries: query engines over one index, what stands around them, and evaluators."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from cases import QUERY, ListRetriever, engine_of, index_of
from entry import GLOBAL, MORE, Ask, HashingLLM, Nodes, invariant, node_id, warns
from llama_index.core import PromptTemplate, SummaryIndex
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.evaluation import (
    ContextRelevancyEvaluator,
    FaithfulnessEvaluator,
    PairwiseComparisonEvaluator,
    RelevancyEvaluator,
)
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.postprocessor import (
    LLMRerank,
    LongContextReorder,
    MetadataReplacementPostProcessor,
)
from llama_index.core.query_engine import (
    CitationQueryEngine,
    MultiStepQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import CompactAndRefine, Refine, ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import MetadataMode, NodeRelationship, RelatedNodeInfo
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.tools import QueryEngineTool

from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor, SourceJoiner
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

ONE_CALL = "`response_synthesizer=InvariantSynthesizer(llm)`: one call reads all nodes"
UNNUMBERED = "leave the numbers away, or use `CitationQueryEngine` with `InvariantSynthesizer`"
MARKER = SegmentMarkerPostprocessor()


class Found(BaseModel):
    """What was found."""

    word: str = Field(pattern="^[a-z]{6}$")


def query(nodes: Nodes, **options: Any) -> str:
    """Ask `index.as_query_engine(...)`, and read the stream if there is one."""
    response: Any = index_of(nodes).as_query_engine(**options).query(QUERY)
    return "".join(response.response_gen) if options.get("streaming") else str(response)


def aquery(nodes: Nodes, **options: Any) -> str:
    async def ask() -> str:
        response: Any = await index_of(nodes).as_query_engine(**options).aquery(QUERY)
        if options.get("streaming"):
            return "".join([piece async for piece in response.async_response_gen()])
        return str(response)

    return asyncio.run(ask())


def longer(llm: Any) -> Any:
    """Return the LLM with tokens enough for a small object, which its grammar alone constrains."""
    return llm.model_copy(update={"max_tokens": 60, "generation_kwargs": {}})


def numbered(**variables: Any) -> str:
    """Number the paragraphs of a context: a function of a template."""
    return "\n\n".join(f"[{i}] {text}" for i, text in enumerate(variables["context_str"].split("\n\n"), start=1))


def bare(nodes: Nodes) -> Nodes:
    """Return nodes whose metadata the LLM does not read, so that each is one paragraph."""
    for each in nodes:
        each.node.excluded_llm_metadata_keys = ["file_name"]
    return nodes


def in_small_batches(nodes: Nodes, mode: ResponseMode) -> str:
    """Ask where two nodes at most fit into one call."""
    synthesizer = get_response_synthesizer(response_mode=mode)
    synthesizer._prompt_helper.chunk_size_limit = 36
    return str(engine_of(bare(nodes), response_synthesizer=synthesizer).query(QUERY))


NUMBERING = PromptTemplate(
    "Sources:\n{context_str}\nQuestion: {query_str}\nAnswer with [n]:", function_mappings={"context_str": numbered}
)
SHORT = PromptTemplate("Read this.\n{context_str}\nNow answer: {query_str}")
WHOLE = [
    ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE, ResponseMode.COMPACT_ACCUMULATE, ResponseMode.SIMPLE_SUMMARIZE,
]  # fmt: skip
"""Modes whose one call holds all nodes."""
ONE_BY_ONE = [ResponseMode.REFINE, ResponseMode.ACCUMULATE]
NO_NODES = [ResponseMode.GENERATION, ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY]
"""Modes that show no node to an LLM; the last two ask none at all."""


def by_mode(modes: list[ResponseMode], **options: Any) -> dict[str, Ask]:
    return {
        f'`"{mode.value}"`': lambda _, nodes, mode=mode: query(nodes, response_mode=mode, **options) for mode in modes
    }


def ours(llm: Any, **options: Any) -> dict[str, Any]:
    return {"response_synthesizer": InvariantSynthesizer(llm, **options)}


def contents(nodes: Nodes) -> list[str]:
    """Return what an LLM reads of each node."""
    return [each.get_content(MetadataMode.LLM) for each in nodes]


# --- citations and rerankers ---


def citation(llm: Any, nodes: Nodes, **options: Any) -> str:
    return str(CitationQueryEngine.from_args(index_of(nodes), llm=llm, **options).query(QUERY))


def reranked(llm: Any, nodes: Nodes) -> str:
    """Return the node that the LLM chooses by its number."""
    choose = lambda text, count: ([1 + sum(map(ord, text)) % count], [9.0])  # noqa: E731
    chooser = LLMRerank(llm=llm, top_n=1, parse_choice_select_answer_fn=choose)
    return engine_of(nodes, llm=llm, node_postprocessors=[chooser]).query(QUERY).source_nodes[0].text


# --- engines around others ---


def tool(nodes: Nodes, name: str = "harbour") -> QueryEngineTool:
    return QueryEngineTool.from_defaults(engine_of(nodes), name=name, description=f"Knows the {name}.")


def routed(nodes: Nodes) -> str:
    choice = [{"choice": number, "reason": "It fits."} for number in (1, 2)]
    selector = LLMMultiSelector.from_defaults(HashingLLM(says=json.dumps(choice)))
    tools = [tool(nodes, name) for name in ("harbour", "town")]
    return str(RouterQueryEngine.from_defaults(tools, selector=selector, select_multi=True).query(QUERY))


def sub_questions(nodes: Nodes, **options: Any) -> str:
    asked = [{"sub_question": word, "tool_name": "harbour"} for word in ("When?", "Where?")]
    generator = LLMQuestionGenerator.from_defaults(HashingLLM(says=json.dumps(asked)))
    engine = SubQuestionQueryEngine.from_defaults([tool(nodes)], question_gen=generator, verbose=False, **options)
    return str(engine.query(QUERY))


def steps(llm: Any, nodes: Nodes) -> str:
    transform = StepDecomposeQueryTransform(llm=llm)
    return str(MultiStepQueryEngine(engine_of(nodes), transform, index_summary="Boats.", num_steps=2).query(QUERY))


# --- retrievers and postprocessors ---


def over(retriever: Any) -> str:
    return str(engine_of([]).with_retriever(retriever).query(QUERY))


def fused(nodes: Nodes) -> str:
    writing: dict[str, Any] = {"llm": HashingLLM(says="When?"), "use_async": False, "similarity_top_k": 9}
    return over(QueryFusionRetriever([ListRetriever(nodes)], **writing))


def processed(nodes: Nodes, *processors: Any) -> str:
    return query(nodes, node_postprocessors=list(processors))


def windows(nodes: Nodes) -> Nodes:
    """Return sentences, each with its window of sentences, as a `SentenceWindowNodeParser` writes them."""
    for each in nodes:
        each.node.metadata["window"] = f"Before it. {each.text} After it."
        each.node.excluded_llm_metadata_keys = ["window", "file_name"]
    return nodes


def chunks(nodes: Nodes) -> Nodes:
    """Return nodes of which two are chunks of one document that overlap."""
    for each in nodes:
        place = {node_id(0): 0, node_id(1): len(each.text) - 10}.get(each.node.node_id)
        if place is not None:
            each.node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="atlas")
            each.node.start_char_idx = place
    return nodes


# --- evaluators ---


def judged(kind: Any) -> Ask:
    """Evaluate a fixed answer, with the nodes as its contexts."""

    def ask(llm: Any, nodes: Nodes) -> str:
        contexts = [each.text for each in nodes]
        return str(kind(llm=llm).evaluate(query=QUERY, response="At noon.", contexts=contexts).feedback)

    return ask


ANSWERS = {node_id(0): "At noon, says the harbour master.", node_id(1): "It does not leave in winter."}


def better(evaluator: Any, nodes: Nodes) -> tuple[str, str]:
    """Compare two answers that nobody retrieved, in the order of two nodes; return the better, and what was said."""
    one, other = (ANSWERS[each.node.node_id] for each in nodes if each.node.node_id in ANSWERS)
    result = evaluator.evaluate(query=QUERY, response=one, second_response=other)
    return {1.0: one, 0.0: other}.get(result.score, "a tie"), str(result.feedback)


def comparing(llm: Any, **options: Any) -> PairwiseComparisonEvaluator:
    """Return LlamaIndex's evaluator; the first letter that a random model writes is its verdict."""
    parsed = lambda text: (text < "m", float(text < "m"), text)  # noqa: E731
    return PairwiseComparisonEvaluator(llm, parser_function=parsed, **options)


WINDOW = MetadataReplacementPostProcessor(target_metadata_key="window")
MARKED = {"node_postprocessors": [MARKER]}
ENGINE, MODES = "`index.as_query_engine(...)`", "`index.as_query_engine(response_mode=...)`"
WITH_MARKS, BY_HAND = "`SegmentMarkerPostprocessor`, `response_mode=...`", "a response synthesizer by hand"
OURS = "`response_synthesizer=InvariantSynthesizer(llm, ...)`"
CITATIONS = "`CitationQueryEngine` with the parts of this package"
WITH_OURS = "`CitationQueryEngine.from_args(..., response_synthesizer=InvariantSynthesizer(llm))`"
NUMBERS = "a `text_qa_template` that numbers the nodes"
ENTRIES = [
    *invariant(ENGINE, GLOBAL, {
        "as it is": lambda _, nodes: query(nodes),
        "`aquery`": lambda _, nodes: aquery(nodes),
        "`streaming=True`": lambda _, nodes: query(nodes, streaming=True),
        "`streaming=True`, `aquery`": lambda _, nodes: aquery(nodes, streaming=True),
        "`text_qa_template=`": lambda _, nodes: query(nodes, text_qa_template=SHORT),
        "`output_cls=`": lambda llm, nodes: query(nodes, llm=longer(llm), output_cls=Found),
        "`as_structured_llm`": lambda llm, nodes: query(nodes, llm=longer(llm).as_structured_llm(Found)),
        '`"generation"`, which reads no node': lambda _, nodes: query(nodes, response_mode=ResponseMode.GENERATION),
    }),
    *warns(ENGINE, ONE_CALL, {"`multimodal=True`": lambda _, nodes: query(nodes, multimodal=True)}),
    *warns(ENGINE, UNNUMBERED, {NUMBERS: lambda _, nodes: query(bare(nodes), text_qa_template=NUMBERING)}),
    *invariant(MODES, GLOBAL, by_mode(WHOLE)),
    *warns(MODES, ONE_CALL, {
        **by_mode(ONE_BY_ONE),
        '`"tree_summarize"`, several batches': lambda _, nodes: in_small_batches(nodes, ResponseMode.TREE_SUMMARIZE),
        '`"compact"`, several batches': lambda _, nodes: in_small_batches(nodes, ResponseMode.COMPACT),
    }),
    *invariant(WITH_MARKS, MORE, by_mode(WHOLE, **MARKED)),
    *warns(WITH_MARKS, ONE_CALL, by_mode(ONE_BY_ONE, **MARKED)),
    *warns(WITH_MARKS, UNNUMBERED, {
        NUMBERS: lambda _, nodes: query(bare(nodes), text_qa_template=NUMBERING, **MARKED),
    }),
    *invariant(OURS, MORE, {
        "as it is": lambda llm, nodes: query(nodes, **ours(llm)),
        "`aquery`": lambda llm, nodes: aquery(nodes, **ours(llm)),
        "`streaming=True`": lambda llm, nodes: query(nodes, streaming=True, **ours(llm, streaming=True)),
        "`output_cls=`": lambda llm, nodes: query(nodes, **ours(longer(llm), output_cls=Found)),
    }),
    *warns(OURS, UNNUMBERED, {NUMBERS: lambda llm, nodes: query(bare(nodes), **ours(llm, text_qa_template=NUMBERING))}),
    *invariant(BY_HAND, GLOBAL, {
        "`get_response_synthesizer().synthesize(query, nodes)`": lambda _, nodes: str(
            get_response_synthesizer().synthesize(QUERY, nodes)
        ),
        "`CompactAndRefine().get_response(query, texts)`": lambda _, nodes: str(
            CompactAndRefine().get_response(QUERY, contents(nodes))
        ),
    }),
    *warns(BY_HAND, ONE_CALL, {
        "`Refine().get_response(query, texts)`": lambda _, nodes: str(Refine().get_response(QUERY, contents(nodes))),
    }),
    *warns("`CitationQueryEngine`", WITH_OURS, {"as it is": citation}),
    *invariant(CITATIONS, MORE, {
        "`InvariantSynthesizer`": lambda llm, nodes: citation(llm, nodes, **ours(llm)),
    }),
    *warns(CITATIONS, WITH_OURS, {"`SegmentMarkerPostprocessor`": lambda llm, nodes: citation(llm, nodes, **MARKED)}),
    *warns("`LLMRerank`", "choose by a model that scores each node by itself, or let the answer read all", {
        "the node that the LLM chooses by its number": reranked,
    }),
    *invariant("query engines around others", GLOBAL, {
        "`RouterQueryEngine` to two engines": lambda _, nodes: routed(nodes),
        "`SubQuestionQueryEngine`": lambda _, nodes: sub_questions(nodes),
        "`SubQuestionQueryEngine`, `use_async=False`": lambda _, nodes: sub_questions(nodes, use_async=False),
        "`TransformQueryEngine` with HyDE": lambda llm, nodes: str(
            TransformQueryEngine(engine_of(nodes), HyDEQueryTransform(llm)).query(QUERY)
        ),
        "`MultiStepQueryEngine`": steps,
    }),
    *invariant("retrievers and other indices", GLOBAL, {
        "`QueryFusionRetriever` with written queries": lambda _, nodes: fused(nodes),
        "`SummaryIndex`": lambda _, nodes: str(
            SummaryIndex([each.node for each in nodes]).as_query_engine().query(QUERY)
        ),
    }),
    *invariant("postprocessors", GLOBAL, {
        "sentence windows by `MetadataReplacementPostProcessor`": lambda _, nodes: processed(windows(nodes), WINDOW),
        "`LongContextReorder`": lambda _, nodes: processed(nodes, LongContextReorder()),
        "`SourceJoiner` of this package": lambda _, nodes: processed(chunks(nodes), SourceJoiner()),
    }),
    *invariant("postprocessors with `SegmentMarkerPostprocessor`", MORE, {
        "behind sentence windows": lambda _, nodes: processed(windows(nodes), WINDOW, MARKER),
        "behind `SourceJoiner`": lambda _, nodes: processed(chunks(nodes), SourceJoiner(), MARKER),
    }),
    *invariant("evaluators", GLOBAL, {
        **{
            f"`{kind.__name__}` with nodes as `contexts`": judged(kind)
            for kind in (FaithfulnessEvaluator, RelevancyEvaluator, ContextRelevancyEvaluator)
        },
    }),
    *invariant("two answers", MORE, {
        "`InvariantPairwiseEvaluator`": lambda llm, nodes: better(InvariantPairwiseEvaluator(llm), nodes)[0],
        "`PairwiseComparisonEvaluator`, which asks in both orders": lambda llm, nodes: better(comparing(llm), nodes)[0],
    }),
    *warns("two answers", "`InvariantPairwiseEvaluator(llm)`, or `enforce_consensus=True`", {
        "`PairwiseComparisonEvaluator(enforce_consensus=False)`": lambda llm, nodes: str(
            better(comparing(llm, enforce_consensus=False), nodes)
        ),
    }),
]  # fmt: skip
