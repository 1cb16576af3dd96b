"""`invariant-rag bench vllm` against the server: both systems answer, and what was measured is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invariant_rag.cli import app
from typer.testing import CliRunner

from tests.servers import Server


def test_the_bench_measures_plain_and_arranged_requests(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVARIANT_RAG_UPSTREAM_KEY", server.KEY)
    words = f"bench vllm {server.url} --clients 2 --requests 4 --questions 2 --segments 3 --new-tokens 4 --rounds 1"
    result = CliRunner().invoke(app, [*words.split(), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    measured = json.loads((tmp_path / "serve.json").read_text())
    assert (len(measured["ratios"]), len(measured["rows"])) == (2, 4)
    assert all(min(times) > 0 for each in measured["rows"] for times in each["measured"].values())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("http://127.0.0.1:9", "expected an answer of vLLM"),
        ("http://127.0.0.1:9 --requests 5 --questions 2", "multiple"),
    ],
)
def test_the_command_says_what_is_wrong(words: str, expected: str) -> None:
    result = CliRunner().invoke(app, ["bench", "vllm", *words.split()])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())
