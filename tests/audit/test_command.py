"""Claims about `invariant-rag audit`, on functions and models; and about servers, from Python and the shell."""

import json
import re
from pathlib import Path

import pytest

from invariant_rag.audit import Endpoint, audit
from invariant_rag.errors import AuditFailed, ToyModelWarning
from tests.audit.known import records
from tests.cli.conftest import run
from tests.server.scripted import Answer, completion, refusal, scripted_api

MINE = """
def first(question, segments):
    return segments[0].text

def stops(question, segments):
    raise KeyboardInterrupt
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to work in, with ten questions, forty questions and a module."""
    for count in (10, 40):
        (tmp_path / f"{count}.jsonl").write_text("\n".join(map(json.dumps, records(count))))
    (tmp_path / "mine_to_audit.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


FILES = "answers.csv answers.jsonl answers.jsonl.lock audit.json report.html report.md run.json"


def test_a_run_writes_a_folder_is_resumed_and_fails_where_the_order_matters(folder):
    system = ("--system", "mine_to_audit:first")
    part = run("audit", "10.jsonl", "--out", "out", *system, "--json")
    assert part.exit_code == 0, part.output
    assert json.loads(part.stdout)["screen"]["asked"] == 10
    again = run("audit", "10.jsonl", "--out", "out", *system)
    assert (again.exit_code, "--resume out" in again.stderr.replace("\n", "")) == (2, True)
    whole = run("audit", "--resume", "out", *system, "--fail-on", "order-matters")
    outcome = json.loads((folder / "out" / "audit.json").read_text())["screen"]["outcome"]
    assert whole.exit_code == (outcome == "order matters"), whole.output
    assert len(whole.stdout.splitlines()) < 30  # one screen
    assert sorted(path.name for path in (folder / "out").iterdir()) == FILES.split()
    assert run("audit", "40.jsonl", "--out", "matters", *system, "--fail-on", "order-matters").exit_code == 1
    stopped = run("audit", "10.jsonl", "--out", "stopped", "--system", "mine_to_audit:stops")
    assert "continue with --resume stopped" in stopped.stderr


def test_a_model_of_ours_is_audited_and_a_dry_run_says_what_it_costs():
    Path("q.csv").write_text("question,segment,answer\nWho?,Ann did.,Ann\nWho?,Bo did not.,\n")
    options = ("--method", "rotor", "--remedy", "sort", "--max-new-tokens", 2, "--json")
    found = run("audit", "q.csv", "--out", "out", *options)
    assert found.exit_code == 0, found.output
    assert "(rotor, Lexical()" in json.loads(found.stdout)["system"]
    assert json.loads(found.stdout)["toy"]
    for remedies, cost in (
        ((), "at most 5 calls"),
        (("--remedy", "sort"), "at most 5 calls"),
        (("--remedy", "vote", "--remedy", "sort"), "vote, sort, at most 12 calls a question"),
    ):
        assert cost in " ".join(run("audit", "q.csv", "--dry-run", *remedies).stdout.split())


@pytest.fixture
def api(monkeypatch):
    """A server that always says the same."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with scripted_api() as api:
        api.plan(Answer(body=completion("It is right3.")))
        yield api


def test_a_url_is_sent_the_documents_in_their_order_and_asked_again_when_it_is_busy(api):
    api.plan(Answer(429, refusal("busy"), {"Retry-After": "0.5"}), Answer(body=completion("It is right3.")))
    found = audit(api.url, records(8), remedies=())
    assert (found.system, found.measures["errors"].value) == (f"far at {api.url}", 0.0)
    assert found.as_dict()["tokens"] == 9 * 5 * 8
    assert max(answer.seconds for each in found.asked for answer in each.answers) > 0.5  # as the server wished
    assert len(api.bodies) == found.calls + 1
    assert (api.bodies[0]["model"], api.bodies[0]["temperature"]) == ("far", 0)
    assert api.headers[0]["authorization"] == "Bearer secret"
    sent = [each["messages"][0]["content"] for each in api.bodies]
    listed = [re.findall("Document: (.*)", each) for each in sent]
    for each in found.asked:
        assert [each.question.segments[place].text for place in each.orders[-1]] in listed
    assert dict(found.advice)["First call"] == sent[0]  # as every answer is the same


def test_a_server_that_refuses_is_not_asked_again(api):
    api.plan(Answer(401, refusal("wrong key")))
    with pytest.raises(AuditFailed, match="401") as refused:
        audit(Endpoint(api.url, "other", {"temperature": 0, "seed": 3}), records(2))
    assert "the address (up to /v1), the key in OPENAI_API_KEY, and the model (--model)" in refused.value.hint
    assert [(each["model"], each["seed"]) for each in api.bodies] == [("other", 3)]


def test_the_command_takes_a_url_with_the_name_of_its_model_and_says_that_a_toy_answers(api):
    api.card = {"id": "mine", "toy": True}
    options = ("--remedy", "sort", "--system", api.url, "--model", "mine", "--workers", 4)
    found = run("audit", "10.jsonl", "--out", "out", *options)
    assert found.exit_code == 0, found.output
    assert {each["model"] for each in api.bodies} == {"mine"}
    assert "at most 50 calls" in found.stderr
    assert found.stderr.count("answered by the embedded toy model") == 1
    for report in (found.stdout, Path("out/report.md").read_text(), Path("out/report.html").read_text()):
        assert report.count("This audit was answered by the embedded toy model") == 1
    with pytest.warns(ToyModelWarning, match="answered by the embedded toy model"):
        audit(api.url, records(2), remedies=())
    assert (Endpoint(api.url).toy, Endpoint(api.url, "other").toy) == (True, False)
