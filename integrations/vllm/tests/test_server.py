"""A real vLLM server: `vllm serve` alone answers requests with documents; clear errors, restarts and many clients."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest
from invariant_rag import InvariantModel
from invariant_rag.cli import app
from openai import BadRequestError, OpenAI
from typer.testing import CliRunner

from tests.documents import body_of, documents
from tests.pairs import LENGTH, MOVED, Pair, ask, moved
from tests.servers import Server
from vllm_invariant_rag import UnsupportedServer, VLLMBackend, VLLMError
from vllm_invariant_rag.engines import FACTS_PATH, HTTPEngine

CHAT = "/v1/chat/completions"


# --- `vllm serve` alone ---


def test_an_openai_client_and_curl_ask_vllm_alone_with_documents_in_any_order(
    server: Server, lm: InvariantModel
) -> None:
    expected = lm.generate(ask(lm, documents(4, 360)), max_new_tokens=16)
    client, body = OpenAI(base_url=server.url + "/v1", api_key=server.KEY), body_of(documents(4, 360), temperature=0)
    asked: dict[str, Any] = {"model": "embedded", **body}
    orders = [list(order) for order in permutations(asked.pop("documents"))]
    for order in orders:
        reply = client.chat.completions.create(**asked, extra_body={"documents": order})
        assert reply.choices[0].message.content == expected.text
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
        assert reply.invariant["invariant"] is True  # type: ignore[attr-defined]
    streamed = client.chat.completions.create(**asked, stream=True, extra_body={"documents": orders[-1]})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == expected.text
    headers = ["-H", f"Authorization: Bearer {server.KEY}", "-H", "Content-Type: application/json"]
    written = json.dumps({"model": "embedded", **body})
    command = ["curl", "-s", server.url + CHAT, *headers, "--data-binary", "@-"]
    escaped = written.replace('"documents"', r'"docum\u0065nts"')
    for data in (written.encode(), escaped.encode(), written.encode("utf-16")):
        told = json.loads(subprocess.run(command, capture_output=True, check=True, input=data).stdout)
        assert told["choices"][0]["message"]["content"] == expected.text
    plain = client.chat.completions.create(**asked)
    assert plain.choices[0].message.content != expected.text
    asked_for = {"prompt": "Where is it?", "documents": body["documents"], "max_tokens": 4}
    assert server.post(asked_for, "/v1/completions").json()["invariant"]["sets"] == [4]
    with pytest.raises(BadRequestError, match="method"):
        client.chat.completions.create(**asked, extra_body={**body, "invariant": {"method": "rotar"}})


def test_documents_need_a_key_and_each_key_has_its_own_blocks(server: Server) -> None:
    body, cached = body_of(documents(12, 361)), []
    assert server.post(body, CHAT, key="none").status_code == 401
    assert httpx.get(server.url + FACTS_PATH).status_code == 401
    for key in (server.KEY, server.OTHER_KEY, server.KEY, server.OTHER_KEY):
        reply = server.post(body, CHAT, key=key).json()
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, True, True]


def test_several_sets_in_messages_and_samples_of_them(server: Server) -> None:
    one, two = ([{"text": each.text} for each in documents(3, seed)] for seed in (362, 363))

    def samples(turn: int) -> list[str]:
        content = [
            {"type": "documents", "documents": one[turn:] + one[:turn]},
            {"type": "text", "text": "More:"},
            {"type": "documents", "documents": two[turn:] + two[:turn]},
            {"type": "text", "text": "What is told?"},
        ]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "n": 3, "seed": 7}
        reply = server.post({**body, "temperature": 2.0}, CHAT).json()
        return [choice["message"]["content"] for choice in reply["choices"]]

    assert samples(0) == samples(1)
    assert len(set(samples(0))) > 1


# --- a backend over HTTP ---


def test_the_address_alone_is_enough_for_answers_and_streams(server: Server, lm: InvariantModel) -> None:
    backend, segments = VLLMBackend(url=server.url + "/behind/v1", api_key=server.KEY), documents(4, seed=302)
    assert server.post(body_of(segments), "/behind" + CHAT).json()["invariant"]["sets"] == [4]
    assert (backend.method.name, backend.ordering.name, backend.context_window) == ("rotor", "lexical", 2048)
    prompts = [ask(lm, order) for order in (segments, segments[::-1], segments[2:])]
    answers = Pair(lm, backend).alike(*prompts)
    stream = backend.stream(prompts[1], **LENGTH)
    assert "".join(stream) == answers[0].text
    assert stream.generation is not None
    assert moved(stream.generation, answers[1]) < MOVED


def test_two_hundred_requests_of_sixteen_clients(lm: InvariantModel, on_server: VLLMBackend) -> None:
    """Ten sets in random orders, by seven methods, plain prompts among them."""
    methods = ["rotor", "isolated", "set-based", "sequential", "ape", "structured", "pine"]
    sets = [documents(count, 310 + number) for number, count in enumerate((0, 1, 2, 3, 5, 6, 8, 10, 15, 20))]

    def answer(model: InvariantModel, method: str, number: int, turn: int) -> Any:
        chosen, segments = model.with_method(method, ordering="lexical"), sets[number]
        return chosen.generate(ask(lm, segments[turn:] + segments[:turn]), max_new_tokens=12).token_ids

    expected = {(method, number): answer(lm, method, number, 0) for method in methods for number in range(10)}
    asked = [(methods[request % 7], request % 10, request // 10) for request in range(200)]
    with ThreadPoolExecutor(16) as clients:
        results = list(clients.map(lambda each: answer(on_server, *each), asked))
    assert [about for about, found in zip(asked, results, strict=True) if found != expected[about[:2]]] == []


# --- what is refused ---


def test_refusals_are_clear_errors_of_that_request(server: Server, lm: InvariantModel) -> None:
    ids = list(lm.prepare(ask(lm, documents(6, 305))).input_ids)
    good = {"method": "rotor", "texts": [4, len(ids) - 24], "sets": [[10, 10]]}
    deep: Any = {}
    for _ in range(500):
        deep = {"deeper": deep}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("expected an object", 3, {}),
        ("expected one of", {**good, "method": "rotar"}, {}),
        ("at most", {**good, "sets": [[10, 10**9]]}, {}),
        ("token ids", good, {"prompt": "text"}),
        ("nested", deep, {}),
    ]
    for path in ("/v1/completions", "/v1/invariant_rag/completions"):
        for words, reading, more in cases:
            body = {"prompt": ids, "max_tokens": 4, "kv_transfer_params": {"invariant_rag": reading}, **more}
            answer = server.post(body, path)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (400, "RequestRefused", 400), answer.text
            assert words in error["message"]
    for path in ("/invocations", "/v1/chat/completions/batch", "/v1/messages", "/v1/responses", "/cohere/v2/chat"):
        answer = server.post(body_of(documents(4, 307)), path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "RequestRefused"), answer.text


def test_a_vllm_without_our_middleware_is_never_asked(
    server: Server, lm: InvariantModel, on_server: VLLMBackend
) -> None:
    """It would read documents causally: its API knows no such path."""
    engine = HTTPEngine(server.url, api_key=server.KEY)
    engine._client.base_url = server.url + "/v2"  # as if another vLLM had taken its place
    request = on_server._request(
        on_server.prepare_to_generate(ask(lm, documents(6, 306)), 2), {"max_tokens": 2, "n": 1}
    )
    with pytest.raises(UnsupportedServer, match="404"):
        engine.complete([request])


def test_wrong_addresses_are_typed_errors(server: Server) -> None:
    with pytest.raises(VLLMError, match="expected an answer"):
        VLLMBackend(url="http://127.0.0.1:9")
    with pytest.raises(UnsupportedServer, match="reads documents"):
        VLLMBackend(url=server.url + "/v2", api_key=server.KEY)
    with pytest.raises(VLLMError, match="401"):
        VLLMBackend(url=server.url)


# --- `bench vllm` ---


def test_the_bench_measures_plain_and_arranged_requests(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVARIANT_RAG_UPSTREAM_KEY", server.KEY)
    words = f"bench vllm {server.url} --clients 2 --requests 4 --questions 2 --segments 3 --new-tokens 4 --rounds 1"
    result = CliRunner().invoke(app, [*words.split(), "--words", "5", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    measured = json.loads((tmp_path / "serve.json").read_text())
    assert (len(measured["ratios"]), len(measured["rows"])) == (2, 4)
    assert all(min(times) > 0 for each in measured["rows"] for times in each["measured"].values())


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", "expected an answer of vLLM"), ("--requests 5 --questions 2", "multiple")],
)
def test_the_bench_says_what_is_wrong(words: str, expected: str) -> None:
    result = CliRunner().invoke(app, ["bench", "vllm", "http://127.0.0.1:9", *words.split()])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())


def test_a_server_that_restarts_answers_again(server: Server, lm: InvariantModel, on_server: VLLMBackend) -> None:
    """The last test with this server: it takes as long as a start."""
    prompt = ask(lm, documents(6, 350))
    server.__exit__()
    with pytest.raises(VLLMError, match="expected an answer"):
        on_server.generate(prompt, **LENGTH)
    server.__enter__()
    server.wait()
    Pair(lm, on_server).alike(prompt)
