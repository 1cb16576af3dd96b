"""From documents to answers with LlamaIndex's own parts; the code of READMEs and the tutorial; ordinary prompts."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any

import faiss
import pytest
from cases import QUERY, ListRetriever, WordEmbedding, caught, nodes_of
from invariant_rag import InvariantModel
from invariant_rag.testing.ordinary_prompts import ORDINARY
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.vector_stores.faiss import FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient

import llama_index
from llama_index.llms.invariant_rag import InvariantLLM, canonical
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
NAMESPACES = ("llms", "response_synthesizers", "postprocessor", "evaluation", "chat_engine")
HERE = Path(__file__).parent.parent
REPOSITORY = HERE.parents[1]


class Relisted(BaseNodePostprocessor):
    """Lists the retrieved nodes in another order."""

    order: tuple[int, ...]

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [nodes[i] for i in self.order]


def qdrant() -> QdrantVectorStore:
    return QdrantVectorStore(client=QdrantClient(":memory:"), collection_name="atlas")


STORES = {"faiss": lambda: FaissVectorStore(faiss_index=faiss.IndexFlatIP(64)), "qdrant": qdrant}


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
@pytest.mark.parametrize(("store", "way"), [("faiss", "marker"), ("qdrant", "synthesizer")])
def test_answers_over_a_vector_store_do_not_depend_on_the_order(
    llm: InvariantLLM, plain_llm: InvariantLLM, store: str, way: str
) -> None:
    index = VectorStoreIndex.from_documents(
        [Document(text=text, metadata={"file": name}) for name, text in FILES.items()],
        storage_context=StorageContext.from_defaults(vector_store=STORES[store]()),
        embed_model=WordEmbedding(),
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0)],
    )

    def ask(judge: InvariantLLM, order: tuple[int, ...]) -> Any:
        last: dict[str, Any] = {"response_synthesizer": InvariantSynthesizer(judge)} if way == "synthesizer" else {}
        steps = [Relisted(order=order), *([] if last else [SegmentMarkerPostprocessor()])]
        return index.as_query_engine(llm=judge, similarity_top_k=3, node_postprocessors=steps, **last).query(QUESTION)

    responses = [ask(llm, order) for order in ORDERS]
    assert len({tuple(each.node_id for each in response.source_nodes) for response in responses}) == len(ORDERS)
    assert len({each.response for each in responses}) == 1
    assert len({ask(plain_llm, order).response for order in ORDERS[::5]}) > 1
    assert any(each.text == FILES["ferry.txt"] for each in responses[0].source_nodes)


# --- documentation ---

README = (HERE / "README.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of workflows
@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
def test_the_examples_of_the_readme_print_what_they_say(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = re.findall(r"^print\(.*\)  # (.*)", example, flags=re.MULTILINE)
    exec(compile(example, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    assert capsys.readouterr().out.strip() == said


def test_the_tutorial_and_the_readme_of_the_project_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / "docs" / "tutorials" / "llamaindex.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "tutorial"}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(code, "llamaindex.md", "exec", dont_inherit=True), namespace)
        said = re.findall(r"^ *print\(.*\)  # (.*)", code, flags=re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == said
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "llama_index" in each)
    exec(code.replace('model="Qwen/Qwen2.5-7B-Instruct", ', ""), {"__name__": "readme"})
    assert capsys.readouterr().out.endswith(" True\n")


# --- ordinary prompts, and the package ---


def test_prompts_without_retrieved_nodes_raise_no_warning(model: InvariantModel) -> None:
    ListRetriever(nodes_of()).retrieve(QUERY)  # somebody has just retrieved something else
    local = InvariantLLM(model.with_method(overflow="trim_segments"), max_tokens=1)

    def ask() -> None:
        for place, turns in enumerate(ORDINARY):
            for llm in (canonical(MockLLM()), *([local] if place % 7 == 0 else [])):
                llm.chat([ChatMessage(each["content"], role=each["role"]) for each in turns])
                llm.complete("\n\n".join(each["content"] for each in turns))

    assert len(ORDINARY) >= 200
    assert caught(ask)[1] == []


def test_each_package_is_where_llama_index_users_look_and_no_namespace_is_taken() -> None:
    for namespace in NAMESPACES:
        spec = find_spec(f"llama_index.{namespace}.invariant_rag")
        assert spec is not None
        assert Path(str(spec.origin)) == HERE / "llama_index" / namespace / "invariant_rag" / "__init__.py"
        assert (HERE / "llama_index" / namespace / "invariant_rag" / "py.typed").exists()
    assert llama_index.__spec__.origin is None
    assert not list(HERE.glob("llama_index/__init__.py")) + list(HERE.glob("llama_index/*/__init__.py"))
    assert (HERE / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()
    source = "".join(each.read_text() for each in HERE.glob("llama_index/**/*.py"))
    assert not re.search(r"_getframe|f_locals|gi_frame|cr_frame", source), "no frame of anybody's code is looked into"


def test_importing_brings_no_other_framework_and_no_optional_package() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['langchain', 'langchain_core', 'xgrammar', 'faiss', 'qdrant_client']))\n"
        + "".join(f"import llama_index.{each}.invariant_rag\n" for each in NAMESPACES)
        + "from llama_index.llms.invariant_rag import InvariantLLM\n"
        "from llama_index.core.prompts import PromptTemplate\n"
        "from invariant_rag.errors import ExtraRequired\n"
        "from pydantic import create_model\n"
        "llm = InvariantLLM(max_tokens=1)\n"
        "print(len(llm.complete('Hello').raw))\n"
        "try:\n"
        "    llm.structured_predict(create_model('A', a=int), PromptTemplate('x'))\n"
        "except ExtraRequired as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    missing = 'xgrammar is not installed; run `pip install "invariant-rag[structured]"`'
    assert done.stdout.splitlines() == ["9", missing]
