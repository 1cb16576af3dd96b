"""Claims about what can be audited: functions, our models, servers. And importing the audit imports no framework."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from invariant_rag import RAG, InvariantModel
from invariant_rag.audit import Question, audit
from invariant_rag.audit.systems import as_reply, as_system
from invariant_rag.cli import app
from invariant_rag.errors import AuditFailed, UnsupportedCombination
from invariant_rag.rag.retrieval import BM25Retriever
from invariant_rag.segments import Segment
from tests.audit.known import records

ASKED = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))


@pytest.fixture(scope="module")
def plain(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> InvariantModel:
    return InvariantModel(chat_llama, tokenizer, method="sequential")


def said(system: Any, **options: Any) -> str:
    return as_system(system, **options).ask(ASKED, ASKED.segments).text


def test_importing_the_audit_loads_no_framework() -> None:
    code = "import invariant_rag.audit, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "invariant_rag.audit" in loaded
    assert not {"torch", "transformers", "pandas", "scipy", "jinja2", "langchain_core", "llama_index"} & set(loaded)


def segments_first(documents: Any, question: str) -> str:
    return f"{question} {documents[0].text}"


def texts(question: str, contexts: list[str]) -> str:
    return f"{question} {contexts[0]}"


def one_text(question: str, context: str) -> str:
    return f"{question} {context}"


def prompt(text: str) -> str:
    return text


def mapping(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"answer": f"{inputs['question']} {inputs['context'][0]}", "sources": []}


def keywords(*, question: str, documents: Any, **others: Any) -> str:
    return f"{question} {documents[0].text}"


class Chain:
    """A callable object."""

    def __call__(self, question: str, temperature: float = 0.0, segments: Any = ()) -> str:
        return f"{question} {segments[0].text}"


@pytest.mark.parametrize("system", [segments_first, texts, one_text, prompt, mapping, keywords, Chain()])
def test_a_callable_is_called_as_its_signature_says(system: Any) -> None:
    assert "Who?" in said(system)
    assert "It was Ann." in said(system)


def test_a_function_of_something_else_is_refused() -> None:
    with pytest.raises(UnsupportedCombination, match=r"got one of \['one', 'two', 'three'\]"):
        as_system(lambda one, two, three: "x")
    with pytest.raises(UnsupportedCombination, match="got int"):
        as_system(3)


class Message:
    """What a chat model returns."""

    content = "Ann"
    usage_metadata: Mapping[str, int] = {"total_tokens": 7}


BLOCKS = {"content": [{"type": "text", "text": "A"}, {"type": "text", "text": "nn"}]}


def test_an_answer_is_found_in_whatever_holds_one_and_what_holds_none_is_refused_by_its_keys() -> None:
    holders: list[Any] = ["Ann", Message(), {"answer": "Ann"}, {"output": Message()}, {"result": {"text": "Ann"}}]
    holders += [{"messages": [{"content": "Who?"}, Message()]}, BLOCKS]
    assert {as_reply(value).text for value in holders} == {"Ann"}
    for value, message in (({"docs": 3}, r"got a mapping with \['docs'\]"), ([], "got list"), (None, "got NoneType")):
        with pytest.raises(AuditFailed, match=message):
            as_reply(value)


def test_a_model_of_ours_is_tried_with_methods(plain: InvariantModel) -> None:
    found = audit(plain, records(4, size=3), remedies=["sort", "rotor", "set-based"], generation={"max_new_tokens": 3})
    assert [each.fixes for each in found.comparisons] == [True] * 3
    assert all(each.question.answers for each in found.asked)
    invariant = audit(plain.with_method("rotor"), records(4, size=3), remedies=(), generation={"max_new_tokens": 3})
    assert not [each for each in invariant.asked if len({answer.text for answer in each.answers[3:]}) > 1]


def test_a_rag_is_audited_with_what_its_retriever_finds_and_answers_end_before_a_stop(plain: InvariantModel) -> None:
    rag = RAG(plain, BM25Retriever([Segment(text) for text in ("a mill", "a ferry", "a bridge")]), k=2)
    found = audit(rag, [{"question": "ferry", "answer": "ferry"}], generation={"max_new_tokens": 2})
    assert [len(each.question.segments) for each in found.asked] == [2]
    whole = said(plain, generation={"max_new_tokens": 6})
    stop = whole[2:4]
    assert said(plain, generation={"max_new_tokens": 6, "stop_strings": stop}) == whole[: whole.index(stop)]


def test_the_command_writes_a_folder_and_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out"
    questions.write_text("\n".join(json.dumps(each) for each in records(10)))
    code = "def first(question, segments):\n    return segments[0].text\n"
    surely = tmp_path / "forty.jsonl"
    surely.write_text("\n".join(json.dumps(each) for each in records(40)))
    (tmp_path / "mine_to_audit.py").write_text(f"{code}def stops(question, segments):\n    raise KeyboardInterrupt\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    system = ["--system", "mine_to_audit:first"]
    part = CliRunner().invoke(app, ["audit", str(questions), "--out", str(out), *system, "--json"])
    assert part.exit_code == 0, part.output
    assert json.loads(part.stdout)["screen"]["asked"] == 10
    again = CliRunner().invoke(app, ["audit", str(questions), "--out", str(out), *system])
    assert again.exit_code == 2
    assert f"--resume {out}" in again.stderr.replace("\n", "")
    whole = CliRunner().invoke(app, ["audit", "--resume", str(out), *system, "--fail-on", "order-matters"])
    outcome = json.loads((out / "audit.json").read_text())["screen"]["outcome"]
    assert whole.exit_code == (outcome == "order matters"), whole.output
    matters = ["audit", str(surely), "--out", "matters", *system, "--fail-on", "order-matters"]
    assert CliRunner().invoke(app, matters).exit_code == 1
    assert len(whole.stdout.splitlines()) < 30  # one screen
    assert {path.name for path in out.iterdir()} == {
        "answers.csv", "answers.jsonl", "answers.jsonl.lock", "audit.json", "report.html", "report.md", "run.json"
    }  # fmt: skip
    gate = CliRunner().invoke(app, ["audit", str(questions), "--out", "new", *system, "--fail-on", "flip-rate>5%"])
    assert (gate.exit_code, Path("new").exists()) == (2, False)
    stopped = ["audit", str(questions), "--out", "stopped", "--system", "mine_to_audit:stops"]
    assert "continue with --resume stopped" in CliRunner().invoke(app, stopped).stderr
    wrong = CliRunner().invoke(app, ["audit", str(questions), "--out", "other", "--system", "mine_to_audit:last"])
    assert wrong.exit_code == 2
    assert "no attribute 'last'" in wrong.stderr
    assert not Path("other").exists()


def test_the_command_audits_a_model_of_ours(tmp_path: Path) -> None:
    questions = tmp_path / "questions.csv"
    questions.write_text("question,segment,answer\nWho?,Ann did.,Ann\nWho?,Bo did not.,\n")
    options = ["--method", "rotor", "--remedy", "sort", "--max-new-tokens", "2", "--json"]
    run = CliRunner().invoke(app, ["audit", str(questions), "--out", str(tmp_path / "out"), *options])
    assert run.exit_code == 0, run.output
    assert "(rotor, Lexical()" in json.loads(run.stdout)["system"]
    nothing = CliRunner().invoke(app, ["audit"])
    assert (nothing.exit_code, "name a file of QUESTIONS" in nothing.stderr) == (2, True)
    dry = [CliRunner().invoke(app, ["audit", str(questions), "--dry-run", *more]).stdout for more in ([], options[2:4])]
    assert ["at most 5 calls" in each for each in dry] == [True, True]
    dry = CliRunner().invoke(app, ["audit", str(questions), "--dry-run", "--remedy", "vote", "--remedy", "sort"])
    assert "vote, sort, at most 12 calls a question" in " ".join(dry.stdout.split())
