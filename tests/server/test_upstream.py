"""Models elsewhere, over real HTTP: `RemoteModel`, the client of a server, and servers before another API."""

import json
import sys
from dataclasses import replace
from itertools import permutations, product

import httpx
import openai
import pytest

from invariant_rag import Prompt, RemoteModel, Segment, SegmentSet, errors
from invariant_rag.api_models import PlainRequests
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.prompts import DEFAULT_SYSTEM, Turn
from invariant_rag.segments import Slot, document_rendering
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.engines.upstream import Upstream
from invariant_rag.server.settings import EngineConfig
from invariant_rag.testing.rounding import rounding
from tests.server.conftest import CHAT, FLAGS, ask, body, client_of, form, served, serving, stable, wait_until
from tests.server.scripted import USAGE, Answer, completion, events, refusal, scripted_api
from tests.server.test_limits import TRACE
from tests.server.test_requests import ASKED, COLOUR, QUESTION, SEARCH


def asked(*parts):
    """Return a conversation whose user gives documents before the question."""
    return {"messages": [{"role": "user", "content": [*parts, QUESTION]}]}


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
SEGMENTS = [Segment(text, title=f"Sheet {number}") for number, text in enumerate(FLAGS)]
SLOTS = [Slot(f"[{n}] ", "\n", number=str(n)) for n in range(1, 5)]
SCORED = SegmentSet(Segment(text, score=score) for text, score in zip(FLAGS, (3.0, 1.0, 2.0, -1.0), strict=True))
TEXT = Prompt.of("Read:\n", SegmentSet(FLAGS), f"\n{QUESTION}", rendering=document_rendering)
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "name": "search", "arguments": {}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": SegmentSet(SEGMENTS)}
READ, CALLING = asked(SegmentSet(SEGMENTS)), {"messages": ASKED, "tools": [TOOL], "tool_choice": "required"}
NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
REQUESTS = {
    "a conversation": AnswerRequest(**READ, citations=True, logprobs=True, top_logprobs=3),
    "numbered documents": AnswerRequest(**asked(SegmentSet(SEGMENTS, slots=SLOTS)), citations=True),
    "several sampled answers": AnswerRequest(**READ, temperature=2.0, top_p=0.9, top_k=90, min_p=0.001, seed=1, n=3),
    "up to a stop string": AnswerRequest(**READ, stop=("ite",)),
    "a completion": AnswerRequest(prompt=TEXT, logprobs=True, top_logprobs=2, stop=(".",)),
    "an object": AnswerRequest(messages=ASKED, schema=NUMBERS, temperature=1.0, seed=2),
    "calls": AnswerRequest(**CALLING),
    "one tool": AnswerRequest(**READ, tools=[TOOL], tool_choice="search", parallel=False, max_new_tokens=200),
    "results of tools": AnswerRequest(messages=[*ASKED, CALLED, RESULT], tools=[TOOL]),
    "too short for an object": AnswerRequest(messages=ASKED, schema=NUMBERS, max_new_tokens=5),
    "too short for calls": AnswerRequest(**CALLING, max_new_tokens=10),
    "scores": AnswerRequest(**asked(SCORED)),
    "another method": AnswerRequest(**READ),
}
ENDS = {"one tool": "tool_calls", "too short for an object": "length", "too short for calls": "length"}
CHOICES = {"another method": {"method": "sequential", "ordering": "given"}, "scores": {"ordering": "score"}}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_the_same_reply_here_and_there(name, base_url, embedded):
    request, choices, remote = REQUESTS[name], CHOICES.get(name, {}), RemoteModel(f"{base_url}/v1")
    request = replace(request, max_new_tokens=request.max_new_tokens or 48)
    local = Answering(embedded.with_method(**choices), request).reply()
    bound = 2 * rounding(embedded.logits, embedded.chat_prompt(QUESTION, FLAGS))  # a logit less a sum of logits
    *deltas, streamed = remote.stream_reply(request, choices=choices)
    for reply in (remote.reply(request, choices=choices), streamed):
        for own, other in zip(local.answers, reply.answers, strict=True):
            assert replace(own, generation=None, logprobs=None) == replace(other, logprobs=None)
            for pair in zip(own.logprobs or (), other.logprobs or (), strict=True):
                one, two = ([each.logprob, *(top for _, top in each.top)] for each in pair)
                assert one == pytest.approx(two, abs=bound)
        assert reply.usage == replace(local.usage, cached_tokens=reply.usage.cached_tokens)
        assert {**reply.ledger, "cached_tokens": 0} == {**local.ledger, "cached_tokens": 0}
    assert not request.segments or (local.ledger["sets"], local.ledger["invariant"]) == ([4], name != "another method")
    assert local.first.finish_reason == ENDS.get(name, local.first.finish_reason)
    for index, answer in enumerate(streamed.answers):
        assert "".join(each.content for each in deltas if each.index == index) == answer.content


