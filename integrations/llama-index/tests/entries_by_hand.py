"""Entries: prompts that a user writes around nodes, in one span with the retriever, apart from it, and with marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cases import QUERY, ListRetriever
from entries_query import Found, longer, numbered
from entry import MORE, Ask, Entry, Nodes, invariant, under, warns
from llama_index.core import ChatPromptTemplate, PromptTemplate
from llama_index.core.base.llms.types import CitableBlock, DocumentBlock, TextBlock
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index.llms.invariant_rag import SegmentBlock
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor

dispatcher = get_dispatcher(__name__)

IN_ONE_SPAN = "retrieve and ask in one function under `@dispatcher.span`, or in one workflow"
APART = "mark the nodes (`SegmentMarkerPostprocessor`), or give `SegmentBlock`s"


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


def ways(topic: str, asks: dict[str, Ask]) -> list[Entry]:
    """Return what asks with nodes from the same span, with nodes from another one, and with marked nodes."""
    together, apart, with_marks = zip(
        *(
            (
                invariant(name, lambda llm, nodes, ask=ask: in_one_span(llm, nodes, ask), IN_ONE_SPAN),
                warns(name, lambda llm, nodes, ask=ask: ask(llm, retrieve(nodes)), APART),
                invariant(name, lambda llm, nodes, ask=ask: ask(llm, marked(nodes)), MORE),
            )
            for name, ask in asks.items()
        ),
        strict=True,
    )
    return [
        *under(f"{topic}, retrieved in the same span", *together),
        *under(f"{topic}, retrieved elsewhere", *apart),
        *under(f"{topic}, marked", *with_marks),
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


# --- blocks ---


def blocks(make: Callable[[str], Any], between: str = "") -> Ask:
    """Return what asks with one message: a block for each node, and the question."""

    def ask(llm: Any, nodes: Nodes) -> str:
        found: list[Any] = []
        for node in retrieve(nodes):
            found += [make(content(node)), *([TextBlock(text=between)] if between else [])]
        return str(llm.chat([ChatMessage(blocks=[*found, TextBlock(text=QUERY)])]).message.content)

    return ask


def one_message_each(llm: Any, nodes: Nodes) -> str:
    messages = [ChatMessage(blocks=[SegmentBlock.of(content(node))]) for node in retrieve(nodes)]
    return str(llm.chat([*messages, ChatMessage(QUERY)]).message.content)


def numbered_blocks(llm: Any, nodes: Nodes) -> str:
    found: list[Any] = []
    for i, node in enumerate(retrieve(nodes), start=1):
        found += [TextBlock(text=f"Source {i}:"), SegmentBlock.of(content(node))]
    return str(llm.chat([ChatMessage(blocks=[*found, TextBlock(text=QUERY)])]).message.content)


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
    "`SegmentBlock`s, numbered by text blocks": numbered_blocks,
    "one `SegmentBlock` per message": one_message_each,
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
ENTRIES = [
    *ways("nodes in `llm.complete(...)`", {name: completing(write) for name, write in FORMATS.items()}),
    *ways("nodes in other calls", PROMPTS),
    *under("`llm.chat`", *(invariant(name, ask, MORE) for name, ask in BLOCKS.items())),
    *under(
        "`json.dumps` of whole nodes",
        invariant(
            "retrieved in the same span",
            lambda llm, nodes: in_one_span(llm, nodes, dumped),
            IN_ONE_SPAN,
        ),
        warns("retrieved elsewhere", lambda llm, nodes: dumped(llm, retrieve(nodes)), APART),
    ),
]
