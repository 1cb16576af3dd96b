"""What an entry is: one way in which retrieved documents get to the model, with what it promises and what to do."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_invariant_rag import SegmentsPlaceholder

QUESTION = "When does the ferry leave?"
FACTS = (
    Document("The ferry to Ostra leaves at noon.", metadata={"source": "ferry.txt", "id": "f-17", "page": 12}),
    Document("Ostra has two bakeries.", metadata={"source": "town.txt", "id": "t-4", "page": 3}),
    Document("The lighthouse was built by Teso Carno.", metadata={"source": "coast.txt", "id": "c-9", "page": 7}),
)

ALL = ("chat", "completion", "canonical", "vote")
"""The models of this package: `ChatInvariant`, `InvariantLLM`, and the two wrappers around another model."""
CHATS = ("chat", "canonical", "vote")

CHAT_PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context."), ("human", "Context:\n{context}\n\nQuestion: {question}")]
)

PLACEHOLDER = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])

NOTHING = "nothing: the model finds what was retrieved in the same run"
BOUNDARIES = "nothing: the segments keep their boundaries"
PASS_SEGMENTS = "pass the documents as segments: `SegmentsPlaceholder`, `as_segments(retriever)` or `documents=`"

Answer = Callable[[Any, Any], Any]
"""Asks a model with a retriever, and returns a text, or what holds one."""


@dataclass(frozen=True)
class Entry:
    """One way in which retrieved documents get to the model: what the user writes, and what differs in this variant.

    Attributes:
        todo: What the user has to do.
        answer: Builds the chain of a model and a retriever, asks, and returns the answer.
        warns: Every order gives an `OrderWarning`, because answers differ. Otherwise they are equal, without a warning.
        drops: The framework keeps the documents from the model, so answers are equal though nobody read them.
        models: The models that are tested; see `ALL`.
        documents: What the retriever returns, in every order.
    """

    way: str
    variant: str
    todo: str
    answer: Answer
    warns: bool = False
    drops: bool = False
    models: Sequence[str] = ALL
    documents: Sequence[Document] = FACTS

    @property
    def name(self):
        return f"{self.way}: {self.variant}" if self.variant else self.way


ENTRIES = []
"""All of them, in the order of the table."""


def add(way: str, todo: str, variants: Mapping[str, Answer], **options: Any) -> None:
    """Add the entries of one way, which share the attributes of `Entry`."""
    ENTRIES.extend(Entry(way, variant, todo, answer, **options) for variant, answer in variants.items())


def entry(way, todo, variant="", **options):
    """Return a decorator that adds the function as an entry."""

    def adding(answer):
        add(way, todo, {variant: answer}, **options)
        return answer

    return adding


def text_of(output):
    """Return the text of what a model, a chain, an agent, or a stream of one returned."""
    if isinstance(output, str):
        return output
    if isinstance(output, list):
        return "".join(map(text_of, output))
    if isinstance(output, dict):
        found = next(output[key] for key in ("answer", "result", "messages") if key in output)
        return text_of(found[-1] if "messages" in output else found)
    return str(output.text)


def joined(documents):
    """Return the texts of documents as the tutorials of LangChain join them."""
    return "\n\n".join(document.page_content for document in documents)


def each_as(template, separator="\n\n", first=1):
    """Format every document with a template of its number `n`, its text and its metadata."""

    def format_docs(documents):
        numbered = enumerate(documents, first)
        return separator.join(template.format(n=n, text=each.page_content, **each.metadata) for n, each in numbered)

    return format_docs


def rag(retriever, model, format_docs=joined, prompt=CHAT_PROMPT):
    """Return the chain of LangChain's tutorials."""
    context = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    return context | prompt | model | StrOutputParser()


def lcel(format_docs=joined, prompt=CHAT_PROMPT, over=None):
    """Ask that chain. `over` makes another retriever of the model and the retriever."""
    return lambda model, retriever: rag(
        over(model, retriever) if over else retriever, model, format_docs, prompt
    ).invoke(QUESTION)


def table(entries):
    """Return the entries as a Markdown table: those of one way with the same promise share a row."""
    lines = ["| entry | invariant | what to do |", "|---|---|---|"]
    for (way, todo, warns), row in groupby(entries, lambda each: (each.way, each.todo, each.warns)):
        marked = [(each.variant, "°" if each.models == ALL else "") for each in row]
        name = f"{way}: {'; '.join(map(''.join, marked))}" if marked[0][0] else way + marked[0][1]
        cells = [name, "no: warns" if warns else "yes", todo]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def fill(readme, entries):
    """Return the README with the table of all entries between its marks."""
    place = re.compile(r"(<!-- entries: .*? -->\n).*?(<!-- end of entries -->)", re.DOTALL)
    return place.sub(lambda match: f"{match[1]}\n{table(entries)}\n\n{match[2]}", readme)
