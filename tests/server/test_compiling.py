"""Workers: processes that parse bodies and compile schemas, and that can be stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event, Timer
from typing import Any

import httpx
import pytest
import torch
from xgrammar import GrammarMatcher, allocate_token_bitmask

from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidObject, InvalidSchema
from invariant_rag.generation.json_schema import json_format
from invariant_rag.generation.structured import vocabulary
from invariant_rag.server import InProcess, Settings
from invariant_rag.server import worker as workers
from invariant_rag.server.admission import FairQueue
from invariant_rag.server.errors import InvalidRequest
from invariant_rag.server.parsing import parse
from invariant_rag.server.worker import SchemaCompiler, Worker, WorkerFailed, Workers
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.toy_inputs import toy_tokenizer
from tests.server.conftest import serving

SLOW = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a{50000}$"}}, "required": ["a"]}
LENGTHY = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20_000}}, "required": ["a"]}
QUICK = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A server whose model has many tokens, of which few have a text."""
    model = tiny_model("llama", vocab_size=32_000, max_position_embeddings=8192)
    engine = InProcess(InvariantModel(model, toy_tokenizer()), "many")
    with serving(engine, Settings(timeout=60)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def body(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    given = form if field == "response_format" else tools
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, field: given}


@pytest.mark.parametrize("field", ["response_format", "tools"])
def test_a_schema_that_compiles_too_long_is_refused_and_remembered(
    field: str, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    http.post("/v1/chat/completions", json=body(field, QUICK))
    for seconds in (0.3, 0.001):  # were it compiled again, the error would be about the second
        monkeypatch.setattr(workers, "COMPILING_SECONDS", seconds)
        response = http.post("/v1/chat/completions", json=body(field, SLOW))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_schema", field)
        assert "0.3 seconds" in error["message"]


def tag_of(schema: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": json_format(schema)})


def test_a_schema_is_compiled_once_however_many_ask_for_it_and_one_of_them_leaves(model: InvariantModel) -> None:
    words, compiler = vocabulary(model.tokenizer, 288), SchemaCompiler(1, FairQueue(1, 1))
    tag, left = tag_of(LENGTHY), Event()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(compiler.compile, "", left, words, tag)
        others = [pool.submit(compiler.compile, "", Event(), words, tag) for _ in range(3)]
        Timer(0.02, left.set).start()
        with pytest.raises(CancelledError):
            first.result()
        found = [each.result() for each in others]
    assert all(each is found[0] for each in found)
    assert compiler.compile("", Event(), words, tag) is found[0]
    compiler.compile("", Event(), words, tag_of(QUICK))  # there is room for one
    assert compiler.compile("", Event(), words, tag) is not found[0]
    mine, theirs = (allocate_token_bitmask(1, 288) for _ in range(2))
    GrammarMatcher(words.compile(tag_of(LENGTHY))).fill_next_token_bitmask(mine)
    GrammarMatcher(found[0]).fill_next_token_bitmask(theirs)
    assert torch.equal(mine, theirs)


def test_slow_schemas_of_one_tenant_do_not_keep_those_of_another_waiting(model: InvariantModel) -> None:
    words, compiler = vocabulary(model.tokenizer, 288), SchemaCompiler(1 << 30, FairQueue(1, 1))
    slow = [{"type": "object", "properties": {"a": {"type": "string", "maxLength": 20_000 + n}}} for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(compiler.compile, "greedy", Event(), words, tag_of(each)) for each in slow]
        while compiler._turns.waiting < 5:
            time.sleep(0.001)
        compiler.compile("modest", Event(), words, tag_of(QUICK))
        assert sum(each.done() for each in asked) <= 2


FAN = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("a" * 60 + "!", {"pattern": "^(a|a)*$"}),
        ({"a" * 60 + "!": 1}, {"patternProperties": {"^(a|a)*$": {}}}),
        (1, {"$ref": "#/$defs/d0", "$defs": {**FAN, "d60": {}}}),
    ],
    ids=["pattern", "names", "references"],
)
def test_a_validation_that_never_ends_is_stopped(
    value: Any, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "VALIDATION_SECONDS", 0.3)
    with pytest.raises(InvalidSchema, match=r"0\.3 seconds"):
        workers.validate(value, schema, Event())
    with pytest.raises(InvalidObject):
        workers.validate(value, {"type": "null"}, Event())


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker()
    yield found
    found.stop()


def test_a_call_that_takes_too_long_is_stopped_and_the_next_one_answered(worker: Worker) -> None:
    assert worker.call(5, Event(), divmod, 7, 2) == (3, 1)
    with pytest.raises(TimeoutError):
        worker.call(0.1, Event(), time.sleep, 60)
    assert worker.call(5, Event(), divmod, 7, 2) == (3, 1)


def test_a_call_that_nobody_waits_for_is_stopped(worker: Worker) -> None:
    left = Event()
    worker.call(5, left, divmod, 7, 2)
    Timer(0.1, left.set).start()
    start = time.monotonic()
    with pytest.raises(CancelledError):
        worker.call(60, left, time.sleep, 60)
    assert time.monotonic() - start < 30


def test_what_a_function_raises_comes_back_without_texts_unless_it_is_ours(worker: Worker) -> None:
    with pytest.raises(InvalidRequest, match="body of JSON") as found:
        worker.call(5, Event(), parse, "chat", b"{", Settings(), "")
    assert "openapi.json" in found.value.hint
    with pytest.raises(WorkerFailed, match="ValueError") as failed:
        worker.call(5, Event(), int, "secret")
    assert "secret" not in str(failed.value)


def test_calls_wait_for_a_worker_that_is_idle() -> None:
    workers, gone = Workers(0), Event()
    gone.set()
    with pytest.raises(CancelledError):
        workers.call(5, gone, divmod, 7, 2)
