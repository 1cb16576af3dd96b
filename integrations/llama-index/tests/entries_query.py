"""Entries: query engines over one index, with LlamaIndex's response modes and with the package's synthesizer."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import QUERY
from entry import MORE, Entry, Nodes, engine_of, index_of, invariant, under, warns
from llama_index.core import PromptTemplate
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.llms import LLM
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
        return str(await index_of(nodes).as_query_engine(**options).aquery(QUERY))

    return asyncio.run(ask())


def astreamed(nodes: Nodes, **options: Any) -> str:
    async def ask() -> str:
        response: Any = await index_of(nodes).as_query_engine(streaming=True, **options).aquery(QUERY)
        return "".join([piece async for piece in response.async_response_gen()])

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
    return str(engine_of(nodes, response_synthesizer=synthesizer).query(QUERY))


NUMBERING = PromptTemplate(
    "Sources:\n{context_str}\nQuestion: {query_str}\nAnswer with [n]:", function_mappings={"context_str": numbered}
)
REFINING = PromptTemplate("So far: {existing_answer}\nMore: {context_msg}\n{query_str}")
SHORT = PromptTemplate("Read this.\n{context_str}\nNow answer: {query_str}")

WHOLE = {  # modes whose one call holds all nodes
    ResponseMode.COMPACT: True,
    ResponseMode.TREE_SUMMARIZE: True,
    ResponseMode.COMPACT_ACCUMULATE: True,
    ResponseMode.SIMPLE_SUMMARIZE: True,  # it prints a Python list, which is parsed
    ResponseMode.REFINE: False,
    ResponseMode.ACCUMULATE: False,
}
NO_NODES = {ResponseMode.GENERATION, ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY}
"""Modes that show no node to an LLM; the last two ask none at all."""


def mode_entry(mode: ResponseMode, **options: Any) -> Entry:
    def ask(_: LLM, nodes: Nodes) -> str:
        return query(nodes, response_mode=mode, **options)

    name = f'`"{mode.value}"`'
    if not WHOLE[mode]:
        return warns(name, ask, ONE_CALL)
    return invariant(name, ask, MORE) if options else invariant(name, ask)


def with_synthesizer(llm: LLM, **options: Any) -> dict[str, Any]:
    return {"response_synthesizer": InvariantSynthesizer(llm, **options)}


def contents(nodes: Nodes) -> list[str]:
    """Return what an LLM reads of each node."""
    return [each.get_content(MetadataMode.LLM) for each in nodes]


ENTRIES = [
    *under(
        "`index.as_query_engine(...)`",
        invariant("as it is", lambda _, nodes: query(nodes), sizes=(3, 4)),
        invariant("`aquery`", lambda _, nodes: aquery(nodes)),
        invariant("`streaming=True`", lambda _, nodes: streamed(nodes)),
        invariant("`streaming=True`, `aquery`", lambda _, nodes: astreamed(nodes)),
        invariant("`use_async=True`", lambda _, nodes: query(nodes, use_async=True)),
        warns("`multimodal=True`", lambda _, nodes: query(nodes, multimodal=True), ONE_CALL),
        invariant("`RetrieverQueryEngine`", lambda _, nodes: str(engine_of(nodes).query(QUERY))),
        invariant("`text_qa_template=`", lambda _, nodes: query(nodes, text_qa_template=SHORT)),
        warns(
            "a `text_qa_template` that numbers the nodes",
            lambda _, nodes: query(bare(nodes), text_qa_template=NUMBERING),
            UNNUMBERED,
        ),
        invariant("`refine_template=`, all nodes in one call", lambda _, nodes: query(nodes, refine_template=REFINING)),
        invariant("`output_cls=`", lambda llm, nodes: query(nodes, llm=longer(llm), output_cls=Found)),
        invariant("`as_structured_llm`", lambda llm, nodes: query(nodes, llm=longer(llm).as_structured_llm(Found))),
        invariant(
            '`"generation"`, which reads no node',
            lambda _, nodes: query(nodes, response_mode=ResponseMode.GENERATION),
            ordered=False,
        ),
    ),
    *under(
        "`index.as_query_engine(response_mode=...)`",
        *map(mode_entry, WHOLE),
        warns(
            '`"tree_summarize"`, several batches',
            lambda _, nodes: in_small_batches(bare(nodes), ResponseMode.TREE_SUMMARIZE),
            ONE_CALL,
        ),
        warns(
            '`"compact"`, several batches',
            lambda _, nodes: in_small_batches(bare(nodes), ResponseMode.COMPACT),
            ONE_CALL,
        ),
        warns(
            '`"refine"`, `refine_template=`',
            lambda _, nodes: query(nodes, refine_template=REFINING, response_mode=ResponseMode.REFINE),
            ONE_CALL,
        ),
    ),
    *under(
        "`SegmentMarkerPostprocessor`, `response_mode=...`",
        *(mode_entry(mode, **marked()) for mode in WHOLE),
        warns(
            "a `text_qa_template` that numbers the nodes",
            lambda _, nodes: query(bare(nodes), **marked(text_qa_template=NUMBERING)),
            UNNUMBERED,
        ),
    ),
    *under(
        "`response_synthesizer=InvariantSynthesizer(llm, ...)`",
        invariant("as it is", lambda llm, nodes: query(nodes, **with_synthesizer(llm)), MORE, sizes=(3, 4)),
        invariant("`aquery`", lambda llm, nodes: aquery(nodes, **with_synthesizer(llm)), MORE),
        invariant(
            "`streaming=True`", lambda llm, nodes: streamed(nodes, **with_synthesizer(llm, streaming=True)), MORE
        ),
        warns(
            "a `text_qa_template` that numbers the nodes",
            lambda llm, nodes: query(bare(nodes), **with_synthesizer(llm, text_qa_template=NUMBERING)),
            UNNUMBERED,
        ),
        invariant(
            "`output_cls=`",
            lambda llm, nodes: query(nodes, **with_synthesizer(longer(llm), output_cls=Found)),
            MORE,
        ),
    ),
    *under(
        "a response synthesizer by hand",
        invariant(
            "`get_response_synthesizer().synthesize(query, nodes)`",
            lambda _, nodes: str(get_response_synthesizer().synthesize(QUERY, nodes)),
        ),
        invariant(
            "`TreeSummarize().get_response(query, texts)`",
            lambda _, nodes: str(TreeSummarize().get_response(QUERY, contents(nodes))),
        ),
        invariant(
            "`CompactAndRefine().get_response(query, texts)`",
            lambda _, nodes: str(CompactAndRefine().get_response(QUERY, contents(nodes))),
        ),
        warns(
            "`Refine().get_response(query, texts)`",
            lambda _, nodes: str(Refine().get_response(QUERY, contents(nodes))),
            ONE_CALL,
        ),
    ),
]
