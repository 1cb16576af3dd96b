"""Entries: prompts that a user writes around nodes, in one span with the retriever, apart from it, and with marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cases import QUERY, ListRetriever
from entries_query import Found, longer, numbered
from entry import MORE, Ask, Entry, Nodes, invariant, warns
from llama_index.core import ChatPromptTemplate, PromptTemplate
from llama_index.core.base.llms.types import CitableBlock, DocumentBlock, TextBlock, ToolCallBlock
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index.llms.invariant_rag import SegmentBlock
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor

dispatcher = get_dispatcher(__name__)

IN_ONE_SPAN = "retrieve and ask in one function under `@dispatcher.span`, or in one workflow"
DECLARED = "mark the nodes (`SegmentMarkerPostprocessor`), or give `SegmentBlock`s"


def content(node: NodeWithScore) -> str:
    """Return the text of a node; the text between marks if it has marks."""
    return node.get_content(MetadataMode.LLM)


def file_of(node: NodeWithScore) -> str:
    return str(node.node.metadata["file_name"])


def each(write: Callable[[int, NodeWithScore], str], between: str = "\n\n") -> Callable[[Nodes], str]:
    """Return a function that writes one node after the other."""
    return lambda nodes: between.join(write(i, node) for i, node in enumerate(nodes, start=1))


FORMATS: dict[str, Callable[[Nodes], str]] = {
    'joined with `"\\n\\n"`': each(lambda _, node: content(node)),
    "as bullets": each(lambda _, node: f"- {content(node)}", "\n"),
    "as a numbered list `1. `": each(lambda i, node: f"{i}. {content(node)}", "\n"),
    "numbered `[1] ...`": each(lambda i, node: f"[{i}] {content(node)}"),
    "as `Document 1:`": each(lambda i, node: f"Document {i}:\n{content(node)}"),
    "as `<doc id=1>...</doc>`": each(lambda i, node: f"<doc id={i}>{content(node)}</doc>", "\n"),
    "as `<document>` with its source": each(
        lambda _, node: f"<document>\n<source>{file_of(node)}</source>\n{content(node)}\n</document>", "\n"
    ),
    "as `Source: {file}\\nContent: ...`": each(lambda _, node: f"Source: {file_of(node)}\nContent: {content(node)}"),
    "separated by `---`": each(lambda _, node: content(node), "\n---\n"),
    "as a JSON list of texts": lambda nodes: json.dumps([content(node) for node in nodes], ensure_ascii=False),
}


def prompt_of(context: str) -> str:
    return f"Answer from these sources.\n\n{context}\n\nQuestion: {QUERY}\nAnswer:"


def retrieve(nodes: Nodes) -> Nodes:
    """Retrieve nodes whose metadata stays out of the text."""
    for node in nodes:
        node.node.excluded_llm_metadata_keys = ["file_name"]
    return ListRetriever(nodes).retrieve(QUERY)


@dispatcher.span
def in_one_span(llm: Any, nodes: Nodes, ask: Ask) -> str:
    """Retrieve and ask, as one function of an application that is traced."""
    return ask(llm, retrieve(nodes))


def completing(write: Callable[[Nodes], str]) -> Ask:
    return lambda llm, nodes: str(llm.complete(prompt_of(write(nodes))).text)


def chatting(write: Callable[[Nodes], str]) -> Ask:
    return lambda llm, nodes: str(llm.chat([ChatMessage(prompt_of(write(nodes)))]).message.content)


def marked(nodes: Nodes) -> Nodes:
    return SegmentMarkerPostprocessor().postprocess_nodes(retrieve(nodes))


def retrieved(topic: str, asks: dict[str, Ask], sets: set[str]) -> list[Entry]:
    """Return what asks with nodes of the same run: in one span."""
    traced = {name: lambda llm, nodes, ask=ask: in_one_span(llm, nodes, ask) for name, ask in asks.items()}
    return [
        *invariant(topic, IN_ONE_SPAN, {name: ask for name, ask in traced.items() if name in sets}),
        *warns(topic, DECLARED, {name: ask for name, ask in traced.items() if name not in sets}),
    ]


def with_marks(topic: str, asks: dict[str, Ask], counted: set[str]) -> list[Entry]:
    """Return what asks with marked nodes."""
    one = {name: lambda llm, nodes, ask=ask: ask(llm, marked(nodes)) for name, ask in asks.items()}
    topic = f"{topic}, marked"
    return [
        *invariant(topic, MORE, {name: ask for name, ask in one.items() if name not in counted}),
        *warns(topic, "leave the numbers away", {name: ask for name, ask in one.items() if name in counted}),
    ]


# --- templates ---

JINJA = RichPromptTemplate(
    "{% for text in texts %}<source nr={{ loop.index }}>{{ text }}</source>\n{% endfor %}\nQuestion: {{ query }}"
)
CHAT_TEMPLATE = ChatPromptTemplate(
    [ChatMessage("Answer from: {context_str}", role="system"), ChatMessage("{query_str}", role="user")]
)
NUMBERED = PromptTemplate("{context_str}\n{query_str}", function_mappings={"context_str": numbered})
PLAIN = PromptTemplate("Context: {context_str}\nQuestion: {query_str}")


def predicting(template: Any) -> Ask:
    def ask(llm: Any, nodes: Nodes) -> str:
        return str(llm.predict(template, context_str=FORMATS['joined with `"\\n\\n"`'](nodes), query_str=QUERY))

    return ask


def looped(llm: Any, nodes: Nodes) -> str:
    return str(llm.predict(JINJA, texts=[content(node) for node in nodes], query=QUERY))


def structured(llm: Any, nodes: Nodes) -> str:
    context = FORMATS["numbered `[1] ...`"](nodes)
    return str(longer(llm).structured_predict(Found, PLAIN, context_str=context, query_str=QUERY))


def structured_chat(llm: Any, nodes: Nodes) -> str:
    asked = longer(llm).as_structured_llm(Found)
    return str(asked.complete(prompt_of(FORMATS["as bullets"](nodes))).text)


def told(write: Callable[[Nodes], str]) -> Ask:
    """Return what asks with the content of a tool's message."""

    def ask(llm: Any, nodes: Nodes) -> str:
        call = ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={})
        result = ChatMessage(write(nodes), role="tool", additional_kwargs={"tool_call_id": "1"})
        return str(llm.chat([ChatMessage(QUERY), ChatMessage(role="assistant", blocks=[call]), result]).message.content)

    return ask


