"""Laws of every route: the event loop is free while bodies are parsed, and nothing outlives its client. Workers."""

import asyncio
import json
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event, Timer

import httpx
import pytest
from fastapi.routing import APIRoute

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.errors import InvalidObject, InvalidSchema
from invariant_rag.generation.json_schema import json_format
from invariant_rag.generation.structured import vocabulary
from invariant_rag.prompts.tokenization import literals_of
from invariant_rag.server import InProcess, Settings, endpoints
from invariant_rag.server import worker as workers
from invariant_rag.server.admission import FairQueue
from invariant_rag.server.application import create_app, router
from invariant_rag.server.errors import InvalidRequest
from invariant_rag.server.parsing import parse
from invariant_rag.server.worker import SchemaCompiler, Worker, WorkerFailed, Workers
from invariant_rag.testing import tiny_model, toy_tokenizer
from invariant_rag.words import split_words
from tests.server.conftest import CHAT, client_of, form, leaving, metric, required, wait_until

HEALTH_SECONDS = 0.2
END_SECONDS = 1.0  # that the process may compute for a request that nobody waits for: others compute here, too
STAY_SECONDS, DEADLINE_SECONDS = 0.3, 0.25
TEXT, TOKENS, RANK, RANK_2, JUDGE = "/v1/completions", "/tokenize", "/v1/rerank", "/v2/rerank", "/v1/judge"
TALK = {"messages": [{"role": "user", "content": "When does the ferry leave?"}]}
POSTS = tuple(each.path for each in router.routes if isinstance(each, APIRoute) and "POST" in each.methods)
ROUTES = {  # a body for each of them
    CHAT: {**TALK, "max_tokens": 2},
    TEXT: {"prompt": "The ferry", "max_tokens": 2},
    TOKENS: TALK,
    RANK: {"query": "ferry", "documents": ["a"]},
    RANK_2: {"query": "ferry", "documents": ["a"]},
    JUDGE: {"question": "Which?", "answers": ["a", "b"]},
}
PATTERN = {"type": "string", "pattern": "^([a-z]?){400}(a|b|[c-z]{1,90}){80}$"}
FERRY = "The ferry leaves at noon. "


def tools(count, properties):
    schema = {"type": "object", "properties": {f"property{each}": {"type": "string"} for each in range(properties)}}
    return [{"type": "function", "function": {"name": f"tool{each}", "parameters": schema}} for each in range(count)]


ARGUMENTS = json.dumps({str(n): n for n in range(200_000)})
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ARGUMENTS}}]}
TALKS, WITH_DOCUMENTS = (CHAT, TOKENS), (CHAT, TEXT, TOKENS, RANK)
HOSTILE = {
    "unknown fields": (POSTS, {f"field{each}": each for each in range(180_000)}),
    "lists": (POSTS, {"metadata": {"a": [[]] * 900_000}}),
    "nested": (TALKS, {"chat_template_kwargs": {"a": 0}}),  # see body_of
    "tools of many properties": (TALKS, {"tools": tools(110, 700)}),
    "many tools": (TALKS, {"tools": tools(30_000, 0)}),
    "wrong documents": (WITH_DOCUMENTS, {"documents": [1] * 1_000_000}),
    "empty documents": (WITH_DOCUMENTS, {"documents": [{}] * 900_000}),
    "documents": (WITH_DOCUMENTS, {"documents": ["a"] * 700_000}),
    "a long text": (WITH_DOCUMENTS, {"documents": [FERRY * 140_000]}),
    "a long title": (WITH_DOCUMENTS, {"documents": [{"text": "a", "title": FERRY * 140_000}]}),
    "long texts": ((*WITH_DOCUMENTS, RANK_2), {"documents": [FERRY * 1000] * 140}),
    "wrong messages": (TALKS, {"messages": [[]] * 900_000}),
    "a long question": (TALKS, {"messages": [{"role": "user", "content": "ferry " * 600_000}]}),
    "a text of lines": (TALKS, {"messages": [{"role": "user", "content": "a\n\nb " * 500_000}]}),
    "arguments": (TALKS, {"messages": [*TALK["messages"], CALL]}),
    "stops": ((CHAT, TEXT), {"stop": ["a"] * 700_000}),
    "bias": ((CHAT, TEXT), {"logit_bias": {str(each): 1.5 for each in range(250_000)}}),
    "prompts": ((TEXT, TOKENS), {"prompt": ["a"] * 700_000}),
    "token ids": ((TEXT,), {"prompt": [1] * 1_300_000}),
    "a long query": ((RANK, RANK_2), {"query": "ferry " * 600_000}),
    "answers": ((JUDGE,), {"answers": ["a"] * 700_000, "options": ["b"]}),
    "long answers": ((JUDGE,), {"answers": ["ferry " * 6000] * 100, "criteria": {"ferry" * 9: "ferry " * 40_000}}),
    "a judge's long question": ((JUDGE,), {"question": "ferry " * 600_000}),
    "a slow schema": ((CHAT,), {"response_format": form(required(a=PATTERN))}),
    "a schema that counts": ((CHAT,), {"response_format": form(required(a={"type": "array", "minItems": 10**6}))}),
}


