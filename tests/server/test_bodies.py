"""Bodies that no client means: each is refused with what is wrong, and starts no work."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.cli import app
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods import METHODS
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import MonoT5
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.serving import reserve
from invariant_rag.server.settings import read_keys
from tests.server.conftest import FLAGS, QUESTION, serving

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(embedded: InvariantModel) -> Iterator[httpx.Client]:
    engine = InProcess(embedded, "small", caches={"": KeyValueCache()})
    with (
        serving(engine, Settings(), MonoT5(EMBEDDED["monot5"])) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2, **more}


def refused(http: httpx.Client, path: str, content: Any) -> dict[str, Any]:
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    response = http.post(path, content=text, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404), response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    return error


@pytest.mark.parametrize("name", ["query", "self", "messages", "tools", "nothing"])
def test_a_variable_that_is_none_of_the_template_is_refused_by_name(name: str, http: httpx.Client) -> None:
    error = refused(http, CHAT, chat(chat_template_kwargs={name: "x"}))
    assert name in error["message"]
    assert str(EMBEDDED["generator"]) not in error["message"]


@pytest.mark.parametrize("depth", [150, 700, 5000])
def test_json_that_is_nested_too_deeply_is_refused(depth: int, http: httpx.Client) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    body = json.dumps(chat(chat_template_kwargs={"a": 0}))
    assert "nested" in refused(http, CHAT, body.replace('{"a": 0}', nested))["message"]


@pytest.mark.parametrize("literal", ["NaN", "-Infinity", "9" * 5000])
def test_numbers_that_json_does_not_have_are_refused(literal: str, http: httpx.Client) -> None:
    body = json.dumps(chat(temperature=0)).replace('"temperature": 0', f'"temperature": {literal}')
    assert "expected a body of JSON" in refused(http, CHAT, body)["message"]


def test_what_no_field_can_be_is_named(http: httpx.Client) -> None:
    assert "metadata" in refused(http, CHAT, chat(documents=[{"text": "a", "metadata": {"a": [1]}}]))["message"]
    assert "documents" in refused(http, "/tokenize", {"prompt": "a", "documents": ["b"]})["message"]
    assert "order" in refused(http, "/v1/judge", {"answers": ["a", "b"], "invariant": {"check_order": 2}})["message"]
    assert "monot5" in refused(http, "/v2/rerank", {"model": "large", "query": "q", "documents": ["a"]})["message"]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_that_is_listed_answers(method: str, http: httpx.Client) -> None:
    assert method in http.get("/v1/models").json()["data"][0]["invariant"]["methods"]
    replies = [
        http.post(CHAT, json=chat(documents=each, invariant={"method": method})).json() for each in (FLAGS, FLAGS[::-1])
    ]
    assert replies[0]["choices"][0]["message"]["content"] == replies[1]["choices"][0]["message"]["content"]


def test_scores_of_a_retriever_order_documents(http: httpx.Client) -> None:
    documents = [{"id": str(score), "text": text, "score": score} for score, text in enumerate(FLAGS)]
    for sign in (1, -1):
        wanted = [{**each, "score": sign * each["score"]} for each in (documents[2:] + documents[:2])]
        reply = http.post(CHAT, json=chat(documents=wanted, invariant={"ordering": "score"})).json()
        assert reply["invariant"]["order"] == ["0", "1", "2", "3"][::sign]


def test_an_address_that_is_taken_is_refused_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidChoice, match=f"cannot listen at 127.0.0.1:{port}"):
            reserve("127.0.0.1", port)
        done = CliRunner().invoke(app, ["serve", "no-such-model", "--port", str(port)])
    assert done.exit_code == 2
    assert "cannot listen" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--timeout", "nan"],
        ["--timeout", "inf"],
        ["--timeout", "0"],
        ["--max-body-mb", "nan"],
        ["--max-body-mb", "inf"],
    ],
)
def test_limits_that_are_no_numbers_are_refused(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["serve", "no-such-model", "--port", "0", *options])
    assert done.exit_code == 2
    assert options[0].strip("-").replace("-", "_") in done.stderr.replace("-", "_")


def test_a_file_of_keys_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidChoice, match="keys"):
        read_keys(tmp_path / "keys")
