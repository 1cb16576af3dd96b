"""`invariant-rag serve --vllm`: keys, documents and citations over HTTP, and answers of a real vLLM, token by token."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from random import Random
from typing import Any

import httpx
import pytest
from invariant_rag import InvariantModel, Judge, Segment
from invariant_rag.generation.streaming import token_logprobs
from invariant_rag.methods import METHODS
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.serving import in_thread, server_of
from invariant_rag.server.settings import UPSTREAM_KEY_VARIABLE, EngineConfig
from jsonschema import validate

from tests.documents import body_of, documents, question
from tests.pairs import MOVED
from tests.relay import Relay
from tests.servers import Server

LIMIT = 1500
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEYS = {"key-of-ada": "ada", "key-of-ivo": "ivo"}


@pytest.fixture(scope="module")
def relay(server: Server) -> Iterator[Relay]:
    with Relay(server.port) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(relay: Relay) -> Iterator[httpx.Client]:
    """A gateway with two tenants."""
    settings = Settings(keys=KEYS, operator_key="key-of-operator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UPSTREAM_KEY_VARIABLE, Server.KEY)
        engine = build_engine(EngineConfig(vllm=relay.url, name="gateway"), settings)
    with (
        in_thread(server_of(create_app(engine, settings), settings, "127.0.0.1", 0)) as url,
        httpx.Client(base_url=url, timeout=120, headers={"Authorization": "Bearer key-of-ada"}) as client,
    ):
        yield client


def choices(client: httpx.Client, segments: Sequence[Segment], **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.post(CHAT, json=body_of(segments, **more)).json()["choices"]
    return found


def texts(*args: Any, **more: Any) -> list[str]:
    return [each["message"]["content"] for each in choices(*args, **more)]


@pytest.mark.parametrize("method", ["rotor", "pine", "sequential"])
def test_every_order_gives_the_tokens_of_generate(method: str, gateway: httpx.Client, lm: InvariantModel) -> None:
    segments, chosen = documents(3, seed=600), lm.with_method(method, ordering="lexical")
    expected = chosen.generate(chosen.chat_prompt(question(segments), segments), max_new_tokens=16)
    assert lm.tokenizer is not None
    tokens = token_logprobs(expected, lm.tokenizer)
    for order in permutations(segments):
        invariant = {"method": method, "ordering": "lexical"}
        reply = gateway.post(CHAT, json=body_of(order, logprobs=True, invariant=invariant)).json()
        (choice,) = reply["choices"]
        told = choice["logprobs"]["content"]
        assert [each["token"] for each in told] == [each.token for each in tokens]
        assert [each["logprob"] for each in told] == pytest.approx([each.logprob for each in tokens], abs=MOVED)
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
        assert (reply["invariant"]["method"], reply["invariant"]["invariant"]) == (method, True)
        assert reply["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def test_a_stream_is_the_whole_answer_in_pieces(gateway: httpx.Client) -> None:
    segments = documents(5, seed=601)
    (whole,) = choices(gateway, segments, logprobs=True)
    with gateway.stream("POST", CHAT, json=body_of(segments[::-1], logprobs=True, stream=True)) as response:
        chunks = [json.loads(line[6:])["choices"][0] for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [chunk["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == whole["message"]["content"]
    assert len(list(filter(None, deltas))) > 1
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    assert chunks[-1]["delta"].get("citations") == whole["message"].get("citations")


def test_fields_that_vllm_has_change_its_answers_as_they_change_ours(gateway: httpx.Client, lm: InvariantModel) -> None:
    segments, prompt = documents(3, seed=605), "The ferry leaves"
    assert lm.tokenizer is not None
    (token, *_) = lm.tokenizer.encode(" barley", add_special_tokens=False)
    ours = InProcess(lm.with_method("rotor", ordering="lexical"))
    changes: list[dict[str, Any]] = [
        {"logit_bias": {str(token): 100.0}, "max_tokens": 6},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0, "max_tokens": 24},
        {"logprobs": 3, "max_tokens": 6},
    ]
    with in_thread(server_of(create_app(ours), Settings(), "127.0.0.1", 0)) as url:
        for change in changes:
            sent = {"prompt": prompt, "documents": [each.text for each in segments], **change}
            (here,), (there,) = (
                client.post(COMPLETIONS, json=sent).json()["choices"]
                for client in (httpx.Client(base_url=url, timeout=120), gateway)
            )
            assert here["text"] == there["text"]
            tops = [(each["logprobs"] or {}).get("top_logprobs", []) for each in (here, there)]
            assert tops[1] == [pytest.approx(each, abs=MOVED) for each in tops[0]]


@pytest.mark.parametrize("count", [1, 3])
def test_vllm_gets_the_names_of_the_request_and_of_its_trace(count: int, gateway: httpx.Client, relay: Relay) -> None:
    trace = f"00-{count:032x}-00f067aa0ba902b7-01"
    named = {"x-request-id": f"mine-{count}", "traceparent": trace}
    sent = {"prompt": "The ferry leaves", "max_tokens": 2, "n": count, "temperature": 1.0, "seed": 1}
    assert gateway.post(COMPLETIONS, json=sent, headers=named).status_code == 200
    passed = b"".join(relay.asked).lower()
    assert passed.count(f"x-request-id: mine-{count}".encode()) == count
    assert passed.count(f"traceparent: {trace}".encode()) == count


def test_a_tenant_learns_nothing_of_what_another_has_asked(gateway: httpx.Client) -> None:
    sent = body_of(documents(12, seed=602))

    def ask(key: str) -> tuple[str, int]:
        reply = gateway.post(CHAT, json=sent, headers={"Authorization": f"Bearer {key}"}).json()
        text: str = reply["choices"][0]["message"]["content"]
        return text, reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    (first, *_), others = ask("key-of-ada"), [ask(key) for key in ("key-of-ivo", "key-of-ada", "key-of-ivo")]
    assert {text for text, _ in others} == {first}
    assert [cached > 0 for _, cached in others] == [False, True, True]
    assert gateway.post(CHAT, json=sent, headers={"Authorization": "Bearer key"}).status_code == 401


def test_samples_and_stops(gateway: httpx.Client) -> None:
    segments = documents(4, seed=603)
    samples = [texts(gateway, order, temperature=2.0, seed=7, n=3) for order in (segments, segments[::-1])]
    assert samples[0] == samples[1]
    assert len(set(samples[0])) > 1
    (whole,) = texts(gateway, segments)
    (answer,) = choices(gateway, segments, stop=[whole[2:4]])
    assert (answer["message"]["content"], answer["finish_reason"]) == (whole[:2], "stop")


def properties(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


NODE = properties(at={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})
SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": properties(a={"enum": ["red", "größe", 'b"\\', 3, None, True]}),
    "const": properties(a={"const": {"deep": ["é", 1.5, None]}}),
    "nested": properties(a=properties(b=properties(c={"type": "string", "maxLength": 6}))),
    "array": properties(a={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
    "pattern": properties(a={"type": "string", "pattern": "^[a-c]{2}(-[0-9])?$"}),
    "any of": properties(a={"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}]}),
    "references": {**properties(a={"$ref": "#/$defs/Node"}), "$defs": {"Node": NODE}},
    "bounds": properties(a={"type": "integer", "minimum": -5, "maximum": 250}, b={"type": "number"}),
    "nullable": properties(a={"type": ["string", "null"], "maxLength": 6}),
    "date": properties(a={"type": "string", "format": "date"}),
    "free": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "a list": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
}


def asked_for(schema: dict[str, Any], *, call: bool) -> dict[str, Any]:
    if call:
        tool = {"type": "function", "function": {"name": "search", "parameters": schema}}
        return {"tools": [tool], "tool_choice": "required"}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_object_or_a_call_is_complete_and_valid_or_says_length(name: str, gateway: httpx.Client) -> None:
    schema, random = SCHEMAS[name], Random(name)
    for call in (False, True) if schema["type"] == "object" else (False,):
        for budget in [*random.sample(range(1, 41), 2), 120]:
            sampled = {"temperature": 1.0, "seed": budget, "max_tokens": budget}
            reply = gateway.post(CHAT, json=body_of(documents(2, seed=608), **asked_for(schema, call=call), **sampled))
            (choice,) = reply.json()["choices"]
            if choice["finish_reason"] == "length":
                assert reply.json()["usage"]["completion_tokens"] == budget
                continue
            assert choice["finish_reason"] == ("tool_calls" if call else "stop")
            calls = choice["message"].get("tool_calls") or []
            for each in [each["function"]["arguments"] for each in calls] or [choice["message"]["content"]]:
                validate(json.loads(each), schema)


def test_a_schema_that_cannot_be_followed_is_refused_by_name(gateway: httpx.Client) -> None:
    form = asked_for(properties(a={"type": "string", "pattern": r"(a)\1"}), call=False)
    refused = gateway.post(CHAT, json=body_of(documents(2, seed=608), **form))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_schema", "response_format")
    assert "Backreference" in error["message"]


def test_a_judgement_is_that_of_the_model(gateway: httpx.Client, lm: InvariantModel) -> None:
    options = ["Red and white.", "Blue.", "The documents do not say."]
    asked = {"question": "What colour is the flag of Ostra?", "options": options}
    reply = gateway.post("/v1/judge", json=asked).json()
    expected = Judge(lm).choose(asked["question"], options)  # type: ignore[arg-type]
    assert reply["ranking"] == list(expected.ranking)
    assert reply["probabilities"] == pytest.approx(expected.probabilities, abs=MOVED)
    explained = gateway.post("/v1/judge", json={**asked, "explain": True, "max_tokens": 8}).json()
    assert (explained["ranking"], bool(explained["explanation"])) == (reply["ranking"], True)


def test_only_methods_that_vllm_runs_can_be_chosen(gateway: httpx.Client) -> None:
    card = gateway.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("gateway", 2048)
    assert set(card["invariant"]["methods"]) == set(METHODS)
    refused = gateway.post(CHAT, json=body_of(documents(2, seed=604), invariant={"method": "rotar"}))
    assert refused.status_code == 400
    assert "expected one of ape, " in refused.json()["error"]["message"]


def test_clients_that_leave_end_their_requests_in_vllm(gateway: httpx.Client, server: Server) -> None:
    _wait_for(lambda: metric(server, "num_requests_running") == 0)
    before = metric(server, "generation_tokens_total")
    assert gateway.post(COMPLETIONS, json=long_answer(max_tokens=20)).json()["usage"]["completion_tokens"] == 20
    _wait_for(lambda: metric(server, "generation_tokens_total") >= before + 20)
    for streamed in (False, True):
        content = json.dumps(long_answer(stream=streamed)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key-of-ada\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection((gateway.base_url.host, gateway.base_url.port or 80)) as leaving:
            leaving.sendall(head.encode() + content)
            _wait_for(lambda: metric(server, "num_requests_running") > 0)
        _wait_for(lambda: metric(server, "num_requests_running") == 0)
    assert metric(server, "generation_tokens_total") - before < LIMIT


def _wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def long_answer(**more: Any) -> dict[str, Any]:
    """Return a request for a completion that repeats itself for seconds, and does not end before its limit."""
    parts = [{"type": "document", "document": {"text": each.text}} for each in documents(3, seed=606)]
    return {"prompt": parts, "max_tokens": LIMIT, "repetition_penalty": 0.5, **more}


def metric(server: Server, name: str) -> float:
    """Return a number that vLLM exports."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith(f"vllm:{name}{{")]
    return float(value)


def test_a_vllm_that_is_gone_is_told_and_found_again(gateway: httpx.Client, relay: Relay) -> None:
    sent = body_of(documents(4, seed=607))
    first = gateway.post(CHAT, json=sent).json()["choices"][0]["message"]["content"]
    assert gateway.get("/ready").json()["status"] == "ready"
    with gateway.stream("POST", COMPLETIONS, json=long_answer(stream=True)) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"text"' in line)
        relay.cut()
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-1][6:])["error"]["code"] == "upstream_failed"
    for streamed in (False, True):
        refused = gateway.post(CHAT, json={**sent, "stream": streamed})
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "upstream_failed")
        assert relay.url not in refused.text
    ready = gateway.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "unreachable")
    assert gateway.get("/health").status_code == 200
    relay.start()
    assert gateway.post(CHAT, json=sent).json()["choices"][0]["message"]["content"] == first
    assert gateway.get("/ready").status_code == 200