def body_of(path, name):
    content = json.dumps({**ROUTES[path], **HOSTILE[name][1]}).encode()
    if name == "nested":
        content = content.replace(b'{"a": 0}', b'{"a":' * 600_000 + b"0" + b"}" * 600_000)
    assert len(content) <= Settings.max_body_bytes
    return content


@pytest.fixture(scope="module")
def target(model, monot5):
    """A server of a model whose answers never end by themselves."""
    with client_of(InProcess(model, caches={"": KeyValueCache()}), Settings(timeout=60), monot5) as http:
        yield http


@pytest.fixture(scope="module")
def hasty(monot5, tokenizer):
    """A server whose requests have little time, of a model with a long window: they take more, on every machine."""
    patient = tiny_model("llama", vocab_size=261, max_position_embeddings=65_536, eos_token_id=None)
    lm = InvariantModel(patient, tokenizer)
    lm.prepare(lm.chat_prompt(**TALK))  # what is loaded at first is loaded
    with client_of(InProcess(lm), Settings(timeout=DEADLINE_SECONDS), monot5) as http:
        yield http


@pytest.mark.parametrize("path", POSTS)
def test_health_is_answered_at_once_while_a_route_reads_hostile_bodies(path, target):
    late = [name for name, (paths, _) in HOSTILE.items() if path in paths]
    for _ in range(4):  # others compute on this machine, too
        late = [name for name in late if slowest_health(target, path, body_of(path, name)) > HEALTH_SECONDS]
    assert not late


def slowest_health(http, path, body):
    """Return the longest time that /health took, asked every 10 ms while the server has a body."""
    slowest = 0.0
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=http.base_url, timeout=90) as probe:
        probe.get("/health")
        sent = pool.submit(http.post, path, content=body, headers={"content-type": "application/json"})
        while not sent.done():
            start = time.perf_counter()
            assert probe.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - start)
            time.sleep(0.01)
    assert sent.result().status_code in {200, 400, 413}, sent.result().text
    return slowest


def test_a_body_is_parsed_where_the_work_can_be_stopped(target, monkeypatch):
    threads, body = threading.active_count(), body_of(CHAT, "lists")
    with monkeypatch.context() as patch:
        patch.setattr(endpoints, "_PARSING_SECONDS", 0.001)
        response = target.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, "parsed within 0.001 seconds" in response.text) == (413, True)
    assert computed_in(0.3) < 0.1
    assert threading.active_count() <= threads + 1
    assert target.post(CHAT, json=ROUTES[CHAT]).status_code == 200


def test_other_threads_run_while_a_long_text_is_tokenized_or_split_for_citations(embedded):
    encode = literals_of(embedded.tokenizer).encode_literal
    for work, given in ((encode, [FERRY * 30_000]), (split_words, FERRY * 200_000)):
        longest = 0.0
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work, given)
            begun = last = time.perf_counter()
            while not done.done():
                time.sleep(0.005)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
        assert done.result()
        assert longest < (last - begun) / 3, work


