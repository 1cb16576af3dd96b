"""What the tests share: documents, every order of them, and a retriever that returns them in a given one."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever

from langchain_invariant_rag import SegmentsPlaceholder
from langchain_invariant_rag.documents import to_segment

DOCUMENTS = [
    Document("The ferry to Ostra leaves at noon.", metadata={"source": "ferry.txt"}),
    Document("Ostra has two bakeries.", metadata={"source": "town.txt", "start_index": 40}),
    Document("The lighthouse was built by Teso Carno.", metadata={"source": "town.txt", "start_index": 0}),
]
ORDERS = [list(order) for order in permutations(DOCUMENTS)]
QUESTION = "When does the ferry leave?"
PLACEHOLDER = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
HASHES = sorted(to_segment(document).content_hash for document in DOCUMENTS)


class Listed(BaseRetriever):
    """Returns its documents in the order in which they are listed."""

    documents: list[Any]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return list(self.documents)
