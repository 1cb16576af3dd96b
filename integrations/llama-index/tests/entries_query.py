"""Entries: query engines over one index, with LlamaIndex's response modes and with the package's synthesizer."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import QUERY
from entry import Entry, Nodes, engine_of, index_of
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

GLOBAL = "nothing but `Settings.llm = InvariantLLM(...)`"
ONE_CALL = "`response_synthesizer=InvariantSynthesizer(llm)`: one call reads all nodes"


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
    """Return the LLM with tokens enough for a small object."""
    return llm.model_copy(update={"max_tokens": 60})


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
    ResponseMode.SIMPLE_SUMMARIZE: False,  # it prints a Python list, in which line ends are escaped
    ResponseMode.REFINE: False,
    ResponseMode.ACCUMULATE: False,
}
NO_CALL_WITH_NODES = {ResponseMode.GENERATION, ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY}
"""Modes that show no node to an LLM; the last two ask none at all."""


def mode_entry(mode: ResponseMode, with_marker: bool) -> Entry:
    options = {"response_mode": mode} | (marked() if with_marker else {})
    name = f'`as_query_engine(response_mode="{mode.value}")`' + ", `SegmentMarkerPostprocessor`" * with_marker
    todo = (GLOBAL if not with_marker else "nothing more") if WHOLE[mode] else ONE_CALL
    return Entry(name, todo, "invariant" if WHOLE[mode] else "warns", lambda _, nodes: query(nodes, **options))


def synthesized(llm: LLM, nodes: Nodes, **options: Any) -> dict[str, Any]:
    return {"response_synthesizer": InvariantSynthesizer(llm, **options)}


ENTRIES = [
    Entry("`index.as_query_engine()`", GLOBAL, "invariant", lambda _, nodes: query(nodes), sizes=(3, 4)),
    Entry("`as_query_engine().aquery`", GLOBAL, "invariant", lambda _, nodes: aquery(nodes)),
    Entry("`as_query_engine(streaming=True)`", GLOBAL, "invariant", lambda _, nodes: streamed(nodes)),
    Entry("`as_query_engine(streaming=True).aquery`", GLOBAL, "invariant", lambda _, nodes: astreamed(nodes)),
    Entry("`as_query_engine(use_async=True)`", GLOBAL, "invariant", lambda _, nodes: query(nodes, use_async=True)),
    Entry("`as_query_engine(multimodal=True)`", GLOBAL, "invariant", lambda _, nodes: query(nodes, multimodal=True)),
    Entry(
        "`RetrieverQueryEngine(retriever)`", GLOBAL, "invariant", lambda _, nodes: str(engine_of(nodes).query(QUERY))
    ),
    *(mode_entry(mode, with_marker) for with_marker in (False, True) for mode in WHOLE),
    Entry(
        '`as_query_engine(response_mode="generation")`',
        "nothing: it reads no node",
        "invariant",
        lambda _, nodes: query(nodes, response_mode=ResponseMode.GENERATION),
        ordered=False,
    ),
    Entry(
        '`response_mode="tree_summarize"`, several batches',
        ONE_CALL,
        "warns",
        lambda _, nodes: in_small_batches(bare(nodes), ResponseMode.TREE_SUMMARIZE),
    ),
    Entry(
        '`response_mode="compact"`, several batches',
        ONE_CALL,
        "warns",
        lambda _, nodes: in_small_batches(bare(nodes), ResponseMode.COMPACT),
    ),
    Entry(
        "`as_query_engine(text_qa_template=...)`",
        GLOBAL,
        "invariant",
        lambda _, nodes: query(nodes, text_qa_template=SHORT),
    ),
    Entry(
        "`text_qa_template` with a function that numbers the nodes",
        GLOBAL,
        "invariant",
        lambda _, nodes: query(bare(nodes), text_qa_template=NUMBERING),
    ),
    Entry(
        "`text_qa_template` with a function that numbers marked nodes",
        "nothing more",
        "invariant",
        lambda _, nodes: query(bare(nodes), **marked(text_qa_template=NUMBERING)),
    ),
    Entry(
        "`as_query_engine(refine_template=...)`, all nodes in one call",
        GLOBAL,
        "invariant",
        lambda _, nodes: query(nodes, refine_template=REFINING),
    ),
    Entry(
        '`response_mode="refine", refine_template=...`',
        ONE_CALL,
        "warns",
        lambda _, nodes: query(nodes, refine_template=REFINING, response_mode=ResponseMode.REFINE),
    ),
    Entry(
        "`as_query_engine(response_synthesizer=InvariantSynthesizer(llm))`",
        "nothing more",
        "invariant",
        lambda llm, nodes: query(nodes, **synthesized(llm, nodes)),
        sizes=(3, 4),
    ),
    Entry(
        "`InvariantSynthesizer(llm)`, `aquery`",
        "nothing more",
        "invariant",
        lambda llm, nodes: aquery(nodes, **synthesized(llm, nodes)),
    ),
    Entry(
        "`InvariantSynthesizer(llm, streaming=True)`",
        "nothing more",
        "invariant",
        lambda llm, nodes: streamed(nodes, **synthesized(llm, nodes, streaming=True)),
    ),
    Entry(
        "`InvariantSynthesizer(llm, text_qa_template=...)` that numbers the nodes",
        "nothing more",
        "invariant",
        lambda llm, nodes: query(bare(nodes), **synthesized(llm, nodes, text_qa_template=NUMBERING)),
    ),
    Entry(
        "`InvariantSynthesizer(llm, output_cls=...)`",
        "nothing more",
        "invariant",
        lambda llm, nodes: query(nodes, **synthesized(longer(llm), nodes, output_cls=Found)),
    ),
    Entry(
        "`as_query_engine(output_cls=...)`",
        GLOBAL,
        "invariant",
        lambda llm, nodes: query(nodes, llm=longer(llm), output_cls=Found),
    ),
    Entry(
        "`as_query_engine(llm=llm.as_structured_llm(...))`",
        GLOBAL,
        "invariant",
        lambda llm, nodes: query(nodes, llm=longer(llm).as_structured_llm(Found)),
    ),
    Entry(
        "`get_response_synthesizer().synthesize(query, nodes)`",
        GLOBAL,
        "invariant",
        lambda _, nodes: str(get_response_synthesizer().synthesize(QUERY, nodes)),
    ),
    Entry(
        "`TreeSummarize().get_response(query, texts)`",
        GLOBAL,
        "invariant",
        lambda _, nodes: str(TreeSummarize().get_response(QUERY, contents(nodes))),
    ),
    Entry(
        "`CompactAndRefine().get_response(query, texts)`",
        GLOBAL,
        "invariant",
        lambda _, nodes: str(CompactAndRefine().get_response(QUERY, contents(nodes))),
    ),
    Entry(
        "`Refine().get_response(query, texts)`",
        ONE_CALL,
        "warns",
        lambda _, nodes: str(Refine().get_response(QUERY, contents(nodes))),
    ),
]


def contents(nodes: Nodes) -> list[str]:
    """Return what an LLM reads of each node."""
    return [each.get_content(MetadataMode.LLM) for each in nodes]
