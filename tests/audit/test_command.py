"""Claims about `invariant-rag audit`, on functions, models and real HTTP servers; and about servers from Python."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from typer.testing import CliRunner

from invariant_rag.audit import Endpoint, audit
from invariant_rag.cli import app
from invariant_rag.errors import AuditFailed
from tests.audit.known import records

MINE = """
def first(question, segments):
    return segments[0].text

def stops(question, segments):
    raise KeyboardInterrupt
"""


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with ten questions, forty questions and a module."""
    for count in (10, 40):
        (tmp_path / f"{count}.jsonl").write_text("\n".join(map(json.dumps, records(count))))
    (tmp_path / "mine_to_audit.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


FILES = "answers.csv answers.jsonl answers.jsonl.lock audit.json report.html report.md run.json"


def test_a_run_writes_a_folder_is_resumed_and_fails_where_the_order_matters(folder: Path) -> None:
    system = ("--system", "mine_to_audit:first")
    part = run("10.jsonl", "--out", "out", *system, "--json")
    assert part.exit_code == 0, part.output
    assert json.loads(part.stdout)["screen"]["asked"] == 10
    again = run("10.jsonl", "--out", "out", *system)
    assert (again.exit_code, "--resume out" in again.stderr.replace("\n", "")) == (2, True)
    whole = run("--resume", "out", *system, "--fail-on", "order-matters")
    outcome = json.loads((folder / "out" / "audit.json").read_text())["screen"]["outcome"]
    assert whole.exit_code == (outcome == "order matters"), whole.output
    assert len(whole.stdout.splitlines()) < 30  # one screen
    assert sorted(path.name for path in (folder / "out").iterdir()) == FILES.split()
    assert run("40.jsonl", "--out", "matters", *system, "--fail-on", "order-matters").exit_code == 1
    stopped = run("10.jsonl", "--out", "stopped", "--system", "mine_to_audit:stops")
    assert "continue with --resume stopped" in stopped.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a file of QUESTIONS"),
        (("10.jsonl", "--out", "new", "--system", "mine_to_audit:first", "--fail-on", "flip-rate>5%"), "fail-on"),
        (("10.jsonl", "--out", "new", "--system", "mine_to_audit:last"), "no attribute 'last'"),
        (("10.jsonl", "--out", "new", "--system", "mine_to_audit.py:first"), "MODULE is no path, and has no .py"),
        (("10.jsonl", "--out", "new", "--system", "http://127.0.0.1:9/v1"), "be reached: Connection refused"),
    ],
)
def test_what_is_wrong_is_said_in_words_and_leaves_no_folder(arguments: Any, said: str) -> None:
    found = run(*arguments)
    assert (found.exit_code, Path("new").exists()) == (2, False)
    assert said in " ".join(found.stderr.replace("│", " ").split())
    assert "Errno" not in found.stderr


def test_a_model_of_ours_is_audited_and_a_dry_run_says_what_it_costs() -> None:
    Path("q.csv").write_text("question,segment,answer\nWho?,Ann did.,Ann\nWho?,Bo did not.,\n")
    found = run("q.csv", "--out", "out", "--method", "rotor", "--remedy", "sort", "--max-new-tokens", 2, "--json")
    assert found.exit_code == 0, found.output
    assert "(rotor, Lexical()" in json.loads(found.stdout)["system"]
    for remedies, cost in (
        ((), "at most 5 calls"),
        (("--remedy", "sort"), "at most 5 calls"),
        (("--remedy", "vote", "--remedy", "sort"), "vote, sort, at most 12 calls a question"),
    ):
        assert cost in " ".join(run("q.csv", "--dry-run", *remedies).stdout.split())


# Servers

KEY = "secret"


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def url(seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that answers from the first document of a prompt, but the first time it asks to come again."""

    def app(environ: dict[str, Any], respond: Any) -> list[bytes]:
        status, document = "200 OK", {"data": [{"id": "toy"}]}
        if environ["REQUEST_METHOD"] == "POST":
            seen.append(body := json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
            said = body["messages"][0]["content"].partition("Document: ")[2].splitlines()[0]
            document = {"choices": [{"message": {"content": said}}], "usage": {"total_tokens": 7}}
            status = "429 Too Many Requests" if len(seen) == 1 else status
            status = status if environ.get("HTTP_AUTHORIZATION") == f"Bearer {KEY}" else "401 Unauthorized"
        respond(status, [("Retry-After", "0.5")])
        return [json.dumps(document).encode()]

    class Quiet(WSGIRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with make_server("127.0.0.1", 0, app, handler_class=Quiet) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_url_is_a_system_that_is_asked_again_when_it_is_busy(url: str, seen: Any) -> None:
    result = audit(url, records(8), remedies=())
    assert (result.system, result.measures["errors"].value) == (f"toy at {url}", 0.0)
    assert result.screen.between > 0.0 == result.screen.within
    assert result.as_dict()["tokens"] == 7 * result.calls
    assert max(answer.seconds for each in result.asked for answer in each.answers) > 0.5  # as the server wished
    assert len(seen) == result.calls + 1
    assert (seen[0]["model"], seen[0]["temperature"]) == ("toy", 0)


def test_a_server_that_refuses_is_not_asked_again(url: str, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(AuditFailed, match="401") as refused:
        audit(Endpoint(url, "other", {"temperature": 0, "seed": 3}), records(2))
    assert "the address (up to /v1), the model, and the key in OPENAI_API_KEY" in refused.value.hint
    assert [(each["model"], each["seed"]) for each in seen] == [("other", 3)]


def test_the_command_takes_a_url_with_the_name_of_its_model(url: str, seen: Any) -> None:
    found = run("10.jsonl", "--out", "out", "--remedy", "sort", "--system", url, "--model", "mine", "--workers", 4)
    assert found.exit_code == 0, found.output
    assert {each["model"] for each in seen} == {"mine"}
    assert "at most 50 calls" in found.stderr