LONG = "The ferry to Ostra leaves at noon, and the mill of Brenn grinds barley. "
TALKING = {**TALK, "max_tokens": 3000, "temperature": 2.0, "seed": 1}
TEXTS = {"prompt": ["The ferry", "The mill"], "max_tokens": 3000, "temperature": 2.0, "n": 2}
RANKED = {"query": "ferry", "documents": [f"{each} {LONG * 55}" for each in range(900)]}
ABANDONED = {
    CHAT: (CHAT, TALKING),
    f"{CHAT}, streamed": (CHAT, {**TALKING, "stream": True}),
    TEXT: (TEXT, TEXTS),
    f"{TEXT}, streamed": (TEXT, {**TEXTS, "stream": True}),
    TOKENS: (TOKENS, {"messages": [{"role": "user", "content": LONG * 3000}]}),
    RANK: (RANK, RANKED),
    RANK_2: (RANK_2, RANKED),
    JUDGE: (JUDGE, {"question": "Which?", "answers": ["a", "b"], "explain": True, "max_tokens": 3000}),
}
LONGER = {"messages": [{"role": "user", "content": LONG * 9000}]}


@pytest.mark.parametrize("name", ABANDONED)
def test_nothing_runs_on_when_its_client_has_left_or_its_deadline_has_passed(name, hasty, target):
    path, content = ABANDONED[name]
    target.post(path, json=ROUTES[path])  # what is loaded at first is loaded, and a worker starts
    with leaving(target, path, content):
        time.sleep(STAY_SECONDS)
    check_nothing_runs(target)
    response = hasty.post(path, json=LONGER if path == TOKENS else content)
    streamed = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert response.status_code == (200 if streamed else 504)
    assert json.loads(streamed[-1] if streamed else response.text)["error"]["code"] == "deadline_exceeded"
    check_nothing_runs(hasty)


def test_an_answer_that_is_ready_when_its_deadline_has_passed_is_late(target, model):
    target.post(TOKENS, json=TALK)  # a worker starts

    async def asked():
        def tokens(_call):
            loop.call_soon_threadsafe(time.sleep, 2 * DEADLINE_SECONDS)  # it is busy, as under load
            return []

        engine, loop = InProcess(model), asyncio.get_running_loop()
        engine.tokens = tokens
        transport = httpx.ASGITransport(create_app(engine, Settings(timeout=DEADLINE_SECONDS)))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(TOKENS, json=TALK)

    assert asyncio.run(asked()).status_code == 504


def check_nothing_runs(http):
    """Check that places are free and nobody computes before the process has computed for long."""
    begun = time.process_time()
    wait_until(lambda: metric(http, "active_requests") == 0)
    wait_until(lambda: computed_in(0.3) < 0.05)
    assert time.process_time() - begun < END_SECONDS


def computed_in(seconds):
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def text(**keywords):
    return required(a={"type": "string", **keywords})


SLOW = text(pattern="^a{50000}$")
FAN = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}


def tag_of(**keywords):
    """Return the structural tag of an object with a text of these keywords."""
    return json.dumps({"type": "structural_tag", "format": json_format(text(**keywords))})


def test_a_schema_that_compiles_too_long_is_refused_and_remembered(monkeypatch):
    many = tiny_model("llama", vocab_size=32_000, max_position_embeddings=8192)  # tokens, of which few have a text
    function = {"type": "function", "function": {"name": "f", "parameters": SLOW}}
    given = {"response_format": form(SLOW), "tools": [function]}
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    with client_of(InProcess(InvariantModel(many, toy_tokenizer()), "many"), Settings(timeout=60)) as http:
        http.post(CHAT, json={**asked, "response_format": form(text())})
        for field, value in given.items():
            for seconds in (0.3, 0.001):  # were it compiled again, the error would be about the second
                monkeypatch.setattr(workers, "COMPILING_SECONDS", seconds)
                response = http.post(CHAT, json={**asked, field: value})
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["param"]) == (400, "invalid_schema", field)
                assert "0.3 seconds" in error["message"]


