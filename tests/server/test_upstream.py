"""Models behind an API, over real HTTP: the documents are sorted or shuffled, and what goes wrong is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import httpx
import openai
import pytest

from invariant_rag import InvariantModel
from invariant_rag.api_models import PlainRequest, PlainRequests, answer_key, request_as_given
from invariant_rag.errors import ExtraRequired, InvalidChoice, UnsupportedCombination
from invariant_rag.prompts import DEFAULT_SYSTEM, Turn
from invariant_rag.segments import SegmentSet
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.engines.upstream import Upstream
from invariant_rag.server.settings import EngineConfig
from tests.server.conftest import CHAT, FLAGS, QUESTION, ask, body, client_of, content_of, serving, wait_until
from tests.server.scripted import USAGE, Answer, ScriptedAPI, completion, events, refusal, scripted_api
from tests.server.test_chat import COLOUR, SEARCH

MILL = "What grinds the mill of Ostra?"  # the plain model answers it differently in another order
ORDERS = list(permutations(FLAGS[:3]))


@pytest.fixture(scope="module")
def plain_url(embedded: InvariantModel) -> Iterator[str]:
    """The API: a server of the plain model, which reads documents in the order in which it gets them."""
    with serving(InProcess(embedded.with_method("sequential"), "plain")) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def gateway_url(plain_url: str) -> Iterator[str]:
    with serving(Upstream(plain_url, "plain", name="small", votes=4)) as url:
        yield url


@pytest.fixture(scope="module")
def gateway(gateway_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def api() -> Iterator[ScriptedAPI]:
    with scripted_api() as running:
        yield running


@pytest.fixture(scope="module")
def http(api: ScriptedAPI) -> Iterator[httpx.Client]:
    """A client of a gateway before an API whose answers the test writes."""
    engine = Upstream(api.url, "far", key="key-of-the-gateway", votes=3, timeout=1.0)
    with client_of(engine, Settings(timeout=20)) as client:
        yield client


def error_in(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def turns_of(documents: list[str], question: str) -> list[Turn]:
    return [Turn("system", (DEFAULT_SYSTEM,)), Turn("user", (SegmentSet(documents), "\nQuestion: ", question))]


def answers_to(requests: list[PlainRequest], embedded: InvariantModel) -> list[str]:
    """Return what the model answers to plain text."""
    prompts = [
        embedded.chat_prompt(messages=[{"role": turn.role, "content": turn.text} for turn in request.turns])
        for request in requests
    ]
    return [embedded.generate(prompt, max_new_tokens=256).text for prompt in prompts]


def test_every_order_makes_one_request_and_the_answer_is_that_of_the_sorted_documents(
    gateway: openai.OpenAI, embedded: InvariantModel
) -> None:
    replies = [content_of(ask(gateway, list(order), MILL)) for order in permutations(FLAGS)]
    assert all(reply == replies[0] for reply in replies)
    assert (
        replies[0]["choices"][0]["message"]["content"]
        == answers_to(PlainRequests().of_turns(turns_of(FLAGS, MILL)), embedded)[0]
    )
    report = replies[0]["invariant"]
    assert (report["method"], report["ordering"], report["invariant"], report["sets"]) == (
        "canonical",
        "lexical",
        True,
        [4],
    )
    assert any("one order" in warning for warning in report["warnings"])


def test_a_vote_is_the_answer_of_most_orders(gateway: openai.OpenAI, embedded: InvariantModel) -> None:
    options = {"extra_body": {"invariant": {"method": "vote"}}}
    replies = [content_of(ask(gateway, list(order), MILL, **options)) for order in ORDERS]
    assert all(reply == replies[0] for reply in replies)
    answers = answers_to(PlainRequests(votes=4).of_turns(turns_of(FLAGS[:3], MILL)), embedded)
    (_, most), *_ = Counter(map(answer_key, answers)).most_common()
    assert replies[0]["invariant"]["vote"] == {"calls": 4, "agreed": most}
    assert most == 3
    first = next(each for each in answers if [*map(answer_key, answers)].count(answer_key(each)) == most)
    assert replies[0]["choices"][0]["message"]["content"] == first
    single = ask(gateway, FLAGS[:3], MILL)
    assert single.choices[0].message.content != first, "one order alone has another answer"
    assert replies[0]["usage"]["prompt_tokens"] == 4 * single.usage.prompt_tokens
    chunks = list(ask(gateway, FLAGS[:3], MILL, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == first


def test_the_order_given_is_read_where_that_is_wanted(gateway: openai.OpenAI, embedded: InvariantModel) -> None:
    options = {"extra_body": {"invariant": {"method": "sequential"}}}
    answers = []
    for documents in map(list, ORDERS):
        reply = ask(gateway, documents, MILL, **options)
        answers.append(reply.choices[0].message.content)
        assert answers[-1:] == answers_to([request_as_given(turns_of(documents, MILL))], embedded)
        assert not reply.invariant["invariant"]
        assert reply.invariant["ordering"] == "given"
    assert len(set(answers)) > 1, "the plain model answers by the order"


@pytest.mark.parametrize("options", [{"logprobs": True}, {"stop": ["hit"]}, {"temperature": 2.0, "seed": 3, "n": 2}])
def test_a_stream_is_the_whole_answer_in_pieces(options: dict[str, Any], gateway: openai.OpenAI) -> None:
    whole = ask(gateway, FLAGS, max_tokens=8, **options)
    chunks = list(ask(gateway, FLAGS, max_tokens=8, stream=True, stream_options={"include_usage": True}, **options))
    *pieces, usage = chunks
    for index, choice in enumerate(whole.choices):
        own = [chunk.choices[0] for chunk in pieces if chunk.choices[0].index == index]
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
        assert (own[-1].logprobs is None) == (choice.logprobs is None) == ("logprobs" not in options)
    assert len(pieces) > 2 * len(whole.choices)
    assert usage.usage.completion_tokens == whole.usage.completion_tokens


def test_schemas_tools_and_citations_pass(gateway: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    (choice,) = ask(gateway, FLAGS, response_format=form).choices
    assert json.loads(choice.message.content)["colour"] in {"white", "green"}
    tool = {"type": "function", "function": {"name": "search"}}
    for stream in (False, True):
        reply = ask(gateway, FLAGS, tools=[SEARCH], tool_choice=tool, stream=stream)
        found = (
            [call for chunk in reply for call in chunk.choices[0].delta.tool_calls or ()]
            if stream
            else reply.choices[0].message.tool_calls
        )
        assert found[0].function.name == "search"
        arguments = "".join(each.function.arguments for each in found if not getattr(each, "index", 0))
        assert json.loads(arguments)["town"] in {"Ostra", "Brenn"}
    (cited,) = ask(gateway, [{"id": "flag", "text": FLAGS[0]}]).choices
    assert cited.message.citations[0]["sources"][0]["id"] == "flag"


def test_completions_pass_too(gateway_url: str, plain_url: str) -> None:
    prompt = [{"type": "document", "document": {"text": text}} for text in FLAGS[:3]]
    replies = [
        httpx.post(
            f"{gateway_url}/v1/completions",
            json={"prompt": [*order, {"type": "text", "text": f"\n{QUESTION}"}], "max_tokens": 6, "logprobs": 1},
        ).json()
        for order in permutations(prompt)
    ]
    assert len({json.dumps(reply["choices"]) for reply in replies}) == 1
    tokens = replies[0]["choices"][0]["logprobs"]["tokens"]
    assert "".join(tokens).startswith(replies[0]["choices"][0]["text"])


def test_numbers_in_an_answer_stay_and_lead_to_the_documents(api: ScriptedAPI, http: httpx.Client) -> None:
    def numbered(order: list[str]) -> dict[str, Any]:
        slots = [{"before": f"[{n}] ", "after": "\n", "number": str(n)} for n in range(1, 4)]
        part = {"type": "documents", "documents": [{"text": text} for text in order], "slots": slots}
        return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]}

    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("White [", "2].")]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}
    for order in map(list, ORDERS):
        api.plan(Answer(body=events(*chunks, last, b"[DONE]")))
        with http.stream("POST", CHAT, json={**numbered(order), "stream": True}) as response:
            pieces = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
        second = api.bodies[0]["messages"][0]["content"].split("[2] ")[1].split("\n")[0]
        assert text == "White [2]."
        cited = [each for piece in pieces for each in piece["choices"][0]["delta"].get("citations", ())]
        assert [each["sources"][0]["document"]["text"] for each in cited if each["text"] == "[2]"] == [second]


@pytest.mark.parametrize(
    ("answer", "status", "code", "told"),
    [
        (
            Answer(429, refusal("Rate limit of org-1"), {"Retry-After": "7"}),
            429,
            "rate_limit_exceeded",
            "no more requests",
        ),
        (Answer(401, refusal("Incorrect key key-of-the-gateway")), 502, "upstream_failed", "answered 401"),
        (Answer(404, refusal("No such model for org-1")), 502, "upstream_failed", "answered 404"),
        (Answer(500, refusal("Trace of org-1")), 502, "upstream_failed", "answered 500"),
        (Answer(503, refusal("Full"), {"Retry-After": "9"}), 502, "upstream_failed", "answered 503"),
        (Answer(504, b"<html>"), 504, "deadline_exceeded", "answered 504"),
        (Answer(200, b"<html>"), 502, "upstream_failed", "expected JSON"),
        (Answer(200, {"choices": 3}), 502, "upstream_failed", "with choices"),
        (Answer(200, {"choices": [{"message": 3}]}), 502, "upstream_failed", "a choice"),
        (Answer(200, {"choices": [{"message": {"content": "a"}}]}), 502, "upstream_failed", "to its end"),
        (Answer(400, refusal("seed: too odd", param="seed")), 400, "upstream_refused", "seed: too odd"),
        (Answer(400, refusal("8 tokens", code="context_length_exceeded")), 400, "context_length_exceeded", "8 tokens"),
        (Answer(200, completion(), seconds=3), 504, "deadline_exceeded", "in time"),
    ],
)
def test_what_the_api_answers_is_told_in_our_words(
    answer: Answer, status: int, code: str, told: str, api: ScriptedAPI, http: httpx.Client
) -> None:
    for stream in (False, True):
        api.plan(answer)
        response = http.post(CHAT, json=body(stream=stream, seed=1))
        if stream and answer.status == 200 and not answer.seconds:
            continue  # a body that is no stream: below
        error = error_in(response)
        assert (response.status_code, error["code"]) == (status, code)
        assert told in error["message"]
        assert not any(secret in response.text for secret in ("org-1", "key-of-the-gateway", api.url))
        assert response.headers.get("retry-after") == answer.headers.get("Retry-After")


@pytest.mark.parametrize(
    "stream",
    [
        [{"choices": [{"index": 0, "delta": {"content": "whi"}}]}, b"break"],
        [{"choices": [{"index": 0, "delta": {"content": "whi"}}]}, b"[DONE]"],
        [{"choices": [{"index": 0, "delta": {"content": "whi"}}]}, refusal("Trace of org-1")],
        [{"choices": [{"index": 0, "delta": {"content": "whi"}}]}, b"{no json"],
        [{"choices": [{"index": 0, "delta": {"content": "whi"}}]}, {"choices": [{"index": 5, "delta": {}}]}],
    ],
)
def test_a_stream_that_breaks_off_ends_with_an_error(stream: list[Any], api: ScriptedAPI, http: httpx.Client) -> None:
    api.plan(Answer(body=events(*stream)))
    response = http.post(CHAT, json=body(stream=True))
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "upstream_failed"
    assert "data: [DONE]" not in lines
    assert "org-1" not in response.text


def test_models_that_want_another_name_for_the_limit_get_it(api: ScriptedAPI) -> None:
    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    with serving(Upstream(api.url, "far")) as url:
        api.plan(Answer(400, refusal(message, param="max_tokens")), Answer(body=completion()))
        for _ in range(2):
            assert httpx.post(f"{url}{CHAT}", json=body(max_tokens=9)).status_code == 200
    assert [each.get("max_completion_tokens") for each in api.bodies] == [None, 9, 9]
    assert "max_tokens" not in api.bodies[-1]


def test_what_was_asked_is_what_the_api_gets(api: ScriptedAPI, http: httpx.Client) -> None:
    api.plan(Answer(body=completion("{}")))
    form = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}, "strict": True}}
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "Nothing."},
    ]
    sent = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 4,
        "stop": ["x"],
        "response_format": form,
        "tools": [SEARCH],
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "parallel_tool_calls": False,
    }
    response = http.post(
        CHAT, json={"messages": messages, "documents": FLAGS[:1], "user": "ada", "max_tokens": 5, **sent}
    )
    assert response.status_code == 200, response.text
    got = api.bodies[0]
    assert {name: got[name] for name in sent} == sent
    assert (got["model"], got["max_tokens"]) == ("far", 5)
    assert "user" not in got
    _, user, assistant, tool = got["messages"]
    assert user["content"] == f"Document: {FLAGS[0]}\n\nQuestion: {QUESTION}"
    assert assistant == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert tool == {"role": "tool", "tool_call_id": "call_1", "content": "Nothing."}
    usage = response.json()["usage"]
    assert (usage["total_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (9, 3)


def test_promises_that_the_api_breaks_are_errors(api: ScriptedAPI, http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    for content, code in (('{"colour": ', "incomplete_object"), ('{"colour": "blue"}', "invalid_object")):
        api.plan(Answer(body=completion(content)))
        response = http.post(CHAT, json=body(response_format=form))
        assert (response.status_code, error_in(response)["code"]) == (422, code)
    form["json_schema"] = {"name": "far", "schema": {"$ref": "https://example.org/schema.json"}}
    response = http.post(CHAT, json=body(response_format=form))
    assert (response.status_code, error_in(response)["code"]) == (400, "invalid_schema")
    api.plan(Answer(body=completion()))
    assert "log-probabilities" in error_in(http.post(CHAT, json=body(logprobs=True)))["message"]
    api.plan(Answer(body=completion(tool_calls=[{"id": "1", "function": {"name": "a", "arguments": "{"}}])))
    assert http.post(CHAT, json=body(tools=[SEARCH])).status_code == 502
    api.plan(Answer(body={**completion(), "usage": None}))
    assert "how many tokens" in http.post(CHAT, json=body()).json()["invariant"]["warnings"][-1]


@pytest.mark.parametrize(
    ("path", "change", "told"),
    [
        (CHAT, {"invariant": {"method": "rotor"}}, "expected one of canonical, sequential, vote"),
        (CHAT, {"invariant": {"ordering": "given"}}, "expected an ordering by content"),
        (CHAT, {"invariant": {"overflow": "drop_last"}}, "expected no invariant.overflow"),
        (CHAT, {"invariant": {"method": "vote"}, "n": 2}, "expected n=1"),
        ("/tokenize", {}, "expected an engine with a tokenizer"),
        ("/v1/judge", {"messages": None, "answers": ["a", "b"]}, "expected an engine that scores"),
    ],
)
def test_what_an_api_cannot_do_is_refused(
    path: str, change: dict[str, Any], told: str, api: ScriptedAPI, http: httpx.Client
) -> None:
    api.plan(Answer(body=completion()))
    sent = {name: value for name, value in {**body(), **change}.items() if value is not None}
    if path == "/v1/judge":
        sent.pop("documents")
    response = http.post(path, json=sent)
    assert response.status_code == 400
    assert told in error_in(response)["message"]
    assert not api.bodies


@pytest.mark.parametrize(("method", "connections"), [("canonical", 1), ("vote", 3)])
def test_the_api_is_left_when_the_client_leaves(method: str, connections: int, api: ScriptedAPI) -> None:
    api.plan(Answer(body=completion(), seconds=20))
    with client_of(Upstream(api.url, "far", votes=3)) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=body(invariant={"method": method}), timeout=0.2)
        wait_until(lambda: api.left == connections)


def test_ready_tells_whether_the_api_answers() -> None:
    with scripted_api() as running:
        engine = Upstream(running.url, "far", key="key-1")
        with serving(engine) as url:
            assert httpx.get(f"{url}/ready").json()["status"] == "ready"
            assert running.keys == ["Bearer key-1"]
            down = running.url.rsplit(":", 1)[0] + ":9/v1"
    with serving(Upstream(down, "far")) as url:
        response = httpx.get(f"{url}/ready")
        assert (response.status_code, response.json()["status"]) == (503, "unreachable")
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}{CHAT}", json=body()).status_code == 502


def test_wrong_choices_are_refused_at_the_start(api: ScriptedAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidChoice, match="http://"):
        Upstream("localhost:8000", "far")
    with pytest.raises(InvalidChoice, match="canonical, sequential, vote"):
        Upstream(api.url, "far", method="rotor")
    with pytest.raises(InvalidChoice, match="at least 2"):
        Upstream(api.url, "far", votes=1)
    with pytest.raises(UnsupportedCombination, match="by content"):
        Upstream(api.url, "far", ordering="given")
    with pytest.raises(InvalidChoice, match="the name of one"):
        build_engine(EngineConfig(upstream=api.url), Settings())
    for wrong in ({"dtype": "float32"}, {"deterministic": True}, {"cache_gb": 2.0}, {"vllm": "http://127.0.0.1:9"}):
        with pytest.raises(InvalidChoice):
            EngineConfig(upstream=api.url, **wrong)
    with pytest.raises(InvalidChoice, match="votes"):
        EngineConfig(votes=3)
    with pytest.raises(InvalidChoice, match="max_prompt_tokens"):
        build_engine(EngineConfig("far", upstream=api.url), Settings(max_prompt_tokens=10))
    with pytest.raises(InvalidChoice, match="allowed methods of canonical"):
        Settings(methods=frozenset({"rotor"})).within(Upstream.methods)
    monkeypatch.setenv("INVARIANT_RAG_UPSTREAM_KEY", "key-2")
    engine = build_engine(EngineConfig("far", upstream=api.url, method="vote", name="mine"), Settings())
    engine.check_ready()
    engine.close()
    assert engine.name == "mine"
    assert api.keys[-1] == "Bearer key-2"


def test_a_gateway_never_imports_torch(api: ScriptedAPI) -> None:
    program = f"""
