"""From documents to answers with LlamaIndex's own parts, documentation, the package, and a model of a server."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import faiss
import pytest
from cases import QUERY, ListRetriever, WordEmbedding, caught, nodes_of
from invariant_rag import InvariantModel, KeyValueCache, Segment
from invariant_rag.errors import ContextOverflow, RemoteError, UnsupportedCombination
from invariant_rag.prompts import mark
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.serving import server_of
from invariant_rag.testing.ordinary_prompts import ORDINARY
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, CitationBlock, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.llms.mock import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import FunctionTool
from llama_index.vector_stores.faiss import FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient

import llama_index
from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical
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


# --- a model of a server: its answers are those of one in memory, without torch in the application ---

COLOUR = "What colour is the flag of Ostra?"
FLAGS = ["The flag of Ostra is white.", "The flag of Brenn is green.", "The mill of Ostra grinds barley."]
FLAG_ORDERS = [list(order) for order in permutations(FLAGS)]


@pytest.fixture(scope="module")
def embedded() -> InvariantModel:
    return InvariantModel.from_pretrained()


@pytest.fixture(scope="module")
def base_url(embedded: InvariantModel) -> Iterator[str]:
    engine = InProcess(embedded, "small", caches={"": KeyValueCache()})
    server = server_of(create_app(engine), Settings(), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def remote(base_url: str) -> InvariantLLM:
    return InvariantLLM(base_url=base_url, max_tokens=16, citations=True, logprobs=True)


def asked(texts: list[str]) -> list[ChatMessage]:
    return [ChatMessage(role="user", blocks=[*map(SegmentBlock.of, texts), TextBlock(text=f"\n{COLOUR}")])]


def content(response: Any) -> Any:
    """Return what a chat says, without what a cache and the batch change."""
    raw = {name: value for name, value in response.raw.items() if name not in ("usage", "cached_tokens")}
    return response.message.model_dump(), raw, response.raw["usage"]["total_tokens"]


def test_a_remote_model_answers_as_one_in_memory(remote: InvariantLLM, embedded: InvariantModel) -> None:
    async def streamed() -> Any:
        return [each async for each in await remote.astream_chat(asked(FLAGS))][-1]

    local = InvariantLLM(embedded, max_tokens=16, citations=True, logprobs=True)
    for order in FLAG_ORDERS:
        here, there = (llm.chat(asked(order)) for llm in (local, remote))
        assert here.message.content == "white"
        assert content(here) == content(there)
        assert [each[0].token for each in there.logprobs] == [each[0].token for each in here.logprobs]
        assert any(isinstance(block, CitationBlock) for block in there.message.blocks)
    again = [list(remote.stream_chat(asked(FLAGS)))[-1], asyncio.run(remote.achat(asked(FLAGS)))]
    again.append(asyncio.run(streamed()))
    assert all(content(each) == content(there) for each in again)
    prompt = "".join(mark(Segment(text)) for text in FLAGS) + f"\n{COLOUR}"
    here, there = local.complete(prompt), remote.complete(prompt)
    assert there.text == here.text == list(remote.stream_complete(prompt))[-1].text
    assert there.raw["order"] == here.raw["order"]


class Colour(BaseModel):
    """A colour."""

    name: str = Field(pattern="white|green")


class Town(BaseModel):
    """The argument of a search. There are few towns: the embedded model need not end a text of its own."""

    town: Literal["Ostra", "Brenn"]


def test_tools_and_objects_are_decoded_on_the_server(remote: InvariantLLM) -> None:
    found = remote.structured_predict(Colour, PromptTemplate(COLOUR), llm_kwargs={"max_tokens": 96})
    assert found.name in {"white", "green"}
    tool = FunctionTool.from_defaults(lambda town: town, name="search", description="Search.", fn_schema=Town)
    response = remote.chat_with_tools([tool], COLOUR, tool_required=True, max_tokens=96)
    (call,) = remote.get_tool_calls_from_response(response)[:1]
    assert (call.tool_name, set(call.tool_kwargs)) == ("search", {"town"})


def test_what_a_server_cannot_do_is_refused(base_url: str, remote: InvariantLLM, embedded: InvariantModel) -> None:
    assert remote.metadata.context_window == 4096
    chosen = InvariantLLM(base_url=base_url, method="pine", max_tokens=1)
    assert [each.chat(asked(FLAGS), max_tokens=1).raw["method"] for each in (remote, chosen)] == ["rotor", "pine"]
    with pytest.raises(ContextOverflow):
        remote.complete("word " * 5000)
    with pytest.raises(UnsupportedCombination, match="num_beams"):
        remote.complete(COLOUR, num_beams=2)
    with pytest.raises(UnsupportedCombination, match="base_url"):
        _ = remote.lm
    with pytest.raises(RemoteError, match="small"):
        InvariantLLM("large", base_url=base_url).complete(COLOUR)
    for wrong in ({"model": embedded}, {"dtype": "float32"}, {"key_value_cache": KeyValueCache()}):
        with pytest.raises(UnsupportedCombination, match="base_url"):
            InvariantLLM(base_url=base_url, **wrong)


def test_the_application_needs_no_torch_and_its_first_call_is_as_good_as_the_second(base_url: str) -> None:
    code = (
        "import sys\n"
        "from cases import QUERY, engine_of, nodes_of\n"
        "from cases import Recorder\n"
        "from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical\n"
        "from llama_index.core.base.llms.types import ChatMessage, TextBlock\n"
        "llm = canonical(Recorder(), strict=True)\n"
        "print([engine_of(nodes_of(), llm=llm).query(QUERY).metadata['invariant_rag']['sets'] for _ in range(2)])\n"
        f"blocks = [*map(SegmentBlock.of, {FLAGS!r}), TextBlock(text={COLOUR!r})]\n"
        f"print(InvariantLLM(base_url={base_url!r}).chat([ChatMessage(role='user', blocks=blocks)]).message.content)\n"
        "assert not (sys.modules.get('torch') or sys.modules.get('transformers'))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout.splitlines() == ["[[3], [3]]", "white"], done.stderr
