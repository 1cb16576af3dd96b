"""From documents to answers, with LlamaIndex's own readers, splitters, indexes and vector stores."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import faiss
import pytest
from cases import WordEmbedding
from invariant_rag import InvariantModel, SegmentSet
from llama_index.core import Document, Settings, SimpleDirectoryReader, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.vector_stores.faiss import FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient

from llama_index.llms.invariant_rag import InvariantLLM
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

QUESTION = "When does the ferry to Ostra leave the harbour?"
FILES = {
    "ferry.txt": "The ferry to Ostra leaves the harbour at noon. In winter the ferry to Ostra does not sail.",
    "mill.txt": "The mill of Brenn grinds barley. It was built by Ada Kolm near the harbour.",
    "bridge.txt": "A copper bridge crosses the river Senn. When the river is high, the bridge is closed.",
    "salt.txt": "Salt from Brenn is traded for copper in the northern hills.",
}
ORDERS = list(permutations(range(3)))


class Relisted(BaseNodePostprocessor):
    """Lists the retrieved nodes in another order."""

    order: tuple[int, ...]

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [nodes[i] for i in self.order]


@pytest.fixture
def embedding() -> WordEmbedding:
    return WordEmbedding()


def faiss_context() -> StorageContext:
    return StorageContext.from_defaults(vector_store=FaissVectorStore(faiss_index=faiss.IndexFlatIP(64)))


def qdrant_context() -> StorageContext:
    store = QdrantVectorStore(client=QdrantClient(":memory:"), collection_name="atlas")
    return StorageContext.from_defaults(vector_store=store)


STORES = {"in memory": StorageContext.from_defaults, "faiss": faiss_context, "qdrant": qdrant_context}


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("way", ["synthesizer", "marker"])
def test_answers_over_a_vector_store_do_not_depend_on_the_order(
    llm: InvariantLLM, plain_llm: InvariantLLM, embedding: WordEmbedding, store: str, way: str
) -> None:
    index = VectorStoreIndex.from_documents(
        [Document(text=text, metadata={"file": name}) for name, text in FILES.items()],
        storage_context=STORES[store](),
        embed_model=embedding,
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0)],
    )

    def ask(judge: InvariantLLM, order: tuple[int, ...]) -> Any:
        last: dict[str, Any] = {"response_synthesizer": InvariantSynthesizer(judge)}
        steps: list[BaseNodePostprocessor] = [Relisted(order=order)]
        if way == "marker":
            last, steps = {}, [*steps, SegmentMarkerPostprocessor()]
        engine = index.as_query_engine(llm=judge, similarity_top_k=3, node_postprocessors=steps, **last)
        return engine.query(QUESTION)

    responses = [ask(llm, order) for order in ORDERS]
    assert len({tuple(each.node_id for each in response.source_nodes) for response in responses}) == len(ORDERS)
    assert len({each.response for each in responses}) == 1
    assert len({ask(plain_llm, order).response for order in ORDERS}) > 1
    assert any(each.text == FILES["ferry.txt"] for each in responses[0].source_nodes)


@pytest.fixture
def data(tmp_path: Path) -> str:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path)


def test_the_starter_tutorial_runs_with_two_lines_changed(model: InvariantModel, data: str) -> None:
    Settings.embed_model = WordEmbedding()
    Settings.llm = InvariantLLM(model, max_tokens=8)  # changed

    documents = SimpleDirectoryReader(data).load_data()
    index = VectorStoreIndex.from_documents(documents)
    query_engine = index.as_query_engine(response_synthesizer=InvariantSynthesizer())  # changed
    response = query_engine.query(QUESTION)

    segments = SegmentSet(each.node.get_content(MetadataMode.LLM) for each in response.source_nodes)
    assert len(segments) == 2
    assert str(response) == InvariantSynthesizer().get_response(QUESTION, [each.text for each in segments])
    orders = [Relisted(order=order) for order in ((0, 1), (1, 0))]
    engines = [
        index.as_query_engine(response_synthesizer=InvariantSynthesizer(), node_postprocessors=[o]) for o in orders
    ]
    assert {str(engine.query(QUESTION)) for engine in engines} == {str(response)}


async def test_the_tutorial_streams_and_chats_too(model: InvariantModel, data: str) -> None:
    Settings.embed_model = WordEmbedding()
    Settings.llm = InvariantLLM(model, max_tokens=8)
    index = VectorStoreIndex.from_documents(SimpleDirectoryReader(data).load_data())

    whole = str(index.as_query_engine(response_synthesizer=InvariantSynthesizer()).query(QUESTION))
    stream = index.as_query_engine(response_synthesizer=InvariantSynthesizer(streaming=True), streaming=True)
    assert "".join(stream.query(QUESTION).response_gen) == whole

    def chat(order: tuple[int, ...]) -> str:
        steps = [Relisted(order=order), SegmentMarkerPostprocessor()]
        return str(index.as_chat_engine(chat_mode="context", node_postprocessors=steps).chat(QUESTION))

    assert chat((0, 1)) == chat((1, 0))


def test_the_embedded_model_answers_alike_in_every_order(data: str) -> None:
    index = VectorStoreIndex.from_documents(SimpleDirectoryReader(data).load_data(), embed_model=WordEmbedding())
    synthesizer = InvariantSynthesizer(InvariantLLM(max_tokens=8))
    nodes = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    answers = {str(synthesizer.synthesize(QUESTION, [nodes[i] for i in order])) for order in ORDERS}
    assert len(answers) == 1
