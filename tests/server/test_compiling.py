"""Workers: processes that parse bodies, compile schemas and validate answers, and that can be stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
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
from invariant_rag.testing import tiny_model, toy_tokenizer
from tests.server.conftest import CHAT, client_of, form, wait_until


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", **keywords}}, "required": ["a"]}


SLOW, LENGTHY, QUICK = text(pattern="^a{50000}$"), text(maxLength=8_000), text()
FAN = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}


def tag_of(schema: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": json_format(schema)})


def test_a_schema_that_compiles_too_long_is_refused_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    many = tiny_model("llama", vocab_size=32_000, max_position_embeddings=8192)  # tokens, of which few have a text
    function = {"type": "function", "function": {"name": "f", "parameters": SLOW}}
    given = {"response_format": form(SLOW), "tools": [function]}
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    with client_of(InProcess(InvariantModel(many, toy_tokenizer()), "many"), Settings(timeout=60)) as http:
        http.post(CHAT, json={**asked, "response_format": form(QUICK)})
        for field, value in given.items():
            for seconds in (0.3, 0.001):  # were it compiled again, the error would be about the second
                monkeypatch.setattr(workers, "COMPILING_SECONDS", seconds)
                response: httpx.Response = http.post(CHAT, json={**asked, field: value})
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["param"]) == (400, "invalid_schema", field)
                assert "0.3 seconds" in error["message"]


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
    GrammarMatcher(words.compile(tag)).fill_next_token_bitmask(mine)
    GrammarMatcher(found[0]).fill_next_token_bitmask(theirs)
    assert torch.equal(mine, theirs)


def compiled(model: InvariantModel) -> tuple[FairQueue, Callable[[str, int], Any]]:
    words, turns = vocabulary(model.tokenizer, 288), FairQueue(1, 1)
    compiler = SchemaCompiler(1 << 30, turns)
    return turns, lambda tenant, n: compiler.compile(tenant, Event(), words, tag_of(text(maxLength=8_000 + n)))


def validated(_model: InvariantModel) -> tuple[FairQueue, Callable[[str, int], Any]]:
    def validate(tenant: str, _number: int) -> None:
        value = "a" * 60 + "!" if tenant == "greedy" else 1
        with pytest.raises(InvalidSchema if tenant == "greedy" else InvalidObject):
            workers.validate(value, {"type": "string", "pattern": "^(a|a)*$"}, tenant, Event())

    return workers.VALIDATION_TURNS, validate


@pytest.mark.parametrize(("work", "together"), [(compiled, 1), (validated, 2)])
def test_slow_schemas_of_one_tenant_do_not_keep_those_of_another_waiting(
    work: Any, together: int, model: InvariantModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "VALIDATION_SECONDS", 1.0)
    turns, run = work(model)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(run, "greedy", number) for number in range(6)]
        wait_until(lambda: turns.waiting == 6 - together)
        run("modest", 9)
        assert sum(each.done() for each in asked) <= 2 * together


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
        workers.validate(value, schema, "", Event())
    with pytest.raises(InvalidObject):
        workers.validate(value, {"type": "null"}, "", Event())


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    found = Worker()
    yield found
    found.stop()


def test_a_call_that_takes_too_long_or_is_abandoned_is_stopped_and_the_next_one_answered(worker: Worker) -> None:
    left, start = Event(), time.monotonic()
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


def test_what_a_function_raises_comes_back_without_texts_unless_it_is_ours(worker: Worker) -> None:
    with pytest.raises(InvalidRequest, match="body of JSON") as found:
        worker.call(5, Event(), parse, "chat", b"{", Settings(), "")
    assert "openapi.json" in found.value.hint
    with pytest.raises(WorkerFailed, match="ValueError") as failed:
        worker.call(5, Event(), int, "secret")
    assert "secret" not in str(failed.value)


def test_a_worker_prints_nothing_of_what_clients_send(model: InvariantModel, capfd: pytest.CaptureFixture[str]) -> None:
    serialized, worker = vocabulary(model.tokenizer, 288).serialized, Worker()
    tag = tag_of(text(pattern="^(?=secret)s$"))  # of which xgrammar's own code warns, with the pattern
    worker.call(60.0, Event(), workers.compile_serialized, serialized, tag)
    worker.stop()
    assert capfd.readouterr().err == ""