# --- blocks ---


def blocks(make: Callable[[str], Any], between: str = "") -> Ask:
    """Return what asks with one message: a block for each node, and the question."""

    def ask(llm: Any, nodes: Nodes) -> str:
        found: list[Any] = []
        for node in retrieve(nodes):
            found += [make(content(node)), *([TextBlock(text=between)] if between else [])]
        return str(llm.chat([ChatMessage(blocks=[*found, TextBlock(text=QUERY)])]).message.content)

    return ask


def citable(text: str) -> CitableBlock:
    return CitableBlock(title="", source="harbour", content=[TextBlock(text=text)])


def document(text: str) -> DocumentBlock:
    return DocumentBlock(data=text.encode(), document_mimetype="text/plain", title="")


def dumped(llm: Any, nodes: Nodes) -> str:
    return str(llm.complete(prompt_of(json.dumps([node.node.to_dict() for node in nodes]))).text)


BLOCKS = {
    "`SegmentBlock`s": blocks(SegmentBlock.of),
    "`CitableBlock`s": blocks(citable),
    "`DocumentBlock`s of plain text": blocks(document),
    "`SegmentBlock`s with white space between them": blocks(SegmentBlock.of, "\n\n"),
    "`SegmentBlock`s with `---` between them": blocks(SegmentBlock.of, "\n---\n"),
}
PROMPTS = {
    '`llm.chat`, joined with `"\\n\\n"`': chatting(FORMATS['joined with `"\\n\\n"`']),
    "`RichPromptTemplate` with a Jinja loop": looped,
    "`PromptTemplate`": predicting(PLAIN),
    "`PromptTemplate` with a function that numbers": predicting(NUMBERED),
    "`ChatPromptTemplate`": predicting(CHAT_TEMPLATE),
    "`structured_predict`, numbered": structured,
    "`as_structured_llm`, bullets": structured_chat,
}
COMPLETED = {name: completing(write) for name, write in FORMATS.items()}
APART = {
    "`llm.complete`, joined": completing(FORMATS['joined with `"\\n\\n"`']),
    "`llm.complete`, bullets": completing(FORMATS["as bullets"]),
    "`llm.chat`, joined": chatting(FORMATS['joined with `"\\n\\n"`']),
    "`llm.predict`": predicting(PLAIN),
    "`as_structured_llm`, bullets": structured_chat,
}
COUNTED = {"as a numbered list `1. `", "numbered `[1] ...`", "as `Document 1:`", "as `<doc id=1>...</doc>`"}
FILE = {"as `<document>` with its source", "as `Source: {file}\\nContent: ...`"}
TOLD = {name: told(write) for name, write in FORMATS.items()}
ENTRIES = [
    *retrieved("nodes in `llm.complete(...)`", COMPLETED, set()),
    *retrieved("nodes in other calls", PROMPTS, {"`PromptTemplate`", "`ChatPromptTemplate`"}),
    *retrieved("nodes in a tool's message", TOLD, set(FORMATS) - COUNTED - {"as a JSON list of texts"}),
    *with_marks("nodes in `llm.complete(...)`", COMPLETED, COUNTED | FILE),
    *with_marks("nodes in other calls", PROMPTS, {name for name in PROMPTS if "number" in name or "loop" in name}),
    *invariant("`llm.chat`", MORE, BLOCKS),
    *warns("nodes of `retriever.retrieve(...)`, in a call of its own", DECLARED, {
        name: lambda llm, nodes, ask=ask: ask(llm, retrieve(nodes)) for name, ask in APART.items()
    }),
    *retrieved("`json.dumps` of whole nodes", {"in `llm.complete`": dumped}, set()),
]  # fmt: skip
