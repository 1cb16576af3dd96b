"""A model of `invariant-rag serve`: the answers of one in memory, without torch in the application."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import pytest
from invariant_rag import InvariantModel, KeyValueCache, Segment
from invariant_rag.errors import ContextOverflow, RemoteError, UnsupportedCombination
from invariant_rag.prompts import mark
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.serving import server_of
from llama_index.core.base.llms.types import ChatMessage, CitationBlock, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock

QUESTION = "What colour is the flag of Ostra?"
FLAGS = ["The flag of Ostra is white.", "The flag of Brenn is green.", "The mill of Ostra grinds barley."]
ORDERS = [list(order) for order in permutations(FLAGS)]


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
    return [ChatMessage(role="user", blocks=[*map(SegmentBlock.of, texts), TextBlock(text=f"\n{QUESTION}")])]


def content(response: Any) -> Any:
    """Return what a chat says, without what a cache and the batch change."""
    raw = {name: value for name, value in response.raw.items() if name not in ("usage", "cached_tokens")}
    return response.message.model_dump(), raw, response.raw["usage"]["total_tokens"]


def test_a_remote_model_answers_as_one_in_memory(remote: InvariantLLM, embedded: InvariantModel) -> None:
    async def streamed() -> Any:
        return [each async for each in await remote.astream_chat(asked(FLAGS))][-1]

    local = InvariantLLM(embedded, max_tokens=16, citations=True, logprobs=True)
    for order in ORDERS:
        here, there = (llm.chat(asked(order)) for llm in (local, remote))
        assert here.message.content == "white"
        assert content(here) == content(there)
        assert [each[0].token for each in there.logprobs] == [each[0].token for each in here.logprobs]
        assert any(isinstance(block, CitationBlock) for block in there.message.blocks)
    again = [list(remote.stream_chat(asked(FLAGS)))[-1], asyncio.run(remote.achat(asked(FLAGS)))]
    again.append(asyncio.run(streamed()))
    assert all(content(each) == content(there) for each in again)
    prompt = "".join(mark(Segment(text)) for text in FLAGS) + f"\n{QUESTION}"
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
    found = remote.structured_predict(Colour, PromptTemplate(QUESTION), llm_kwargs={"max_tokens": 96})
    assert found.name in {"white", "green"}
    tool = FunctionTool.from_defaults(lambda town: town, name="search", description="Search.", fn_schema=Town)
    response = remote.chat_with_tools([tool], QUESTION, tool_required=True, max_tokens=96)
    (call,) = remote.get_tool_calls_from_response(response)[:1]
    assert (call.tool_name, set(call.tool_kwargs)) == ("search", {"town"})


def test_what_a_server_cannot_do_is_refused(base_url: str, remote: InvariantLLM, embedded: InvariantModel) -> None:
    assert remote.metadata.context_window == 4096
    chosen = InvariantLLM(base_url=base_url, method="pine", max_tokens=1)
    assert [each.chat(asked(FLAGS), max_tokens=1).raw["method"] for each in (remote, chosen)] == ["rotor", "pine"]
    with pytest.raises(ContextOverflow):
        remote.complete("word " * 5000)
    with pytest.raises(UnsupportedCombination, match="num_beams"):
        remote.complete(QUESTION, num_beams=2)
    with pytest.raises(UnsupportedCombination, match="base_url"):
        _ = remote.lm
    with pytest.raises(RemoteError, match="small"):
        InvariantLLM("large", base_url=base_url).complete(QUESTION)
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
        f"blocks = [*map(SegmentBlock.of, {FLAGS!r}), TextBlock(text={QUESTION!r})]\n"
        f"print(InvariantLLM(base_url={base_url!r}).chat([ChatMessage(role='user', blocks=blocks)]).message.content)\n"
        "assert not (sys.modules.get('torch') or sys.modules.get('transformers'))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout.splitlines() == ["[[3], [3]]", "white"], done.stderr
