"""Entries: query engines over one index, with LlamaIndex's response modes and with the package's synthesizer."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import QUERY, engine_of, index_of
from entry import GLOBAL, MORE, Ask, Nodes, invariant, warns
from llama_index.core import PromptTemplate
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.response_synthesizers import (
    CompactAndRefine,
    Refine,
    ResponseMode,
    TreeSummarize,
    get_response_synthesizer,
)
from llama_index.core.schema import MetadataMode

from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

ONE_CALL = "`response_synthesizer=InvariantSynthesizer(llm)`: one call reads all nodes"
UNNUMBERED = "leave the numbers away, or use `CitationQueryEngine` with `InvariantSynthesizer`"


class Found(BaseModel):
    """What was found."""

    word: str = Field(pattern="^[a-z]{6}$")


def query(nodes: Nodes, **options: Any) -> str:
    """Ask `index.as_query_engine(...)`."""
    return str(index_of(nodes).as_query_engine(**options).query(QUERY))


def aquery(nodes: Nodes, **options: Any) -> str:
    async def ask() -> str:
        response: Any = await index_of(nodes).as_query_engine(**options).aquery(QUERY)
        if options.get("streaming"):
            return "".join([piece async for piece in response.async_response_gen()])
        return str(response)

    return asyncio.run(ask())


def streamed(nodes: Nodes, **options: Any) -> str:
    response: Any = index_of(nodes).as_query_engine(streaming=True, **options).query(QUERY)
    return "".join(response.response_gen)


def marked(**options: Any) -> dict[str, Any]:
    return {"node_postprocessors": [SegmentMarkerPostprocessor()], **options}


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
REFINING = PromptTemplate("So far: {existing_answer}\nMore: {context_msg}\n{query_str}")
SHORT = PromptTemplate("Read this.\n{context_str}\nNow answer: {query_str}")

WHOLE = [
    ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE, ResponseMode.COMPACT_ACCUMULATE, ResponseMode.SIMPLE_SUMMARIZE,
]  # fmt: skip
"""Modes whose one call holds all nodes."""
ONE_BY_ONE = [ResponseMode.REFINE, ResponseMode.ACCUMULATE]
NO_NODES = [ResponseMode.GENERATION, ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY]
"""Modes that show no node to an LLM; the last two ask none at all."""


def by_mode(modes: list[ResponseMode], **options: Any) -> dict[str, Ask]:
    def ask(mode: ResponseMode) -> Ask:
        return lambda _, nodes: query(nodes, response_mode=mode, **options)

    return {f'`"{mode.value}"`': ask(mode) for mode in modes}


def ours(llm: Any, **options: Any) -> dict[str, Any]:
    return {"response_synthesizer": InvariantSynthesizer(llm, **options)}


def contents(nodes: Nodes) -> list[str]:
    """Return what an LLM reads of each node."""
    return [each.get_content(MetadataMode.LLM) for each in nodes]


ENGINE, MODES = "`index.as_query_engine(...)`", "`index.as_query_engine(response_mode=...)`"
MARKED, BY_HAND = "`SegmentMarkerPostprocessor`, `response_mode=...`", "a response synthesizer by hand"
OURS = "`response_synthesizer=InvariantSynthesizer(llm, ...)`"
NUMBERS = "a `text_qa_template` that numbers the nodes"
ENTRIES = [
    *invariant(ENGINE, GLOBAL, {
        "as it is": lambda _, nodes: query(nodes),
        "`aquery`": lambda _, nodes: aquery(nodes),
        "`streaming=True`": lambda _, nodes: streamed(nodes),
        "`streaming=True`, `aquery`": lambda _, nodes: aquery(nodes, streaming=True),
        "`use_async=True`": lambda _, nodes: query(nodes, use_async=True),
        "`RetrieverQueryEngine`": lambda _, nodes: str(engine_of(nodes).query(QUERY)),
        "`text_qa_template=`": lambda _, nodes: query(nodes, text_qa_template=SHORT),
        "`refine_template=`, all nodes in one call": lambda _, nodes: query(nodes, refine_template=REFINING),
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
        '`"refine"`, `refine_template=`': lambda _, nodes: query(
            nodes, refine_template=REFINING, response_mode=ResponseMode.REFINE
        ),
    }),
    *invariant(MARKED, MORE, by_mode(WHOLE, **marked())),
    *warns(MARKED, ONE_CALL, by_mode(ONE_BY_ONE, **marked())),
    *warns(MARKED, UNNUMBERED, {NUMBERS: lambda _, nodes: query(bare(nodes), **marked(text_qa_template=NUMBERING))}),
    *invariant(OURS, MORE, {
        "as it is": lambda llm, nodes: query(nodes, **ours(llm)),
        "`aquery`": lambda llm, nodes: aquery(nodes, **ours(llm)),
        "`streaming=True`": lambda llm, nodes: streamed(nodes, **ours(llm, streaming=True)),
        "`output_cls=`": lambda llm, nodes: query(nodes, **ours(longer(llm), output_cls=Found)),
    }),
    *warns(OURS, UNNUMBERED, {NUMBERS: lambda llm, nodes: query(bare(nodes), **ours(llm, text_qa_template=NUMBERING))}),
    *invariant(BY_HAND, GLOBAL, {
        "`get_response_synthesizer().synthesize(query, nodes)`": lambda _, nodes: str(
            get_response_synthesizer().synthesize(QUERY, nodes)
        ),
        "`TreeSummarize().get_response(query, texts)`": lambda _, nodes: str(
            TreeSummarize().get_response(QUERY, contents(nodes))
        ),
        "`CompactAndRefine().get_response(query, texts)`": lambda _, nodes: str(
            CompactAndRefine().get_response(QUERY, contents(nodes))
        ),
    }),
    *warns(BY_HAND, ONE_CALL, {
        "`Refine().get_response(query, texts)`": lambda _, nodes: str(Refine().get_response(QUERY, contents(nodes))),
    }),
]  # fmt: skip
