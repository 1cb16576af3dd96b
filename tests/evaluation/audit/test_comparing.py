"""Claims about what people build on an audit: comparisons, conditions in CI, and assertions in their own tests."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from invariant_rag.cli import app
from invariant_rag.errors import (
    AuditFailed,
    InvalidChoice,
    InvalidQuestion,
    NoiseWarning,
    UnknownName,
    UnsupportedCombination,
)
from invariant_rag.evaluation.audit import audit
from invariant_rag.evaluation.audit.conditions import Condition
from invariant_rag.evaluation.audit.diff import diff_audits
from invariant_rag.evaluation.metrics import best_subspan_em
from invariant_rag.segments import Segment
from invariant_rag.testing import assert_order_invariant
from tests.evaluation.audit.known import first, records, symmetric

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).parents[3]
FEW = {"remedies": [], "slots": 2, "repeats": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    before, after = (tmp_path_factory.mktemp(name) for name in ("before", "after"))
    audit(first, records(12, 3), out=before, **FEW)
    audit(symmetric, records(14, 3), out=after, **FEW)
    return before, after


def test_two_audits_are_compared_question_by_question(folders: tuple[Path, Path]) -> None:
    found = diff_audits(*folders)
    assert (found.common, found.only_before, found.only_after) == (12, 0, 2)
    today, flips = found.changes
    assert (today.before.value, today.after.value) == pytest.approx((1 / 3, 1.0))
    assert today.difference.low > 0.2
    assert today.p == pytest.approx(2 / 2**8)
    assert (flips.before.value, flips.after.value) == (1.0, 0.0)
    assert len(found.fixed) == 8
    assert found.broken == found.unsettled == ()
    assert len(found.steadied) == 12
    assert diff_audits(*folders[::-1]).broken == found.fixed


def test_the_command_compares_two_audits(folders: tuple[Path, Path]) -> None:
    run = CliRunner().invoke(app, ["audit", "diff", *map(str, folders)])
    assert run.exit_code == 0, run.output
    assert "right now, wrong before: 8" in run.stdout
    as_json = CliRunner().invoke(app, ["audit", "diff", *map(str, folders), "--json"])
    assert json.loads(as_json.stdout)["common"] == 12
    nothing = CliRunner().invoke(app, ["audit", "diff", str(folders[0]), str(folders[0] / "plots")])
    assert nothing.exit_code == 2
    assert "no result of an audit" in nothing.stderr


def test_audits_of_other_questions_are_not_compared(folders: tuple[Path, Path], tmp_path: Path) -> None:
    audit(first, [{"question": "Other?", "segments": ["a", "b"]}], out=tmp_path, **FEW)
    with pytest.raises(AuditFailed, match="asked by both"):
        diff_audits(folders[0], tmp_path)


@pytest.mark.parametrize(("option", "value"), [("metric", "exact_match"), ("repeats", 2), ("orders", 3)])
def test_audits_that_measure_other_things_are_not_compared(
    folders: tuple[Path, Path], tmp_path: Path, option: str, value: str | int
) -> None:
    audit(first, records(2, 3), out=tmp_path, **{**FEW, option: value})
    with pytest.raises(AuditFailed, match=f"{option}: expected the same"):
        diff_audits(folders[0], tmp_path)


@pytest.mark.parametrize(
    ("text", "holds"),
    [("flip-rate>5%", True), ("flip_rate > 1", False), ("today<0.8", True), ("worst>=0", True), ("errors>0%", False)],
)
def test_conditions_compare_a_measure_with_a_number(text: str, holds: bool) -> None:
    assert Condition.parse(text).holds(audit(first, records(3, 2), **FEW)) is holds


def test_what_is_no_condition_is_refused() -> None:
    with pytest.raises(InvalidChoice, match="expected a condition"):
        Condition.parse("flip-rate")
    for text, fix in (("flip-rate>5", "flip-rate>5%"), ("errors > 101%", "100%"), ("today<80", "today<80%")):
        with pytest.raises(InvalidChoice, match="at most 1") as refused:
            Condition.parse(text)
        assert fix in refused.value.hint
    assert Condition.parse("calls>5").limit == 5
    with pytest.raises(UnknownName, match="flip-rate"):
        Condition.parse("flips>5%")
    bare = [{"question": "q", "segments": ["a", "b"]}]
    with pytest.raises(UnsupportedCombination, match="today"):
        Condition.parse("today<1").holds(audit(first, bare, **FEW))


def test_the_command_fails_on_a_condition_and_asks_nothing_when_dry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{**each, "page": 3} for each in records(3)]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(each) for each in asked))
    (tmp_path / "dry_system.py").write_text("def first(question, segments):\n    return segments[0].text\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    needed = ["audit", "questions.jsonl", "--system", "dry_system:first", "--remedy", "sort"]
    command = [*needed, "--out", "out"]
    assert "--out is missing" in CliRunner().invoke(app, needed).stderr
    before = sorted(tmp_path.rglob("*.*"))
    for asked_dry in (needed, command):
        dry = CliRunner().invoke(app, [*asked_dry, "--dry-run"])
        assert dry.exit_code == 0, dry.output
        assert "No gold answers" not in dry.stderr
    assert [each for each in sorted(tmp_path.rglob("*.*")) if each.suffix != ".pyc"] == before
    assert not (tmp_path / "out").exists()
    assert "Nothing was asked" in dry.stdout
    assert dry.stderr.count("note: questions.jsonl: Not used, but kept with the questions") == 1
    assert "calls (as it is" in dry.stdout
    failing = CliRunner().invoke(app, [*command, "--fail-on", "flip-rate>5%", "--fail-on", "today>99%"])
    assert failing.exit_code == 1, failing.output
    assert "flip-rate>5% holds: 100.0%" in failing.stderr
    assert "today>99%" not in failing.stderr
    again = CliRunner().invoke(app, [*command, "--fail-on", "errors>5%"])
    assert again.exit_code == 0
    assert "answers reused from" in again.stderr
    told = [
        "Finding: No effect",
        "Today: In the order",
        "Recommendation: Leave it",
        "What do you get",
        "flip rate",
        "Report:",
    ]
    places = [again.stdout.index(each) for each in told]
    assert places == sorted(places)
    assert places[0] == 0
    known = CliRunner().invoke(app, [*command, "--dry-run"])
    assert known.stdout.startswith("To ask: nothing. Answered already: ")
    early = CliRunner().invoke(app, ["audit", "questions.jsonl", "--out", "out", "--metric", "bleu", "--model", "none"])
    assert early.exit_code == 2
    assert "unknown metric" in early.stderr  # before a model is looked for


def test_what_cannot_be_known_without_gold_answers_is_said_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "Who?", "segments": ["a", "b"]}')
    (tmp_path / "bare_system.py").write_text("def first(question, segments):\n    raise AssertionError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    dry = CliRunner().invoke(app, ["audit", "q.jsonl", "--system", "bare_system:first", "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert dry.stderr == "No gold answers: only changes can be measured.\n"
    assert dry.stdout.endswith("Nothing was asked.\n")


@pytest.mark.parametrize("words", [[], ["--help"], ["run", "--help"]])
def test_help_shows_every_option_of_an_audit_and_how_two_are_compared(words: list[str]) -> None:
    shown = " ".join(CliRunner().invoke(app, ["audit", *words]).stdout.split())
    assert all(option in shown for option in ("QUESTIONS", "--out", "--fail-on", "--dry-run", "--system"))
    assert "invariant-rag audit diff BEFORE AFTER" in shown
    assert "Compare two audits" in CliRunner().invoke(app, ["audit", "diff", "--help"]).stdout


def test_an_assertion_for_other_peoples_tests() -> None:
    assert_order_invariant(symmetric, records(4))
    with pytest.raises(AssertionError, match=r"outcome of 4 of 4 questions; in one order, that of 0") as failed:
        assert_order_invariant(first, records(4), orders=4)
    assert "(right)" in str(failed.value)
    assert "(wrong)" in str(failed.value)
    assert_order_invariant(first, records(4), allowed=1.0)

    def failing(question: str, segments: Sequence[Segment]) -> str:
        if question == "What is number 1?":
            raise RuntimeError("gone")
        return symmetric(question, segments)

    with pytest.raises(AssertionError, match="RuntimeError: gone"):
        assert_order_invariant(failing, records(4), retries=0)


def test_noise_is_not_asserted_to_be_order() -> None:
    source = random.Random(1)

    def noisy(question: str, segments: Sequence[Segment]) -> str:
        return "wrong" if source.random() < 0.1 else symmetric(question, segments)

    with pytest.warns(NoiseWarning, match="in one order"):
        assert_order_invariant(noisy, records(20), orders=6)


def test_noise_does_not_hide_an_order() -> None:
    source = random.Random(1)

    def both(question: str, segments: Sequence[Segment]) -> str:
        return "wrong" if source.random() < 0.1 else first(question, segments)

    with pytest.raises(AssertionError, match="in one order"):
        assert_order_invariant(both, records(20), orders=6)


@pytest.mark.parametrize("answer", ["", "the", "?!"])
def test_a_gold_answer_that_everything_holds_is_refused(answer: str) -> None:
    asked = [{"question": "Who?", "segments": ["a", "b"], "answers": [answer]}]
    with pytest.raises(InvalidQuestion, match="question 0: expected gold answers with words"):
        audit(lambda question, segments: "a", asked, orders=2)
    with pytest.raises(InvalidQuestion, match="expected gold answers with words"):
        audit(lambda question, segments: "a", asked, orders=2, metric=best_subspan_em)
    audit(lambda question, segments: "a", asked, orders=2, metric="exact_match")


def test_the_workflow_of_the_cookbook_runs_the_command() -> None:
    workflow = yaml.safe_load((ROOT / "cookbook" / "audit" / "github-actions.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = " ".join(step.get("run", "") for step in job["steps"])
    assert "invariant-rag audit" in commands
    assert "--fail-on" in commands
