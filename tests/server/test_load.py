"""Load: no answer under load is another one than that of the request alone."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from invariant_rag import InvariantModel
from invariant_rag.cli import app
from invariant_rag.errors import RemoteError
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.load import load_server
from tests.server.conftest import serving


def test_answers_under_load_are_those_of_requests_alone(base_url: str) -> None:
    found = load_server(f"{base_url}/v1", clients=8, requests=40, questions=10, documents=4, max_tokens=8)
    assert (found.answered, found.wrong, found.failed, found.rejected) == (40, 0, 0, 0)
    assert 0 < found.latency["p50"] <= found.latency["p90"] <= found.latency["p99"] <= found.latency["max"]
    assert found.cached > 0


def test_an_answer_that_depends_on_the_order_is_counted_as_wrong(model: InvariantModel) -> None:
    with serving(InProcess(model.with_method("sequential"))) as url:
        found = load_server(f"{url}/v1", clients=4, requests=12, questions=4, documents=3, max_tokens=8)
    assert found.wrong > 0


def test_requests_that_are_refused_are_counted(embedded: InvariantModel) -> None:
    with serving(InProcess(embedded), Settings(max_requests=1)) as url:
        found = load_server(f"{url}/v1", clients=8, requests=24, questions=4, max_tokens=8)
    assert found.rejected > 0
    assert found.answered + found.rejected == 24


def test_the_command_prints_what_was_measured(base_url: str) -> None:
    arguments = ["bench", "serve", "--url", f"{base_url}/v1", "--clients", "2", "--requests", "4", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "4"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout[done.stdout.index("{") :])["answered"] == 4
    with pytest.raises(RemoteError):
        load_server("http://127.0.0.1:9/v1", clients=1, requests=1)