def test_errors_of_the_server_are_those_of_the_library(base_url):
    beams = replace(REQUESTS["a completion"], options={"num_beams": 2})
    remote, away = RemoteModel(f"{base_url}/v1"), RemoteModel("http://127.0.0.1:9/v1", max_retries=0)
    large = RemoteModel(f"{base_url}/v1", model="large")
    for error, told, call in (
        (errors.ContextOverflow, "4096", lambda: remote.chat(ASKED, max_tokens=4096)),
        (errors.InvalidTool, "names", lambda: remote.chat(ASKED, tools=[TOOL, TOOL])),
        (errors.RemoteError, "colour: unknown field", lambda: remote.chat(ASKED, colour="red")),
        (errors.RemoteError, "small", lambda: list(large.stream_chat(ASKED))),
        (errors.RemoteError, "cannot be reached", lambda: away.chat(ASKED)),
        (errors.InvalidPrompt, "messages: expected a list", lambda: away.chat("hi")),
        (errors.InvalidPrompt, "messages: expected a list.* at index 0", lambda: away.chat([3])),
        (errors.InvalidSegment, "text", lambda: remote.complete([SegmentSet([[1, 2]])])),
        (errors.InvalidChoice, "base_url", lambda: RemoteModel("localhost:8000")),
        (errors.UnsupportedCombination, "num_beams", lambda: remote.reply(beams)),
    ):
        with pytest.raises(error, match=told):
            call()
    assert remote.context_window() == 4096


# --- servers before another API: the documents are sorted or shuffled, and what goes wrong there is told ---

MILL = "What grinds the mill of Ostra?"  # the plain model answers it differently in another order


@pytest.fixture(scope="module")
def gateway(embedded):
    """Before an API that is a server of the plain model, which reads documents in the order in which it gets them."""
    plain = serving(InProcess(embedded.with_method("sequential"), "plain"))
    with plain as api, serving(Upstream(f"{api}/v1", "plain", name="small", votes=4)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def api():
    with scripted_api() as running:
        yield running


@pytest.fixture(scope="module")
def http(api):
    """A client of a gateway before an API whose answers the test writes."""
    engine = Upstream(api.url, "far", key="key-of-the-gateway", votes=3, timeout=3.0)
    with client_of(engine, Settings(timeout=20)) as client:
        yield client


def test_every_order_makes_one_request_and_the_answer_is_that_of_the_sorted_documents(gateway, embedded):
    replies = [stable(ask(gateway, list(order), MILL)) for order in permutations(FLAGS)]
    assert all(reply == replies[0] for reply in replies)
    turns = [Turn("system", (DEFAULT_SYSTEM,)), Turn("user", (SegmentSet(FLAGS), "\nQuestion: ", MILL))]
    (request,) = PlainRequests().of_turns(turns)
    plain = embedded.chat_prompt(messages=[{"role": turn.role, "content": turn.text} for turn in request.turns])
    assert replies[0]["choices"][0]["message"]["content"] == embedded.generate(plain, max_new_tokens=256).text
    told = {"method": "canonical", "ordering": "lexical", "invariant": True, "sets": [4]}
    assert told.items() <= replies[0]["invariant"].items()
    assert any("one order" in warning for warning in replies[0]["invariant"]["warnings"])


def test_a_stream_is_the_whole_reply_in_pieces_and_nothing_of_a_request_is_lost(gateway, base_url):
    remote, found, most = RemoteModel(str(gateway.base_url)), {}, 0
    for name, request in REQUESTS.items():
        *pieces, streamed = remote.stream_reply(request)
        found[name] = remote.reply(request)
        assert (streamed.answers, len(streamed.answers)) == (found[name].answers, request.n), name
        assert streamed.usage.completion_tokens == found[name].usage.completion_tokens
        for index, answer in enumerate(streamed.answers):
            written = [each.content for each in pieces if each.index == index and each.content]
            assert "".join(written) == answer.content
            most = max(most, len(written))
    assert most > 2
    read, completed = found["a conversation"].first, found["a completion"].first
    assert [(span.start, span.end, span.segment.text) for span in read.citations] == [(0, 5, FLAGS[0])]
    for each in (read, completed):
        assert "".join(token.token for token in each.logprobs).startswith(each.content)
    assert isinstance(json.loads(found["an object"].first.content)["n"], int)
    assert [call.name for call in found["one tool"].first.tool_calls] == ["search"]
    for lm, slots in product((remote, RemoteModel(f"{base_url}/v1")), (None, SLOTS[:3])):
        listed = [SegmentSet(order, slots=slots) for order in permutations(SEGMENTS[:3])]
        completed = [lm.complete([each, f"\n{QUESTION}"], max_tokens=6, logprobs=1) for each in listed]
        for replies in (completed, [lm.chat(**asked(each), max_tokens=16) for each in listed]):
            assert all(stable(each) == stable(replies[0]) for each in replies)
            assert replies[0]["invariant"]["sets"] == [3]


def test_numbers_in_an_answer_stay_and_lead_to_the_documents(api, http):
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("White [", "2].")]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}
    slots = [{"before": f"[{n}] ", "after": "\n", "number": str(n)} for n in range(1, 5)]
    part = {"type": "documents", "documents": [{"text": text} for text in FLAGS], "slots": slots}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
    api.plan(Answer(body=events(*chunks, last, b"[DONE]")))
    response = http.post(CHAT, json={"messages": messages, "stream": True})
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in response.text.splitlines() if "{" in line]
    assert "".join(delta.get("content", "") for delta in deltas) == "White [2]."
    second = api.bodies[0]["messages"][0]["content"].split("[2] ")[1].split("\n")[0]
    cited = [each for delta in deltas for each in delta.get("citations", ()) if each["text"] == "[2]"]
    assert [each["sources"][0]["document"]["text"] for each in cited] == [second] != [FLAGS[1]]


