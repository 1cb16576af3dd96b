"""A real vLLM server, with documents: `vllm serve` alone, `invariant-rag serve --vllm` before it, and `VLLMBackend`."""

import json
import re
import subprocess
import time
from http.client import HTTPConnection
from itertools import permutations
from random import Random

import httpx
import pytest
from invariant_rag import Judge
from invariant_rag.cli import app
from invariant_rag.generation.streaming import token_logprobs
from invariant_rag.methods import METHODS
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.serving import in_thread, server_of
from invariant_rag.server.settings import UPSTREAM_KEY_VARIABLE, EngineConfig
from jsonschema import validate
from openai import BadRequestError, OpenAI
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.conftest import LENGTH, MOVED, Pair, Server, ask, body_of, documents, moved, question
from vllm_invariant_rag import UnsupportedServer, VLLMBackend, VLLMError
from vllm_invariant_rag.engines import FACTS_PATH, HTTPEngine

LIMIT = 1500
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PASSED = []  # requests that the gateway has sent to vLLM


def client(url):
    return httpx.Client(base_url=url, timeout=300, headers={"Authorization": f"Bearer {Server.KEY}"})


@pytest.fixture(scope="module")
def gateway(server):
    """A client of `invariant-rag serve --vllm`, with two tenants."""
    settings = Settings(keys={Server.KEY: "ada", Server.OTHER_KEY: "ivo"}, operator_key="key-of-operator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UPSTREAM_KEY_VARIABLE, Server.KEY)
        engine = build_engine(EngineConfig(vllm=server.url, name="gateway"), settings)
    engine._backend._engine._client._client.event_hooks = {"request": [PASSED.append]}
    with in_thread(server_of(create_app(engine, settings), settings, "127.0.0.1", 0)) as url, client(url) as asking:
        yield asking


@pytest.fixture(scope="module")
def alone(server):
    """A client of `vllm serve` alone."""
    with client(server.url) as asking:
        yield asking


@pytest.fixture(params=["vllm serve", "invariant-rag serve"])
def door(request, alone, gateway):
    """What answers requests with documents: vLLM alone, and a gateway."""
    return alone if request.param == "vllm serve" else gateway


def choices(client, segments, **more):
    return client.post(CHAT, json=body_of(segments, **more)).json()["choices"]


@pytest.mark.parametrize("method", ["rotor", "pine", "sequential"])
def test_every_order_gives_the_tokens_of_generate_whole_and_in_pieces(method, door, lm):
    segments, chosen = documents(3, seed=603), lm.with_method(method, ordering="lexical")
    expected = chosen.generate(chosen.chat_prompt(question(segments), segments), max_new_tokens=16)
    tokens = token_logprobs(expected, lm.tokenizer)
    more = {"logprobs": True, "invariant": {"method": method, "ordering": "lexical"}}
    for order in permutations(segments):
        reply = door.post(CHAT, json=body_of(order, **more)).json()
        (choice,) = reply["choices"]
        told = choice["logprobs"]["content"]
        assert [each["token"] for each in told] == [each.token for each in tokens]
        assert [each["logprob"] for each in told] == pytest.approx([each.logprob for each in tokens], abs=MOVED)
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
        assert (reply["invariant"]["method"], reply["invariant"]["invariant"]) == (method, True)
        assert reply["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    with door.stream("POST", CHAT, json=body_of(segments[::-1], **more, stream=True)) as response:
        chunks = [json.loads(line[6:])["choices"][0] for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [chunk["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == expected.text
    assert len(list(filter(None, deltas))) > 1
    assert chunks[-1]["finish_reason"] == expected.finish_reason
    assert chunks[-1]["delta"]["citations"] == choice["message"]["citations"]


def test_documents_need_a_key_and_a_tenant_learns_nothing_of_what_another_has_asked(door):
    """The tenants of the gateway are none of those of vLLM's own keys."""
    found, sent = [], body_of(documents(12, seed=602))
    for key in (Server.KEY, Server.OTHER_KEY, Server.KEY, Server.OTHER_KEY):
        reply = door.post(CHAT, json=sent, headers={"Authorization": f"Bearer {key}"}).json()
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        found.append((reply["choices"][0]["message"]["content"], cached > 0))
    assert found == [(found[0][0], cached) for cached in (False, False, True, True)]
    assert door.post(CHAT, json=sent, headers={"Authorization": "Bearer key"}).status_code == 401


def test_several_sets_in_messages_samples_of_them_and_stops(door):
    one, two = ([{"text": each.text} for each in documents(3, seed)] for seed in (362, 363))

    def samples(turn):
        first, second = ({"type": "documents", "documents": each[turn:] + each[:turn]} for each in (one, two))
        content = [first, {"type": "text", "text": "More:"}, second, {"type": "text", "text": "What is told?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "n": 3, "seed": 7}
        reply = door.post(CHAT, json={**body, "temperature": 2.0}).json()
        return [choice["message"]["content"] for choice in reply["choices"]]

    assert samples(0) == samples(1)
    assert len(set(samples(0))) > 1
    segments = documents(4, seed=603)
    (whole,) = choices(door, segments)
    (answer,) = choices(door, segments, stop=[whole["message"]["content"][2:4]])
    assert (answer["message"]["content"], answer["finish_reason"]) == (whole["message"]["content"][:2], "stop")


def test_an_openai_client_and_curl_ask_vllm_alone_and_what_has_no_documents_is_vllms(server, alone, lm):
    segments = documents(4, 360)
    expected = lm.generate(ask(lm, segments), max_new_tokens=16).text
    client, body = OpenAI(base_url=server.url + "/v1", api_key=server.KEY), body_of(segments, temperature=0)
    asked = {"model": "embedded", **body}
    listed = asked.pop("documents")
    reply = client.chat.completions.create(**asked, extra_body={"documents": listed[::-1]})
    assert (reply.choices[0].message.content, reply.invariant["invariant"]) == (expected, True)
    streamed = client.chat.completions.create(**asked, stream=True, extra_body={"documents": listed})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == expected
    headers = ["-H", f"Authorization: Bearer {server.KEY}", "-H", "Content-Type: application/json"]
    written = json.dumps({"model": "embedded", **body})
    command = ["curl", "-s", server.url + CHAT, *headers, "--data-binary", "@-"]
    escaped = written.replace('"documents"', r'"docum\u0065nts"')
    for data in (written.encode(), escaped.encode(), written.encode("utf-16")):
        told = json.loads(subprocess.run(command, capture_output=True, check=True, input=data).stdout)
        assert told["choices"][0]["message"]["content"] == expected
    assert client.chat.completions.create(**asked).choices[0].message.content != expected
    asked_for = {"prompt": "Where is it?", "documents": listed, "max_tokens": 4}
    assert alone.post(COMPLETIONS, json=asked_for).json()["invariant"]["sets"] == [4]
    assert alone.post("/behind" + CHAT, json=body).json()["invariant"]["sets"] == [4]
    assert httpx.get(server.url + FACTS_PATH).status_code == 401
    with pytest.raises(BadRequestError, match="method"):
        client.chat.completions.create(**asked, extra_body={**body, "invariant": {"method": "rotar"}})


def test_refusals_are_clear_errors_of_that_request(alone, lm):
    ids = list(lm.prepare(ask(lm, documents(6, 305))).input_ids)
    good = {"method": "rotor", "texts": [4, len(ids) - 24], "sets": [[10, 10]]}
    cases = [
        ("expected an object", 3, {}),
        ("expected one of", {**good, "method": "rotar"}, {}),
        ("at most", {**good, "sets": [[10, 10**9]]}, {}),
        ("token ids", good, {"prompt": "text"}),
        ("nested", json.loads('{"deeper":' * 500 + "{}" + "}" * 500), {}),
    ]
    sent = [
        (path, words, {"prompt": ids, "kv_transfer_params": {"invariant_rag": reading}, **more})
        for path in (COMPLETIONS, "/v1/invariant_rag/completions")
        for words, reading, more in cases
    ]
    others = ("/invocations", "/v1/chat/completions/batch", "/v1/messages", "/v1/responses", "/cohere/v2/chat")
    sent += [(path, "expected documents at", body_of(documents(4, 307))) for path in others]
    for path, words, body in sent:
        answer = alone.post(path, json={"model": "embedded", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (400, "RequestRefused", 400), answer.text
        assert words in error["message"]


def test_fields_that_vllm_has_change_its_answers_as_they_change_ours(gateway, lm):
    (token, *_) = lm.tokenizer.encode(" barley", add_special_tokens=False)
    changes = [
        {"logit_bias": {str(token): 100.0}, "max_tokens": 6},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0, "max_tokens": 24},
        {"logprobs": 3, "max_tokens": 6},
    ]
    listed = [each.text for each in documents(3, seed=605)]
    with TestClient(create_app(InProcess(lm.with_method("rotor", ordering="lexical")))) as here:
        for change in changes:
            sent = {"prompt": "The ferry leaves", "documents": listed, **change}
            one, other = (each.post(COMPLETIONS, json=sent).json()["choices"][0] for each in (here, gateway))
            assert one["text"] == other["text"]
            tops = [(each["logprobs"] or {}).get("top_logprobs", []) for each in (one, other)]
            assert tops[1] == [pytest.approx(each, abs=MOVED) for each in tops[0]]


def test_vllm_gets_the_names_of_the_request_and_of_its_trace(gateway):
    for count in (1, 3):
        named = {"x-request-id": f"mine-{count}", "traceparent": f"00-{count:032x}-00f067aa0ba902b7-01"}
        sent = {"prompt": "The ferry leaves", "max_tokens": 2, "n": count, "temperature": 1.0, "seed": 1}
        PASSED.clear()
        assert gateway.post(COMPLETIONS, json=sent, headers=named).status_code == 200
        assert [{name: each.headers.get(name) for name in named} for each in PASSED] == [named] * count


def properties(**fields):
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


NODE = properties(at={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})
SCHEMAS = {
    "enum": properties(a={"enum": ["red", "größe", 'b"\\', 3, None, True]}),
    "pattern": properties(a={"type": "string", "pattern": "^[a-c]{2}(-[0-9])?$"}),
    "references": {**properties(a={"$ref": "#/$defs/Node"}), "$defs": {"Node": NODE}},
    "nullable": properties(a={"type": ["string", "null"], "maxLength": 6}),
    "free": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "a list": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
}


def asked_for(schema, *, call):
    if call:
        tool = {"type": "function", "function": {"name": "search", "parameters": schema}}
        return {"tools": [tool], "tool_choice": "required"}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_object_or_a_call_is_complete_and_valid_or_says_length(name, gateway):
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


def test_a_schema_that_cannot_be_followed_and_a_method_that_is_none_are_refused_by_name(gateway):
    form = asked_for(properties(a={"type": "string", "pattern": r"(a)\1"}), call=False)
    refused = gateway.post(CHAT, json=body_of(documents(2, seed=608), **form))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_schema", "response_format")
    assert "Backreference" in error["message"]
    card = gateway.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("gateway", 2048)
    assert set(card["invariant"]["methods"]) == set(METHODS)
    refused = gateway.post(CHAT, json=body_of(documents(2, seed=604), invariant={"method": "rotar"}))
    assert refused.status_code == 400
    assert "expected one of ape, " in refused.json()["error"]["message"]


def test_a_judgement_is_that_of_the_model(gateway, lm):
    asked = {"question": "What is on the flag of Ostra?", "options": ["Red.", "Blue.", "The documents do not say."]}
    reply = gateway.post("/v1/judge", json=asked).json()
    expected = Judge(lm).choose(asked["question"], asked["options"])
    assert reply["ranking"] == list(expected.ranking)
    assert reply["probabilities"] == pytest.approx(expected.probabilities, abs=MOVED)
    explained = gateway.post("/v1/judge", json={**asked, "explain": True, "max_tokens": 8}).json()
    assert (explained["ranking"], bool(explained["explanation"])) == (reply["ranking"], True)


def long_answer(**more):
    """Return a request for a completion that repeats itself for seconds, and does not end before its limit."""
    parts = [{"type": "document", "document": {"text": each.text}} for each in documents(3, seed=606)]
    return {"prompt": parts, "max_tokens": LIMIT, "repetition_penalty": 0.5, **more}


def test_clients_that_leave_end_their_requests_in_vllm(gateway, server):
    def metric(name):
        """Return a number that vLLM exports."""
        (value,) = re.findall(rf"^vllm:{name}{{.* (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
        return float(value)

    def wait_for(happened):
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    wait_for(lambda: metric("num_requests_running") == 0)
    before = metric("generation_tokens_total")
    assert gateway.post(COMPLETIONS, json=long_answer(max_tokens=20)).json()["usage"]["completion_tokens"] == 20
    wait_for(lambda: metric("generation_tokens_total") >= before + 20)
    for streamed in (False, True):
        leaving = HTTPConnection(gateway.base_url.host, gateway.base_url.port)
        headers = {**gateway.headers, "content-type": "application/json"}
        leaving.request("POST", COMPLETIONS, json.dumps(long_answer(stream=streamed)), headers)
        wait_for(lambda: metric("num_requests_running") > 0)
        leaving.close()
        wait_for(lambda: metric("num_requests_running") == 0)
    assert metric("generation_tokens_total") - before < LIMIT


def test_the_address_alone_is_enough_for_answers_and_streams(server, lm):
    backend, segments = VLLMBackend(url=server.url + "/behind/v1", api_key=server.KEY), documents(4, seed=302)
    assert (backend.method.name, backend.ordering.name, backend.context_window) == ("rotor", "lexical", 2048)
    prompts = [ask(lm, order) for order in (segments, segments[::-1], segments[2:])]
    answers = Pair(lm, backend).alike(*prompts)
    stream = backend.stream(prompts[1], **LENGTH)
    assert "".join(stream) == answers[0].text
    assert moved(stream.generation, answers[1]) < MOVED
    samples = backend.generate(prompts[0], num_return_sequences=3, do_sample=True, temperature=2.0, seed=1, **LENGTH)
    assert [len(each.token_ids) for each in samples] == [16] * len({each.text for each in samples}) == [16] * 3


def test_wrong_addresses_are_typed_errors_and_a_vllm_without_our_middleware_is_never_asked(server, lm, on_server):
    """It would read documents causally: its API knows no such path."""
    with pytest.raises(VLLMError, match="expected an answer"):
        VLLMBackend(url="http://127.0.0.1:9")
    with pytest.raises(UnsupportedServer, match="takes documents"):
        VLLMBackend(url=server.url + "/v2", api_key=server.KEY)
    with pytest.raises(VLLMError, match="401"):
        VLLMBackend(url=server.url)
    engine = HTTPEngine(server.url, api_key=server.KEY)
    request = Pair(lm, on_server).request(ask(lm, documents(6, 306)))
    engine._client.base_url = server.url + "/v2"  # as if another vLLM had taken its place
    with pytest.raises(UnsupportedServer, match="404"):
        engine.complete([request])


def test_the_bench_measures_plain_and_arranged_requests(server, tmp_path, monkeypatch):
    monkeypatch.setenv("INVARIANT_RAG_UPSTREAM_KEY", server.KEY)
    words = f"bench vllm {server.url} --clients 2 --requests 4 --questions 2 --segments 3 --new-tokens 4 --rounds 1"
    result = CliRunner().invoke(app, [*words.split(), "--words", "5", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    measured = json.loads((tmp_path / "serve.json").read_text())
    assert (len(measured["ratios"]), len(measured["rows"])) == (2, 4)
    assert all(min(times) > 0 for each in measured["rows"] for times in each["measured"].values())


def test_a_server_that_restarts_is_told_to_be_gone_and_answers_again(server, gateway, lm, on_server):
    """The last test with this server: it takes as long as a start."""
    prompt, sent = ask(lm, documents(6, 350)), body_of(documents(4, seed=607))
    first = choices(gateway, documents(4, seed=607))[0]["message"]["content"]
    assert gateway.get("/ready").json()["status"] == "ready"
    with gateway.stream("POST", COMPLETIONS, json=long_answer(stream=True)) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"text"' in line)
        server.__exit__()
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-1][6:])["error"]["code"] == "upstream_failed"
    for streamed in (False, True):
        refused = gateway.post(CHAT, json={**sent, "stream": streamed})
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "upstream_failed")
        assert server.url not in refused.text
    ready = gateway.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "unreachable")
    assert gateway.get("/health").status_code == 200
    with pytest.raises(VLLMError, match="expected an answer"):
        on_server.generate(prompt, **LENGTH)
    server.__enter__()
    server.wait()
    Pair(lm, on_server).alike(prompt)
    assert choices(gateway, documents(4, seed=607))[0]["message"]["content"] == first
    assert gateway.get("/ready").status_code == 200
