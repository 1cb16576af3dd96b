"""Models of `invariant-rag serve`: the answers of a model in memory, without torch in the application."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.errors import InvalidTool, RemoteError, UnsupportedCombination
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.serving import server_of
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from pydantic import BaseModel, Field, ValidationError

from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.parameters import InvariantContextOverflowError

from .tool_models import joined

QUESTION = "What colour is the flag of Ostra?"
FLAGS = [
    Document("The flag of Ostra is white.", metadata={"source": "flags.txt"}),
    Document("The flag of Brenn is green."),
    Document("The mill of Ostra grinds barley."),
]
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
def remote(base_url: str) -> ChatInvariant:
    return ChatInvariant(base_url=base_url, max_tokens=16)


def report(message: Any) -> dict[str, Any]:
    named = ("finish_reason", "sets", "order", "dropped", "trimmed", "method", "invariant")
    return {name: message.response_metadata[name] for name in named}


def test_a_remote_chat_answers_as_one_in_memory(remote: ChatInvariant, embedded: InvariantModel) -> None:
    local = ChatInvariant(model=embedded, max_tokens=16)
    for order in ORDERS:
        asked = [HumanMessage(QUESTION)]
        here, there = (chat.invoke(asked, documents=order) for chat in (local, remote))
        assert here.content == there.content == "white"
        assert report(here) == report(there)
        assert here.usage_metadata["total_tokens"] == there.usage_metadata["total_tokens"]


def test_a_method_that_is_chosen_is_that_of_the_server(base_url: str) -> None:
    for method in ("set-based", "rotor"):
        chat = ChatInvariant(base_url=base_url, max_tokens=2, method=method)
        assert chat.invoke(QUESTION, documents=FLAGS).response_metadata["method"] == method


def test_streams_calls_and_batches_are_the_same_answer(remote: ChatInvariant) -> None:
    bound = remote.bind(documents=FLAGS, logprobs=True)
    whole, streamed = bound.invoke(QUESTION), joined(bound.stream(QUESTION))
    assert streamed.content == whole.content
    assert report(streamed) == report(whole)
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert streamed.response_metadata["logprobs"] == whole.response_metadata["logprobs"]
    assert asyncio.run(bound.ainvoke(QUESTION)).content == whole.content
    assert [each.content for each in bound.batch([QUESTION] * 2)] == [whole.content] * 2


def test_answers_cite_the_documents(base_url: str, embedded: InvariantModel) -> None:
    far = ChatInvariant(base_url=base_url, citations=True, max_tokens=16)
    local = ChatInvariant(model=embedded, citations=True, max_tokens=16)
    (here,), (there,) = (chat.invoke(QUESTION, documents=FLAGS).content_blocks for chat in (local, far))
    assert there == here
    assert there["annotations"][0]["cited_text"] == FLAGS[0].page_content


class Colour(BaseModel):
    """A colour."""

    name: str = Field(pattern="white|green")


def test_tools_and_schemas_are_followed(remote: ChatInvariant) -> None:
    far = remote.model_copy(update={"max_tokens": 96})
    assert far.with_structured_output(Colour).invoke(QUESTION).name in {"white", "green"}
    calling = far.bind_tools([Colour], tool_choice="any")
    (call,) = calling.invoke(QUESTION).tool_calls[:1]
    assert Colour(**call["args"])
    assert joined(calling.stream(QUESTION)).tool_calls[0]["args"] == call["args"]


def test_a_remote_completion_answers_as_one_in_memory(base_url: str, embedded: InvariantModel) -> None:
    local, far = InvariantLLM(model=embedded, max_tokens=8), InvariantLLM(base_url=base_url, max_tokens=8)
    for order in ORDERS[:3]:
        assert far.invoke(QUESTION, documents=order) == local.invoke(QUESTION, documents=order)
        assert "".join(far.stream(QUESTION, documents=order)) == far.invoke(QUESTION, documents=order)


def test_what_a_server_cannot_do_is_refused(base_url: str, remote: ChatInvariant, embedded: InvariantModel) -> None:
    with pytest.raises(InvariantContextOverflowError):
        remote.invoke("word " * 5000)
    with pytest.raises(UnsupportedCombination, match="num_beams"):
        remote.invoke(QUESTION, num_beams=2)
    with pytest.raises(UnsupportedCombination, match="base_url"):
        _ = remote.lm
    with pytest.raises(RemoteError, match="small"):
        ChatInvariant(base_url=base_url, model="large").invoke(QUESTION)
    with pytest.raises(InvalidTool):
        remote.invoke(QUESTION, tool_choice="search", tools=[Colour])
    for wrong in ({"model": embedded}, {"dtype": "float32"}, {"key_value_cache": KeyValueCache()}, {"method": "no"}):
        with pytest.raises((UnsupportedCombination, ValidationError)):
            ChatInvariant(base_url=base_url, **wrong)


@pytest.mark.parametrize("installed", [True, False])
def test_the_application_needs_no_torch(installed: bool, base_url: str) -> None:
    code = (
        f"import sys; sys.modules.update({{}} if {installed} else dict.fromkeys(['torch', 'transformers']))\n"
        "from langchain_invariant_rag import ChatInvariant, InvariantLLM\n"
        f"chat, llm = (kind(base_url={base_url!r}, max_tokens=8) for kind in (ChatInvariant, InvariantLLM))\n"
        f"print(chat.invoke({QUESTION!r}, documents={[each.page_content for each in FLAGS]!r}).content)\n"
        f"llm.invoke({QUESTION!r}, documents=['a', 'b'])\n"
        "assert not (sys.modules.get('torch') or sys.modules.get('transformers'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "white"
