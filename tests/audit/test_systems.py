"""Claims about what can be audited, and what an answer is; one prompt in many orders; the command and its files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from invariant_rag import RAG, Prompt, errors
from invariant_rag.audit import Endpoint, Question, audit
from invariant_rag.audit.order_check import check_order
from invariant_rag.audit.run_folder import open_answers
from invariant_rag.audit.systems import as_reply, as_system
from invariant_rag.errors import AuditFailed, FileInUse, UnusableFile
from invariant_rag.files import LineFile
from invariant_rag.rag.retrieval import BM25Retriever
from invariant_rag.segments import Segment
from tests.audit.known import Pretended, records
from tests.cli.conftest import run
from tests.fuzz.conftest import full_disk
from tests.server.scripted import Answer, completion, refusal, scripted_api

ASKED = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))


def said(system, **options):
    return as_system(system, **options).ask(ASKED, ASKED.segments).text


class Functions:
    """Functions with annotations, and a callable object."""

    @staticmethod
    def of_texts(question: str, contexts: list[str]) -> str:
        return f"{question} {contexts[0]}"

    @staticmethod
    def of_text(question: str, context: str) -> str:
        return f"{question} {context}"

    @staticmethod
    def of_mapping(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"answer": f"{inputs['question']} {inputs['context'][0]}", "sources": []}

    def __call__(self, question: str, temperature: float = 0.0, segments: Any = ()) -> str:
        return f"{question} {segments[0].text}"


def test_a_callable_is_called_as_its_signature_says_and_a_function_of_something_else_is_refused():
    for system in (
        Functions.of_texts,
        Functions.of_text,
        Functions.of_mapping,
        Functions(),
        lambda text: text,
        lambda inputs: inputs["question"] + inputs["context"][0],  # refuses a text
        lambda documents, question: f"{question} {documents[0].text}",
        lambda *, question, documents, **others: f"{question} {documents[0].text}",
    ):
        assert "Who?" in said(system)
        assert "It was Ann." in said(system)
    for system, message in ((lambda one, two, three: "x", r"got one of \['one', 'two', 'three'\]"), (3, "got int")):
        with pytest.raises(errors.UnsupportedCombination, match=message):
            as_system(system)


MESSAGE = SimpleNamespace(content="Ann", usage_metadata={"total_tokens": 7})  # what a chat model returns
BLOCKS = {"content": [{"type": "text", "text": "A"}, {"type": "text", "text": "nn"}]}


def test_an_answer_is_found_in_whatever_holds_one_and_what_holds_none_is_refused_by_its_keys():
    holders = ["Ann", MESSAGE, {"answer": "Ann"}, {"output": MESSAGE}, {"result": {"text": "Ann"}}]
    holders += [{"messages": [{"content": "Who?"}, MESSAGE]}, BLOCKS]
    assert {as_reply(value).text for value in holders} == {"Ann"}
    assert as_reply({"output": MESSAGE}).tokens == 7
    for value, message in (({"docs": 3}, r"got a mapping with \['docs'\]"), ([], "got list"), (None, "got NoneType")):
        with pytest.raises(AuditFailed, match=message):
            as_reply(value)


def test_a_model_of_ours_is_tried_with_methods_and_a_rag_with_what_its_retriever_finds(model):
    plain = model.with_method("sequential")
    found = audit(plain, records(4, size=3), remedies=["sort", "rotor", "set-based"], generation={"max_new_tokens": 3})
    assert [each.fixes for each in found.comparisons] == [True] * 3
    invariant = audit(plain.with_method("rotor"), records(4, size=3), remedies=(), generation={"max_new_tokens": 3})
    assert not [each for each in invariant.asked if len({answer.text for answer in each.answers[3:]}) > 1]
    assert all(text in as_system(plain).sent(ASKED, ASKED.segments) for text in ("It was Ann.", "Who?"))
    rag = RAG(plain, BM25Retriever([Segment(text) for text in ("a mill", "a ferry", "a bridge")]), k=2)
    found = audit(rag, [{"question": "ferry", "answer": "ferry"}], generation={"max_new_tokens": 2})
    assert [len(each.question.segments) for each in found.asked] == [2]
    stop = (whole := said(plain, generation={"max_new_tokens": 6}))[2:4]
    assert said(plain, generation={"max_new_tokens": 6, "stop_strings": stop}) == whole[: whole.index(stop)]


PROMPT = Prompt("Documents: ", ["salt and copper ", "the river Senn ", "a mill in Brenn ", "noon "], "Where? ")


def test_an_invariant_model_gives_one_output_and_the_plain_model_several(model):
    steps = []
    told = nullcontext(lambda: steps.append(None))
    check = check_order(model, PROMPT, 6, progress=lambda label, total: told, max_new_tokens=8)
    assert (check.promised, check.identical, check.broken) == (True, True, False)
    assert [count for _, count in check.answers] == [7]
    assert check.plain_distinct >= len(check.plain_answers) > 1
    assert sum(count for _, count in check.plain_answers) == 7
    assert len(steps) == 14
    with pytest.raises(errors.InvalidPrompt, match="at least 1, got 0"):
        check_order(model, PROMPT, 0)


def test_a_model_that_promises_nothing_breaks_nothing_and_a_broken_promise_is_seen(model):
    # One token: the order changes its probability long before it changes the token.
    plain = model.with_method("sequential", ordering="given")
    first, again, other = (check_order(plain, PROMPT, 4, seed=seed, max_new_tokens=1) for seed in (1, 1, 2))
    assert (first.promised, first.identical, first.broken) == (False, False, False)
    assert first.answers == first.plain_answers
    assert first.distinct > len(first.answers)
    assert first == again != other
    two = check_order(plain, Prompt("Documents: ", ["x ", "yy "], "Where? "), 4, max_new_tokens=1)
    assert (two.distinct, two.answers) == (2, (("B", 5),))  # the same token, with another probability
    broken = check_order(model.with_method("rotor", ordering=Pretended()), PROMPT, 4, max_new_tokens=1)
    assert (broken.promised, broken.broken, broken.identical) == (True, True, False)


# --- the command, and servers ---

MINE = """
def first(question, segments):
    return segments[0].text

