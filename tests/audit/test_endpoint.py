"""Claims about systems behind a URL, against a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from invariant_rag.audit import Endpoint, audit
from invariant_rag.cli import app
from invariant_rag.errors import AuditFailed
from tests.audit.known import records

KEY = "secret"


class Server(BaseHTTPRequestHandler):
    """Answers from the first document of a prompt, but the first time it asks to come again."""

    seen: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({**body, "key": self.headers.get("Authorization")})
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            self.reply(401, {"error": "no key"})
        elif len(self.seen) == 1:
            self.reply(429, {"error": "busy"}, {"Retry-After": "0"})
        else:
            document = body["messages"][0]["content"].partition("Document: ")[2].splitlines()[0]
            message = {"message": {"role": "assistant", "content": document}}
            self.reply(200, {"choices": [message], "usage": {"total_tokens": 7}})

    def reply(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    Server.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_url_is_a_system_that_is_asked_again_when_it_is_busy(url: str) -> None:
    result = audit(url, records(8), remedies=())
    assert result.system == f"toy at {url}"
    assert result.measures["errors"].value == 0.0
    assert result.screen.between > 0.0 == result.screen.within
    assert result.as_dict()["tokens"] == 7 * result.calls
    assert len(Server.seen) == result.calls + 1
    assert Server.seen[0]["model"] == "toy"
    assert Server.seen[0]["temperature"] == 0


def test_a_server_that_refuses_is_not_asked_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(AuditFailed, match="401") as refused:
        audit(Endpoint(url, "other", {"temperature": 0, "seed": 3}), records(2))
    assert "OPENAI_API_KEY" in refused.value.hint
    assert [(each["model"], each["seed"]) for each in Server.seen] == [("other", 3)]


def test_the_command_takes_a_url_and_says_in_words_why_a_server_does_not_answer(url: str, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps(each) for each in records(2)))
    command = ["audit", str(questions), "--out", str(tmp_path / "out"), "--remedy", "sort", "--system"]
    run = CliRunner().invoke(app, [*command, url, "--model", "mine", "--workers", "4"])
    assert run.exit_code == 0, run.output
    assert {each["model"] for each in Server.seen} == {"mine"}
    assert "at most 10 calls" in run.stderr
    gone = CliRunner().invoke(app, [*command[:3], str(tmp_path / "gone"), "--system", "http://127.0.0.1:9/v1"])
    assert gone.exit_code == 2
    assert "the server cannot be reached: Connection refused" in " ".join(gone.stderr.split())
    assert "Errno" not in gone.stderr