SLOW_DOWN = Answer(429, refusal("Rate limit of org-1"), {"Retry-After": "7"})
TOO_LONG = refusal("8 tokens", code="context_length_exceeded")


@pytest.mark.parametrize(
    ("answer", "status", "code", "told"),
    [
        (SLOW_DOWN, 429, "rate_limit_exceeded", "no more requests"),
        (Answer(401, refusal("Incorrect key key-of-the-gateway")), 502, "upstream_failed", "answered 401"),
        (Answer(404, refusal("No such model for org-1")), 502, "upstream_failed", "answered 404"),
        (Answer(503, refusal("Trace of org-1"), {"Retry-After": "9"}), 502, "upstream_failed", "answered 503"),
        (Answer(504, b"<html>"), 504, "deadline_exceeded", "answered 504"),
        (Answer(200, b"<html>"), 502, "upstream_failed", "expected JSON"),
        (Answer(200, {"choices": 3}), 502, "upstream_failed", "with choices"),
        (Answer(200, {"choices": [{"message": 3}]}), 502, "upstream_failed", "a choice"),
        (Answer(200, {"choices": [{"message": {"content": "a"}}]}), 502, "upstream_failed", "to its end"),
        (Answer(400, refusal("seed: too odd", param="seed")), 400, "upstream_refused", "seed: too odd"),
        (Answer(400, refusal("Bad key key-of-the-gateway.")), 400, "upstream_refused", "Bad key [key]."),
        (Answer(400, TOO_LONG), 400, "context_length_exceeded", "8 tokens"),
        (Answer(200, completion(), seconds=20), 504, "deadline_exceeded", "in time"),
    ],
)
def test_what_the_api_answers_is_told_in_our_words(answer, status, code, told, api, http):
    for stream in (False, True) if answer.status > 200 else (False,):  # a body that is no stream: below
        api.plan(answer)
        response = http.post(CHAT, json=body(stream=stream, seed=1))
        error = response.json()["error"]
        assert (response.status_code, error["code"], told in error["message"]) == (status, code, True), error
        assert not any(secret in response.text for secret in ("org-1", "key-of-the-gateway", api.url))
        assert response.headers.get("retry-after") == (answer.headers or {}).get("Retry-After")


FIRST, OTHER = ({"choices": [{"index": index, "delta": {"content": "whi"}}]} for index in (0, 5))


@pytest.mark.parametrize("rest", [b"break", b"[DONE]", refusal("Trace of org-1"), b"{no json", OTHER])
def test_a_stream_that_breaks_off_ends_with_an_error(rest, api, http):
    api.plan(Answer(body=events(FIRST, rest)))
    response = http.post(CHAT, json=body(stream=True))
    *_, last = (line for line in response.text.splitlines() if line.startswith("data: "))
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "upstream_failed"
    assert "[DONE]" not in response.text
    assert "org-1" not in response.text


