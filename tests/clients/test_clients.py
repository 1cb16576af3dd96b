"""Clients that other people wrote, against a real server: every order of the documents gives the same answer.

`make test-clients` runs these tests where neither torch nor invariant-rag is, and the server in a process of its own.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from itertools import permutations
from pathlib import Path
from typing import Literal

import cohere
import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import create_model

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "server.md"
QUESTION = "What colour is the flag of Ostra?"
FLAGS = ["The flag of Ostra is white.", "The flag of Brenn is green.", "The mill of Ostra grinds barley."]
MESSAGES = [{"role": "user", "content": QUESTION}]
ORDERS = [list(order) for order in permutations(FLAGS)]
TOWN = {"type": "object", "properties": {"town": {"enum": ["Ostra", "Brenn"]}}, "required": ["town"]}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Search the atlas.", "parameters": TOWN}}
Colour = create_model("Colour", colour=Literal["white", "green"])
Colours = create_model("Colours", colours=str)  # which may take any number of tokens


@pytest.fixture(scope="module")
def server():
    """Serve the embedded model to whoever has a key, and give the address. Clients need no torch."""
    assert importlib.util.find_spec("torch") is None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [os.environ.get("INVARIANT_RAG", "invariant-rag"), "serve", "--port", port, "--served-name", "small"]
    environment = {**os.environ, "INVARIANT_RAG_API_KEY": "key-1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            transport = httpx.HTTPTransport(retries=9)  # after 0, 0.5, 1, 2... seconds
            with httpx.Client(timeout=60, transport=transport) as patient:
                patient.get(f"http://127.0.0.1:{port}/ready").raise_for_status()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def test_openai_gets_one_answer_for_every_order_parses_objects_and_raises_its_own_errors(server):
    def asked(documents):
        return {"model": "small", "messages": MESSAGES, "extra_body": {"documents": documents}}

    client = openai.OpenAI(base_url=f"{server}/v1", api_key="key-1", max_retries=0)
    create, parse = client.chat.completions.create, client.chat.completions.parse
    assert {create(**asked(order)).choices[0].message.content for order in ORDERS} == {"white"}
    chunks = create(**asked(FLAGS), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "white"
    assert [model.id for model in client.models.list()] == ["small"]
    reply = parse(**asked(FLAGS), response_format=Colour, max_tokens=40)
    assert isinstance(reply.choices[0].message.parsed, Colour)
    with pytest.raises(openai.LengthFinishReasonError):
        parse(model="small", messages=MESSAGES, response_format=Colours, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="colour: unknown field"):
        create(model="small", messages=MESSAGES, extra_body={"colour": 1})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="key-2").chat.completions.create(**asked(FLAGS))


def test_langchain_gets_one_answer_for_every_order_calls_tools_and_parses_objects(server):
    chat = ChatOpenAI(base_url=f"{server}/v1", api_key="key-1", model="small", max_retries=0)
    answers = {chat.invoke(QUESTION, extra_body={"documents": order}).content for order in ORDERS}
    assert answers == {"white"}
    streamed = [str(piece.content) for piece in chat.stream(QUESTION, extra_body={"documents": FLAGS})]
    assert "".join(streamed) == "white"
    assert chat.bind(extra_body={"documents": FLAGS}).batch([QUESTION])[0].usage_metadata["input_tokens"] > 0
    calling = chat.bind_tools([SEARCH], tool_choice="search")
    calls = [calling.invoke(QUESTION, extra_body={"documents": order}).tool_calls for order in ORDERS[:2]]
    assert calls[0] == calls[1]
    assert calls[0][0]["args"]["town"] in {"Ostra", "Brenn"}
    parsing = chat.bind(extra_body={"documents": FLAGS}, max_tokens=40).with_structured_output(Colour)
    assert isinstance(parsing.invoke(QUESTION), Colour)
    with pytest.raises(openai.LengthFinishReasonError):
        chat.bind(max_tokens=2).with_structured_output(Colours).invoke(QUESTION)


def test_llama_index_gets_one_answer_for_every_order(server):
    asked = [ChatMessage(role="user", content=QUESTION)]
    fixed = {"model": "small", "api_base": f"{server}/v1", "api_key": "key-1", "is_chat_model": True}
    texts = set()
    for order in ORDERS:
        llm = OpenAILike(**fixed, context_window=4096, additional_kwargs={"extra_body": {"documents": order}})
        texts.add(str(llm.chat(asked).message.content))
    assert texts == {"white"}
    assert "".join(each.delta or "" for each in llm.stream_chat(asked)) == "white"
    assert llm.complete(QUESTION).text == "white"


def test_cohere_ranks_alike_in_every_order(server):
    client = cohere.ClientV2(api_key="key-1", base_url=server)
    rankings = set()
    for order in ORDERS:
        reply = client.rerank(model="monot5", query=QUESTION, documents=order, top_n=2)
        rankings.add(tuple((order[each.index], each.relevance_score) for each in reply.results))
    (ranking,) = rankings
    assert ranking[0][0] == FLAGS[0]


def blocks(language):
    found = re.findall(rf"```{language}\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_one_answer(server):
    (command,) = [block for block in blocks("bash") if block.startswith("curl ")]
    words = shlex.split(command.replace("\\\n", " ").replace("http://localhost:8000", server))
    words += ["-s", "-H", "Authorization: Bearer key-1"]
    reply = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert "red and white" in reply["choices"][0]["message"]["content"]
    assert reply["invariant"]["invariant"]


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_code_of_the_tutorial_runs(number, server):
    code = blocks("python")[number].replace("http://localhost:8000", server)
    code = code.replace("Qwen/Qwen2.5-7B-Instruct", "small").replace('"none"', '"key-1"')
    namespace = {}
    exec(code, namespace)
    if "answer" in namespace:
        assert "red and white" in namespace["answer"]
        assert "reply" not in namespace or len(namespace["reply"].invariant["order"]) == 2
    else:
        assert namespace["ranking"][0] == "The flag of Ostra is red and white."
