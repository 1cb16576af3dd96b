"""`serve --deterministic`: what else is in a batch changes no bit of an answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from typer.testing import CliRunner

from invariant_rag.cli import app
from invariant_rag.server import Settings
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.settings import EngineConfig
from tests.server.conftest import FLAGS, QUESTION, serving


def test_under_load_answers_are_bit_equal_to_those_of_single_requests() -> None:
    engine = build_engine(EngineConfig(dtype="bfloat16", deterministic=True), Settings())
    with serving(engine) as url, httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(12) as threads:

        def logprobs(count: int) -> list[float]:
            messages = [{"role": "user", "content": QUESTION}]
            asked: dict[str, Any] = {"messages": messages, "documents": FLAGS[: count % 4 + 1], "logprobs": True}
            tokens = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["logprobs"]["content"]
            return [each["logprob"] for each in tokens]

        alone = [logprobs(count) for count in range(4)]
        assert list(threads.map(logprobs, range(12))) == alone * 3


def test_it_is_an_option_of_the_command_for_models_in_its_process() -> None:
    done = CliRunner().invoke(app, ["serve", "--upstream", "http://127.0.0.1:9/v1", "--port", "0", "--deterministic"])
    assert "expected no deterministic with upstream" in done.output