def test_what_was_asked_is_what_the_api_gets_with_the_names_of_request_and_trace(api, http):
    top = [{"token": "white", "logprob": -0.1, "bytes": None}, {"token": "red", "logprob": -2.5, "bytes": None}]
    answer = completion("{}")
    answer["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    api.plan(Answer(body=answer))
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Nothing."}
    messages = [{"role": "user", "content": QUESTION}, {**called, "reasoning_content": "Hm."}, result]
    sent = {"temperature": 0.5, "top_p": 0.9, "seed": 4, "stop": ["x"], "parallel_tool_calls": False, "max_tokens": 5}
    sent |= {"tools": [SEARCH], "tool_choice": {"type": "function", "function": {"name": "search"}}}
    sent |= {"response_format": form({"type": "object"}, strict=True), "logprobs": True, "top_logprobs": 2}
    sent |= {"frequency_penalty": 0.5, "presence_penalty": -1.0, "logit_bias": {"7": 3.0}}
    asked = {"messages": messages, "documents": FLAGS[:1], "user": "ada", **sent}
    response = http.post(CHAT, json=asked, headers=TRACE)
    assert response.status_code == 200, response.text
    (got,) = api.bodies
    assert (sent | {"model": "far"}).items() <= got.items()
    assert "user" not in got
    user = {"role": "user", "content": f"Document: {FLAGS[0]}\n\nQuestion: {QUESTION}"}
    assert got["messages"][1:] == [user, called, result]
    reply = response.json()
    assert (reply["usage"]["total_tokens"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]) == (9, 3)
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == top
    assert TRACE.items() <= api.headers[-1].items()
    assert response.headers["x-request-id"] == TRACE["x-request-id"]
    assert "invariant_rag_cache_hits" not in http.get("/metrics").text  # there is no cache here: 0 would be a lie


CUT_CALL = completion(tool_calls=[{"id": "1", "function": {"name": "a", "arguments": "{"}}])


def test_what_an_api_cannot_do_is_refused_and_promises_that_it_breaks_are_told(api, http):
    api.plan(Answer(body=completion()))
    for path, sent, told in (
        (CHAT, body(invariant={"method": "rotor"}), "expected one of canonical, sequential, vote"),
        (CHAT, body(invariant={"ordering": "given"}), "expected an ordering by content"),
        (CHAT, body(invariant={"overflow": "drop_last"}), "expected no invariant.overflow"),
        (CHAT, body(invariant={"method": "vote"}, n=2), "expected n=1"),
        (CHAT, body(response_format=form({"$ref": "https://example.org/s.json"})), '"invalid_schema"'),
        ("/tokenize", body(), "expected an engine with a tokenizer"),
        ("/v1/judge", {"answers": ["a", "b"]}, "expected an engine that scores"),
    ):
        response = http.post(path, json=sent)
        assert (response.status_code, told in response.text, api.bodies) == (400, True, []), response.text
    for reply, more, status, told in (
        (completion('{"colour": '), {"response_format": form(COLOUR)}, 422, '"incomplete_object"'),
        (completion('{"colour": "blue"}'), {"response_format": form(COLOUR)}, 422, '"invalid_object"'),
        (completion(), {"logprobs": True}, 400, "log-probabilities"),
        (CUT_CALL, {"tools": [SEARCH]}, 502, "no JSON"),
        ({**completion(), "usage": None}, {}, 200, "how many tokens"),
    ):
        api.plan(Answer(body=reply))
        response = http.post(CHAT, json=body(**more))
        assert (response.status_code, told in response.text) == (status, True), response.text


def test_the_api_is_left_when_the_client_leaves_and_may_have_another_name_for_the_limit(api):
    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    with client_of(Upstream(api.url, "far", votes=3)) as http:
        for method, connections in (("canonical", 1), ("vote", 3)):
            api.plan(Answer(body=completion(), seconds=20))
            with pytest.raises(httpx.ReadTimeout):
                http.post(CHAT, json=body(invariant={"method": method}), timeout=0.2)
            wait_until(lambda: api.left == connections)  # noqa: B023
        api.plan(Answer(400, refusal(message, param="max_tokens")), Answer(body=completion()))
        assert [http.post(CHAT, json=body(max_tokens=9)).status_code for _ in range(2)] == [200, 200]
    assert [each.get("max_completion_tokens") for each in api.bodies] == [None, 9, 9]
    assert "max_tokens" not in api.bodies[-1]


def test_an_engine_is_built_for_an_api_and_ready_when_that_answers(api, monkeypatch):
    monkeypatch.setenv("INVARIANT_RAG_UPSTREAM_KEY", "key-2")
    with client_of(build_engine(EngineConfig("far", upstream=api.url, name="mine"), Settings())) as http:
        assert (http.get("/ready").json()["status"], api.headers[-1]["authorization"]) == ("ready", "Bearer key-2")
        assert http.get("/v1/models").json()["data"][0]["id"] == "mine"
    with client_of(Upstream("http://127.0.0.1:9/v1", "far")) as http:
        response = http.get("/ready")
        assert (response.status_code, response.json()["status"]) == (503, "unreachable")
        assert [http.get("/health").status_code, http.post(CHAT, json=body()).status_code] == [200, 502]
    monkeypatch.setitem(sys.modules, "vllm_invariant_rag", None)  # as if it were not installed
    with pytest.raises(errors.ExtraRequired, match=r'pip install "invariant-rag\[vllm\]"'):
        build_engine(EngineConfig(vllm=api.url), Settings())
    with pytest.raises(errors.InvalidChoice, match="at least 2"):
        Upstream(api.url, "far", votes=1)


GATEWAY = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "sentence_transformers", "faiss")))
import invariant_rag.remote
from invariant_rag.cli import app
app()
"""


def test_neither_a_gateway_nor_the_client_imports_torch(api, tmp_path):
    api.plan(Answer(body=completion()))
    options = ["serve", "far", "--upstream", api.url, "--method", "vote"]
    with served([sys.executable, "-c", GATEWAY, *options], tmp_path / "log") as (url, _):
        for stream in (False, True):
            assert '"content":"white"' in httpx.post(f"{url}{CHAT}", json=body(stream=stream)).text


def test_most_answers_decide_the_order_given_is_kept_where_wanted_and_a_busy_api_ends_a_vote_at_once(api, http):
    asked = body(invariant={"method": "vote"})
    for texts in (("white", "white", "red"), ("red", "white", "white")):
        api.plan(*(Answer(body=completion(each)) for each in texts))
        reply = http.post(CHAT, json=asked).json()
        assert reply["choices"][0]["message"]["content"] == "white"
        assert reply["invariant"]["vote"] == {"calls": 3, "agreed": 2}
        assert (reply["usage"]["prompt_tokens"], len({str(each) for each in api.bodies})) == (3 * 7, 3)
    api.plan(Answer(body=completion("red")), Answer(body=completion("white")))
    assert '{"content":"white"}' in http.post(CHAT, json={**asked, "stream": True}).text
    api.plan(Answer(body=completion()))
    asked_in = {**body(invariant={"method": "sequential"}), "documents": FLAGS[::-1]}
    told = http.post(CHAT, json=asked_in).json()["invariant"]
    assert (told["invariant"], told["ordering"]) == (False, "given")
    written = api.bodies[0]["messages"][-1]["content"]
    assert sorted(FLAGS, key=written.index) == FLAGS[::-1]
    api.plan(SLOW_DOWN)
    response = http.post(CHAT, json=asked)
    assert (response.status_code, response.headers["retry-after"], len(api.bodies) <= 3) == (429, "7", True)


def test_the_card_of_a_gateway_says_whether_a_toy_is_behind_it_and_lists_the_orderings_that_work(gateway, api, http):
    """As what is behind says of that model: nothing means no, and another time it may say something else."""
    assert gateway.models.retrieve("small").to_dict()["toy"] is True
    for card, toy in (({"id": "far"}, False), ({"id": "far", "toy": True}, True), ({"id": "near", "toy": True}, False)):
        api.card = card
        (found,) = http.get("/v1/models").json()["data"]
        assert found["toy"] == toy
    api.plan(Answer(body=completion("white")))
    documents = [{"text": text, "score": number} for number, text in enumerate(FLAGS)]
    assert set(found["invariant"]["choices"]) == {"canonical", "vote", "sequential"}
    for method, orderings in found["invariant"]["choices"].items():
        for ordering in ("given", "lexical", "score"):
            wanted = body(documents=documents, invariant={"method": method, "ordering": ordering})
            assert (http.post(CHAT, json=wanted).status_code == 200) == (ordering in orderings), (method, ordering)