import sys
for name in ("torch", "transformers", "sentence_transformers", "faiss"):
    sys.modules[name] = None
import httpx
import invariant_rag.cli.serve as command

def ask(engine, settings, reranker, reserved):
    from invariant_rag.server.application import create_app
    from invariant_rag.server.serving import in_thread, server_of
    with in_thread(server_of(create_app(engine, settings, reranker), settings, "127.0.0.1", 0)) as url:
        for stream in (False, True):
            print(httpx.post(url + {CHAT!r}, json={{**{body()!r}, "stream": stream}}).text)

command._run = ask
from invariant_rag.cli import app
app(["serve", "far", "--upstream", {api.url!r}, "--port", "0", "--method", "vote"])
"""
    api.plan(Answer(body=completion()))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"content":"white"') == 2


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_invariant_rag", None)  # as if it were not installed
    with pytest.raises(ExtraRequired, match=r'pip install "invariant-rag\[vllm\]"'):
        build_engine(EngineConfig(vllm="http://127.0.0.1:9"), Settings())


def test_most_answers_decide_wherever_they_stand(api: ScriptedAPI, http: httpx.Client) -> None:
    for texts in (("white", "white", "red"), ("red", "white", "white")):
        api.plan(*(Answer(body=completion(each)) for each in texts))
        reply = http.post(CHAT, json=body(invariant={"method": "vote"})).json()
        assert reply["choices"][0]["message"]["content"] == "white"
        assert reply["invariant"]["vote"] == {"calls": 3, "agreed": 2}


def test_a_vote_before_an_api_that_is_busy_ends_at_once_with_when_to_come_back(
    api: ScriptedAPI, http: httpx.Client
) -> None:
    api.plan(Answer(429, refusal("slow down"), {"Retry-After": "9"}))
    response = http.post(CHAT, json=body(invariant={"method": "vote"}))
    assert (response.status_code, response.headers["retry-after"]) == (429, "9")
    assert len(api.bodies) <= 3


def test_the_orderings_that_are_listed_are_those_that_work(api: ScriptedAPI, http: httpx.Client) -> None:
    api.plan(Answer(body=completion("white")))
    choices = http.get("/v1/models").json()["data"][0]["invariant"]["choices"]
    documents = [{"text": text, "score": number} for number, text in enumerate(FLAGS)]
    assert set(choices) == {"canonical", "vote", "sequential"}
    for method, orderings in choices.items():
        for ordering in ("given", "lexical", "score"):
            wanted = body(documents=documents, invariant={"method": method, "ordering": ordering})
            response = http.post(CHAT, json=wanted)
            assert (response.status_code == 200) == (ordering in orderings), (method, ordering, response.text)
