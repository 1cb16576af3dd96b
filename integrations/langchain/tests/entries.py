"""What an entry is: one way in which retrieved documents get to the model, with what it promises and what to do."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser

from .shared import DOCUMENTS, QUESTION, TEMPLATE, joined, rag

ALL = ("chat", "completion", "canonical", "vote")
"""The models of this package: `ChatInvariant`, `InvariantLLM`, and the two wrappers around another model."""
CHATS = ("chat", "canonical", "vote")

NOTHING = "nothing: the model finds what was retrieved in the same run"
BOUNDARIES = "nothing: the segments keep their boundaries"
PASS_SEGMENTS = "pass the documents as segments: `SegmentsPlaceholder`, `as_segments(retriever)` or `documents=`"


@dataclass(frozen=True)
class Entry:
    """One way in which retrieved documents get to the model: what the user writes, and what differs in this variant.

    Attributes:
        todo: What the user has to do.
        answer: Builds the chain of a model and a retriever, asks, and returns a text, or what holds one.
        warns: Every order gives an `OrderWarning`, because answers differ. Otherwise they are equal, without a warning.
        drops: The framework keeps the documents from the model, so answers are equal though nobody read them.
        models: The models that are tested; see `ALL`.
        documents: What the retriever returns, in every order.
    """

    way: str
    variant: str
    todo: str
    answer: Callable[[Any, Any], Any]
    warns: bool = False
    drops: bool = False
    models: Sequence[str] = ALL
    documents: Sequence[Document] = tuple(DOCUMENTS)

    @property
    def name(self):
        return f"{self.way}: {self.variant}" if self.variant else self.way


ENTRIES = []
"""All of them, in the order of the table."""


def add(way, todo, variants, **options):
    """Add the entries of one way, by variant, which share the attributes of `Entry`."""
    ENTRIES.extend(Entry(way, variant, todo, answer, **options) for variant, answer in variants.items())


def text_of(output):
    """Return the text of what a model, a chain, an agent, or a stream of one returned."""
    if isinstance(output, str):
        return output
    if isinstance(output, list):
        return "".join(map(text_of, output))
    if isinstance(output, dict):
        return text_of(output.get("answer") or output.get("result") or output["messages"][-1])
    return str(output.text)


def each_as(template, separator="\n\n"):
    """Format every document with a template of its number, its letter, its text and its metadata."""
    return lambda documents: separator.join(
        template.format(n=n, letter=chr(64 + n), text=each.page_content, **each.metadata)
        for n, each in enumerate(documents, 1)
    )


def lcel(format_docs=joined, prompt=TEMPLATE, over=None):
    """Ask the chain of the tutorials. `over` makes another retriever of the model and the retriever."""
    return lambda model, retriever: rag(
        model | StrOutputParser(), over(model, retriever) if over else retriever, format_docs, prompt
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