def test_a_schema_is_compiled_once_however_many_ask_for_it_and_one_of_them_leaves(model):
    words, compiler = vocabulary(model.tokenizer, 288), SchemaCompiler(1, FairQueue(1, 1))
    tag, left = tag_of(maxLength=8_000), Event()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(compiler.compile, "", left, words, tag)
        others = [pool.submit(compiler.compile, "", Event(), words, tag) for _ in range(3)]
        Timer(0.02, left.set).start()
        with pytest.raises(CancelledError):
            first.result()
        found = [each.result() for each in others]
    assert all(each is found[0] for each in found)
    assert compiler.compile("", Event(), words, tag) is found[0]
    compiler.compile("", Event(), words, tag_of())  # there is room for one
    assert compiler.compile("", Event(), words, tag) is not found[0]


NEVER = {"type": "string", "pattern": "^(a|a)*$"}
LONG_TEXT = "a" * 60 + "!"  # on which it takes for ever


@pytest.mark.parametrize(("work", "together"), [("compiled", 1), ("validated", 2)])
def test_slow_schemas_of_one_tenant_do_not_keep_those_of_another_waiting(work, together, model, monkeypatch):
    monkeypatch.setattr(workers, "VALIDATION_SECONDS", 1.0)
    words, compiling = vocabulary(model.tokenizer, 288), FairQueue(1, 1)
    compiler = SchemaCompiler(1 << 30, compiling)
    turns = compiling if work == "compiled" else workers.VALIDATION_TURNS

    def run(tenant, number):
        if work == "compiled":
            compiler.compile(tenant, Event(), words, tag_of(maxLength=8_000 + number))
            return
        value, error = (LONG_TEXT, InvalidSchema) if tenant == "greedy" else (1, InvalidObject)
        with pytest.raises(error):
            workers.validate(value, NEVER, tenant, Event())

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(run, "greedy", number) for number in range(6)]
        wait_until(lambda: turns.waiting == 6 - together)
        run("modest", 9)
        assert sum(each.done() for each in asked) <= 2 * together


def test_a_validation_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(workers, "VALIDATION_SECONDS", 0.3)
    for value, schema in (
        (LONG_TEXT, NEVER),
        ({LONG_TEXT: 1}, {"patternProperties": {"^(a|a)*$": {}}}),
        (1, {"$ref": "#/$defs/d0", "$defs": {**FAN, "d60": {}}}),
    ):
        with pytest.raises(InvalidSchema, match=r"0\.3 seconds"):
            workers.validate(value, schema, "", Event())
        with pytest.raises(InvalidObject):
            workers.validate(value, {"type": "null"}, "", Event())


def test_a_worker_is_stopped_in_time_answers_the_next_call_and_tells_nothing_of_what_clients_send(model, capfd):
    worker, left, start = Worker(), Event(), time.monotonic()
    assert worker.call(5, left, divmod, 7, 2) == (3, 1)
    with pytest.raises(TimeoutError):
        worker.call(0.1, left, time.sleep, 60)
    assert worker.call(5, left, divmod, 7, 2) == (3, 1)
    Timer(0.1, left.set).start()
    with pytest.raises(CancelledError):
        worker.call(60, left, time.sleep, 60)
    assert time.monotonic() - start < 30
    with pytest.raises(CancelledError):
        Workers(0).call(5, left, divmod, 7, 2)  # waits for a worker that is idle
    with pytest.raises(InvalidRequest, match="body of JSON") as found:
        worker.call(5, Event(), parse, "chat", b"{", Settings(), "")
    assert "openapi.json" in found.value.hint
    with pytest.raises(WorkerFailed, match="ValueError") as failed:
        worker.call(5, Event(), int, "secret")
    assert "secret" not in str(failed.value)
    tag = tag_of(pattern="^(?=secret)s$")  # of which xgrammar's own code warns, with the pattern
    worker.call(60.0, Event(), workers.compile_serialized, vocabulary(model.tokenizer, 288).serialized, tag)
    worker.stop()
    assert capfd.readouterr().err == ""
