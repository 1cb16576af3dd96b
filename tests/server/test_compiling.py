"""Compiling schemas: what is too much for the vocabulary of a model, and what goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from invariant_rag.server.schema_limits import MOST_MASKED, check_masked, check_schema

from invariant_rag import InvariantModel
from invariant_rag.generation.ending_search import byte_matcher
from invariant_rag.server import InProcess
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.toy_inputs import toy_tokenizer
from tests.server.conftest import serving

TOKENS = 32_000


def texts(*lengths: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"a{most}": {"type": "string", "maxLength": most} for most in lengths}}


LONG, SLOW = texts(*range(100, 116)), texts(*range(100, 103))


@pytest.fixture(scope="module")
def engine() -> InProcess:
    """An engine whose model has many tokens, of which few have a text."""
    model = tiny_model("llama", vocab_size=TOKENS, max_position_embeddings=8192)
    return InProcess(InvariantModel(model, toy_tokenizer()), "many")


@pytest.fixture(scope="module")
def http(engine: InProcess) -> Iterator[httpx.Client]:
    with serving(engine) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("field", ["response_format", "tools"])
def test_a_schema_may_be_too_much_for_the_vocabulary_of_a_model(field: str, http: httpx.Client) -> None:
    check_schema(LONG)
    assert check_masked([LONG], 4_096) < MOST_MASKED
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": LONG}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": LONG}}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    body[field] = form if field == "response_format" else tools
    response = http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_schema", field)
    assert "1,562 edges together, for a model with 32,000 tokens" in error["message"]


def test_slow_schemas_are_compiled_one_after_another_and_others_at_once(engine: InProcess) -> None:
    def compile_one(schema: dict[str, Any], abandoned: Event) -> None:
        with engine.compiling([schema], abandoned):
            pass

    left = Event()
    with ThreadPoolExecutor(2) as pool:
        with engine.compiling([SLOW], Event()):
            compile_one(texts(10), Event())
            waits, leaves = pool.submit(compile_one, SLOW, Event()), pool.submit(compile_one, SLOW, left)
            left.set()
            with pytest.raises(CancelledError):
                leaves.result(10)
            assert not waits.done()
        waits.result(10)


def test_schemas_compile_in_several_threads_to_what_they_compile_to_alone() -> None:
    schemas = [f'{{"type": "string", "maxLength": {most}}}' for most in (*range(8), *range(8))]
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(byte_matcher, schemas))
    for matcher, most in zip(matchers, (*range(8), *range(8)), strict=True):
        assert matcher.accept_string(b'"' + b"a" * most + b'"')
        assert matcher.is_terminated()
