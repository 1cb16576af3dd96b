"""A real vLLM server: `vllm serve` alone answers requests with documents; clear errors, restarts and many clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import httpx
import pytest
from invariant_rag import InvariantModel, Prompt
from openai import BadRequestError, OpenAI

from tests.documents import documents, question
from tests.servers import Server
from tests.test_in_process import assert_same
from vllm_invariant_rag import UnsupportedServer, VLLMBackend, VLLMError
from vllm_invariant_rag.engines import FACTS_PATH, HTTPEngine

LENGTH: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}
CHAT = "/v1/chat/completions"


def prompt_of(lm: InvariantModel, seed: int, count: int = 6) -> Prompt:
    segments = documents(count, seed)
    return lm.chat_prompt(question(segments), segments)


def chat(seed: int, count: int = 4, turn: int = 0, **more: Any) -> dict[str, Any]:
    segments = documents(count, seed)
    listed = [{"title": each.title, "text": each.text} for each in segments[turn:] + segments[:turn]]
    asked = [{"role": "user", "content": question(segments)}]
    return {"messages": asked, "documents": listed, "max_tokens": 16, "temperature": 0, **more}


def test_an_openai_client_asks_vllm_alone_with_documents_in_any_order(server: Server, lm: InvariantModel) -> None:
    segments = documents(4, seed=360)
    expected = lm.generate(lm.chat_prompt(question(segments), segments), max_new_tokens=16)
    client = OpenAI(base_url=server.url + "/v1", api_key=server.KEY)
    body = chat(360)
    asked: dict[str, Any] = {"model": "embedded", "messages": body["messages"], "max_tokens": 16, "temperature": 0}
    for order in permutations(body["documents"]):
        reply = client.chat.completions.create(**asked, extra_body={"documents": list(order)})
        assert reply.choices[0].message.content == expected.text
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
        assert reply.invariant["invariant"] is True  # type: ignore[attr-defined]
    streamed = client.chat.completions.create(**asked, stream=True, extra_body={"documents": body["documents"][::-1]})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == expected.text
    plain = client.chat.completions.create(**asked)
    assert plain.choices[0].message.content != expected.text
    with pytest.raises(BadRequestError, match="method"):
        client.chat.completions.create(**asked, extra_body={**body, "invariant": {"method": "rotar"}})


def test_documents_need_a_key_and_each_key_has_its_own_blocks(server: Server) -> None:
    body, cached = chat(361, count=12), []
    assert server.post(body, CHAT, key="none").status_code == 401
    assert httpx.get(server.url + FACTS_PATH).status_code == 401
    for key in (server.KEY, server.OTHER_KEY, server.KEY, server.OTHER_KEY):
        reply = server.post(body, CHAT, key=key).json()
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, True, True]


def test_several_sets_in_messages_and_samples_of_them(server: Server) -> None:
    one, two = ([{"text": each.text} for each in documents(3, seed)] for seed in (362, 363))

    def content(turn: int) -> list[dict[str, Any]]:
        return [
            {"type": "documents", "documents": one[turn:] + one[:turn]},
            {"type": "text", "text": "More:"},
            {"type": "documents", "documents": two[turn:] + two[:turn]},
            {"type": "text", "text": "What is told?"},
        ]

    found = []
    for turn in (0, 1):
        body = {"messages": [{"role": "user", "content": content(turn)}], "max_tokens": 12, "n": 3, "seed": 7}
        reply = server.post({**body, "temperature": 2.0}, CHAT).json()
        found.append([choice["message"]["content"] for choice in reply["choices"]])
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


def test_the_address_alone_is_enough(server: Server, lm: InvariantModel) -> None:
    backend, prompt = VLLMBackend(url=server.url + "/v1", api_key=server.KEY), prompt_of(lm, 301)
    assert (backend.method.name, backend.ordering.name, backend.context_window) == ("rotor", "lexical", 2048)
    assert_same(backend.generate(prompt, **LENGTH), lm.generate(prompt, **LENGTH))


def test_all_orders_give_one_answer_and_streams_give_its_text(lm: InvariantModel, on_server: VLLMBackend) -> None:
    segments = documents(4, seed=302)
    prompts = [lm.chat_prompt(question(segments), list(order)) for order in permutations(segments)]
    answers = on_server.generate(prompts, **LENGTH)
    assert {answer.token_ids for answer in answers} == {lm.generate(prompts[0], **LENGTH).token_ids}
    stream = on_server.stream(prompts[7], **LENGTH)
    assert "".join(stream) == answers[0].text
    assert stream.generation is not None
    assert_same(stream.generation, answers[7])


def test_two_hundred_requests_of_sixteen_clients(lm: InvariantModel, on_server: VLLMBackend) -> None:
    """Ten sets in random orders, by seven methods, plain prompts among them."""
    methods = ["rotor", "isolated", "set-based", "sequential", "ape", "structured", "pine"]
    prompts = [prompt_of(lm, 310 + number, count) for number, count in enumerate((0, 1, 2, 3, 5, 6, 8, 10, 15, 20))]
    models = {name: lm.with_method(name, ordering="lexical") for name in methods}
    expected = {
        (method, number): models[method].generate(prompt, max_new_tokens=12).token_ids
        for method in methods
        for number, prompt in enumerate(prompts)
    }

    def ask(request: int) -> tuple[bool, str]:
        method, number = methods[request % 7], request % 10
        segments = documents((0, 1, 2, 3, 5, 6, 8, 10, 15, 20)[number], 310 + number)
        order = segments[request % 7 :] + segments[: request % 7]
        prompt = lm.chat_prompt(question(segments), order) if segments else prompts[number]
        answer = on_server.with_method(method, ordering="lexical").generate(prompt, max_new_tokens=12)
        return answer.token_ids == expected[method, number], f"{method} {number}"

    with ThreadPoolExecutor(16) as clients:
        results = list(clients.map(ask, range(200)))
    assert len(results) == 200
    assert [about for same, about in results if not same] == []


def test_refusals_are_clear_errors_of_that_request(server: Server, lm: InvariantModel) -> None:
    ids = list(lm.prepare(prompt_of(lm, 305)).input_ids)
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


def test_a_vllm_without_our_middleware_is_never_asked(
    server: Server, lm: InvariantModel, on_server: VLLMBackend
) -> None:
    """It would read documents causally: its API knows no such path."""
    engine = HTTPEngine(server.url, api_key=server.KEY)
    engine._client.base_url = server.url + "/v2"  # as if another vLLM had taken its place
    request = on_server._request(on_server.prepare_to_generate(prompt_of(lm, 306), 2), {"max_tokens": 2, "n": 1})
    with pytest.raises(UnsupportedServer, match="404"):
        engine.complete([request])


def test_wrong_addresses_are_typed_errors(server: Server) -> None:
    with pytest.raises(VLLMError, match="expected an answer"):
        VLLMBackend(url="http://127.0.0.1:9")
    with pytest.raises(UnsupportedServer, match="reads documents"):
        VLLMBackend(url=server.url + "/v2", api_key=server.KEY)
    with pytest.raises(VLLMError, match="401"):
        VLLMBackend(url=server.url)


def test_a_server_that_restarts_answers_again(server: Server, lm: InvariantModel, on_server: VLLMBackend) -> None:
    """The last test with this server: it takes as long as a start."""
    prompt = prompt_of(lm, 350)
    first = on_server.generate(prompt, **LENGTH)
    server.stop()
    with pytest.raises(VLLMError, match="expected an answer"):
        on_server.generate(prompt, **LENGTH)
    server.start()
    assert_same(on_server.generate(prompt, **LENGTH), first)