def stops(question, segments):
    raise KeyboardInterrupt
"""


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    """A file to write in a folder to work in, with ten questions, forty questions and a module."""
    for count in (10, 40):
        (tmp_path / f"{count}.jsonl").write_text("\n".join(map(json.dumps, records(count))))
    (tmp_path / "mine_to_audit.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "answers.jsonl"


FILES = "answers.csv answers.jsonl answers.jsonl.lock audit.json report.html report.md run.json"


def test_a_run_writes_a_folder_is_resumed_and_fails_where_the_order_matters():
    system = ("--system", "mine_to_audit:first")
    part = run("audit", "10.jsonl", "--out", "out", *system, "--json")
    assert part.exit_code == 0, part.output
    assert json.loads(part.stdout)["screen"]["asked"] == 10
    again = run("audit", "10.jsonl", "--out", "out", *system)
    assert (again.exit_code, "--resume out" in again.stderr.replace("\n", "")) == (2, True)
    whole = run("audit", "--resume", "out", *system, "--fail-on", "order-matters")
    outcome = json.loads(Path("out/audit.json").read_text())["screen"]["outcome"]
    assert whole.exit_code == (outcome == "order matters"), whole.output
    assert len(whole.stdout.splitlines()) < 30  # one screen
    assert sorted(each.name for each in Path("out").iterdir()) == FILES.split()
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
    with pytest.warns(errors.ToyModelWarning, match="answered by the embedded toy model"):
        audit(api.url, records(2), remedies=())
    assert (Endpoint(api.url).toy, Endpoint(api.url, "other").toy) == (True, False)


# --- files of lines that are continued: one writer, whole lines, and nothing lost when the disk is full ---

ANSWER = {"key": "k", "text": "t", "tokens": None, "seconds": 0.5, "errors": []}
ODD = {"é \ud800": "\u2028\r\n"}
CHILD = """
import os, signal, sys
from pathlib import Path
from invariant_rag.errors import FileInUse
from invariant_rag.audit.run_folder import open_answers
try:
    open_answers(Path(sys.argv[1]))
except FileInUse:
    sys.exit(7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def lines(path):
    return LineFile(path, lambda line, _: line, errors.InvalidQuestion)


def test_a_second_process_is_refused_and_a_writer_that_was_killed_holds_no_lock(path):
    child = [sys.executable, "-c", CHILD, str(path.parent)]
    with lines(path) as file:
        file.append([ANSWER])
        assert subprocess.run(child, check=False).returncode == 7
        with pytest.raises(FileInUse, match="is being written by another process"):
            lines(path)
    assert subprocess.run(child, check=False).returncode == -signal.SIGKILL
    with lines(path) as file:
        assert file.lines == [ANSWER]


def test_a_full_disk_and_a_torn_line_lose_nothing_and_tear_no_line(path):
    with lines(path) as file:
        file.append([ODD])
        with full_disk(path.stat().st_size + 10), pytest.raises(UnusableFile, match="cannot be written"):
            file.append(["x" * 100])
        file.append(["later"])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"torn')
    with lines(path) as file:
        assert file.lines == [ODD, "later"]
    assert path.read_bytes() == whole
    assert whole.decode().count("\n") == 2


@pytest.mark.parametrize("name", ANSWER)
def test_what_is_no_file_and_an_answer_with_a_value_of_another_type_are_refused(name, path):
    for kind, make in (("folder", Path.mkdir), ("named pipe", os.mkfifo)):
        make(other := path.with_name(kind))
        with pytest.raises(UnusableFile, match=f"expected a file, got a {kind}"):
            lines(other)
    allowed = {"tokens": [None, 5], "seconds": [5, 0.5], "errors": [[]]}.get(name, ["x", "\ud800"])
    odd = [None, 5, 0.5, True, "x", [], {}, [1], {"a": "b"}, "\ud800"]
    for each in odd:
        path.write_text(json.dumps({**ANSWER, name: each}) + "\n")
        if type(each) is not bool and each in allowed:
            open_answers(path.parent).close()
        else:
            with pytest.raises(AuditFailed, match="line 1"):
                open_answers(path.parent)
    path.write_text(json.dumps({key: each for key, each in ANSWER.items() if key != name}) + "\n")
    with pytest.raises(AuditFailed, match="line 1"):
        open_answers(path.parent)
