"""What an entry is: one way in which retrieved documents get to the model, with what it promises and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever

QUESTION = "When does the ferry leave?"

FACTS = (
    Document("The ferry to Ostra leaves at noon.", metadata={"source": "ferry.txt", "id": "f-17", "page": 12}),
    Document("Ostra has two bakeries.", metadata={"source": "town.txt", "id": "t-4", "page": 3}),
    Document("The lighthouse was built by Teso Carno.", metadata={"source": "coast.txt", "id": "c-9", "page": 7}),
)
FOUR = (*FACTS, Document("Salt is sold in Brenn.", metadata={"source": "trade.txt", "id": "s-2", "page": 1}))
QUOTED = (
    Document('The pilot said "noon",\nand left.', metadata={"source": "ferry.txt"}),
    Document("It's two bakeries:\n- Alma's\n- Timo's", metadata={"source": "town.txt"}),
    Document('Carno\'s "light" has a \\ on its door.', metadata={"source": "coast.txt"}),
)
NESTED = (
    Document("The ferry leaves at noon."),
    Document("The ferry leaves at noon. It carries salt."),
    Document("It carries salt."),
)

ALL = ("chat", "completion", "canonical", "vote")
"""The models of this package: `ChatInvariant`, `InvariantLLM`, and the two wrappers around another model."""

CHAT_PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context."), ("human", "Context:\n{context}\n\nQuestion: {question}")]
)

NOTHING = "nothing: the model finds what was retrieved in the same run"
BOUNDARIES = "nothing: the segments keep their boundaries"
PASS_SEGMENTS = "pass the documents as segments: `SegmentsPlaceholder`, `as_segments(retriever)` or `documents=`"
ONE_RUN = "retrieve in the run that asks, or pass the documents as segments"
ONE_CALL = "ask once about all documents: chain type `stuff`"
WHOLE_TEXTS = "format documents whole and alike, or pass them as segments"

Answer = Callable[[Any, BaseRetriever], str]


class Listed(BaseRetriever):
    """Returns its documents in the order in which they are listed."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [document.model_copy(deep=True) for document in self.documents]


@dataclass(frozen=True)
class Entry:
    """One way in which retrieved documents get to the model.

    Attributes:
        way: What the user writes; a row of the table.
        variant: What differs from the other entries of that row.
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
    warns: bool
    drops: bool
    models: Sequence[str]
    documents: Sequence[Document]

    @property
    def name(self) -> str:
        """The way and the variant."""
        return f"{self.way}: {self.variant}" if self.variant else self.way


ENTRIES: list[Entry] = []
"""Every entry, as registered by `entry`."""


def entry(
    way: str,
    variant: str = "",
    *,
    todo: str,
    warns: bool = False,
    drops: bool = False,
    models: Sequence[str] = ("chat",),
    documents: Sequence[Document] = FACTS,
) -> Callable[[Answer], Answer]:
    """Register a function as the answer of an entry; the arguments are the attributes of `Entry`."""

    def register(answer: Answer) -> Answer:
        ENTRIES.append(Entry(way, variant, todo, answer, warns, drops, models, documents))
        return answer

    return register


def text_of(output: Any) -> str:
    """Return the text of what a model, a chain, or a stream of either returned."""
    if isinstance(output, str):
        return output
    if isinstance(output, list):
        return "".join(map(text_of, output))
    return str(output.text)


def joined(documents: Iterable[Document]) -> str:
    """Return the texts of documents as the tutorials of LangChain join them."""
    return "\n\n".join(document.page_content for document in documents)


def table(entries: Sequence[Entry]) -> str:
    """Return the entries as a Markdown table: those of one way with the same promise share a row."""
    lines = ["| entry | invariant | what to do |", "|---|---|---|"]
    for (way, todo, warns), row in groupby(entries, lambda each: (each.way, each.todo, each.warns)):
        marked = [(each.variant, "°" if each.models == ALL else "") for each in row]
        name = f"{way}: {'; '.join(map(''.join, marked))}" if marked[0][0] else way + marked[0][1]
        cells = [name, "no: warns" if warns else "yes", todo]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def fill(readme: str) -> str:
    """Return the README with the table of all entries between its marks."""
    place = re.compile(r"(<!-- entries: .*? -->\n).*?(<!-- end of entries -->)", re.DOTALL)
    return place.sub(lambda match: f"{match[1]}\n{table(ENTRIES)}\n\n{match[2]}", readme)
