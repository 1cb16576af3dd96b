"""Claims about whole audits of systems of known behaviour."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from invariant_rag.audit import ABOUT, Estimate, Question, Reply, audit
from invariant_rag.audit.grading import Grader
from invariant_rag.audit.plan import LISTINGS
from invariant_rag.audit.report import Gate
from invariant_rag.audit.result import worst_slot
from invariant_rag.errors import (
    AuditFailed,
    InvalidChoice,
    InvalidQuestion,
    UnknownName,
    UnsupportedCombination,
    UnusableFile,
)
from invariant_rag.segments import Segment
from tests.audit.known import at_random, first, records, sorting, symmetric

Function = Callable[[str, Sequence[Segment]], Any]


def last(question: str, segments: Sequence[Segment]) -> str:
    return segments[-1].text


def noisy(system: Function, share: float, *, cached: bool = False) -> Function:
    """Return a system that answers "wrong" by chance; behind a cache, equal calls get equal answers."""
    source, cache = random.Random(0), dict[Any, str]()

    def answer(question: str, segments: Sequence[Segment]) -> str:
        key = question, tuple(each.text for each in segments)
        if not cached or key not in cache:
            cache[key] = "wrong" if source.random() < share else system(question, segments)
        return cache[key]

    return answer


@pytest.mark.parametrize(
    ("system", "outcome"),
    [
        (first, "order matters"),
        (last, "order matters"),
        (sorting, "order does not matter"),
        (symmetric, "order does not matter"),
        (at_random, "cannot tell yet"),
    ],
)
def test_the_outcome_is_right_for_systems_that_are_known(system: Function, outcome: str) -> None:
    random.seed(0)
    found = audit(system, records(100), remedies=())
    assert found.screen.outcome == outcome
    assert dict(found.advice)["Finding"].startswith(outcome.replace("order", "The order").replace("cannot", "Cannot"))


@pytest.mark.parametrize("cached", [False, True])
def test_noise_is_no_order_even_behind_a_cache(cached: bool) -> None:
    found = audit(noisy(symmetric, 0.1, cached=cached), records(200), seed=1)
    assert not found.order_matters
    assert found.calls <= 1000
    assert (found.screen.repeated == 0.0) is cached
    assert ("hides noise" in dict(found.advice)["To know"]) is cached


def test_a_screen_of_200_questions_takes_at_most_1000_calls_and_says_each_step() -> None:
    calls, steps = [], list[str]()

    def counted(question: str, segments: Sequence[Segment]) -> str:
        calls.append(question)
        return at_random(question, segments)

    found = audit(counted, records(200), remedies=(), on_step=steps.append)
    assert len(calls) == found.calls <= 1000
    assert any("at most 100 calls" in each for each in steps)
    assert steps[-1].endswith(f"{found.screen.outcome}.")


def test_a_system_that_reads_the_last_is_told_to_reverse_and_the_gain_is_right() -> None:
    found = audit(last, [{**each, "segments": sorted(each["segments"], reverse=True)} for each in records(60, size=6)])
    assert found.screen.outcome == "order matters"
    gains = {each.name: each.gain for each in found.comparisons}
    assert gains["reverse"].value > 0.4
    assert dict(found.advice)["Recommendation"].startswith("Use `reverse`")


def test_remedies_and_today_have_as_many_distinct_draws() -> None:
    seen = list[tuple[str, ...]]()

    def listening(question: str, segments: Sequence[Segment]) -> str:
        seen.append((question, *(each.text for each in segments)))
        return first(question, segments)

    found = audit(listening, records(30), remedies=("sort", "reverse", "ends-first"))
    assert [each.name for each in found.comparisons] == ["sort", "reverse", "ends-first"]
    assert found.calls == len(seen) == 5 * found.screen.asked + 3 * 2 * 30 + 2 * (30 - found.screen.asked)
    repeats = 20  # of the first questions, one call is a plain repeat
    assert len(seen) - len(set(seen)) <= repeats + 30  # sorting may give the order of today


def test_a_vote_is_compared_on_request_and_its_calls_are_told() -> None:
    steps = list[str]()
    found = audit(noisy(symmetric, 0.2), records(100, size=5), remedies=("vote",), on_step=steps.append)
    (vote,) = found.comparisons
    assert vote.calls == 5
    assert steps[-1] == "vote against today: 100 questions, 1,000 calls more."
    assert found.calls == 5 * 100 + 1000
    few = audit(first, records(20, size=3), remedies=("vote", "sort")).comparisons
    assert [each.calls for each in few] == [3, 1]
    question = found.asked[0].question
    assert len({each.order for each in LISTINGS["vote"].calls("vote", question, 0)}) == 5
    assert vote.fixes
    assert vote.accuracy.value > 0.9 > found.measures["accuracy_today"].value  # of single calls, 0.8 are right


def test_the_worst_slot_is_the_worst_and_not_a_matter_of_luck() -> None:
    def middle(question: str, segments: Sequence[Segment]) -> str:
        place = next(index for index, each in enumerate(segments) if "right" in each.text)
        return "lost" if place == len(segments) // 2 else segments[place].text

    lost = audit(middle, records(100, size=5), remedies=()).measures["worst_slot"]
    assert lost.value == 0.0
    even = audit(noisy(symmetric, 0.2), records(100, size=5), remedies=()).measures["worst_slot"]
    assert even.low < 0.8 < even.high
    source = random.Random(2)  # chosen and measured on the same questions, the worst of three fair slots would be below
    drawn = [[[(number % 3, source.random() < 0.5)] for number in range(90)] for _ in range(40)]
    found = [each.value for outcomes in drawn if (each := worst_slot(outcomes)) is not None]
    assert sum(found) / len(found) == pytest.approx(0.5, abs=0.04)


def test_a_system_that_only_rewords_is_judged_by_meaning() -> None:
    asked = [{name: each[name] for name in ("question", "segments")} for each in records(60)]
    source = random.Random(1)

    def rewording(question: str, segments: Sequence[Segment]) -> str:
        return source.choice(["It is Ann.", "Ann, I would say.", "The documents name Ann."])

    def judge(prompt: str) -> str:
        return "yes" if prompt.count("Ann") >= 2 else "no"

    found = audit(rewording, asked, judge=judge, remedies=())
    assert found.screen.outcome == "order does not matter"
    assert "contradicted itself on 0 of" in dict(found.advice)["To know"]
    divided = audit(first, asked[:8], judge=lambda prompt: "yes" if "First answer: Nu" in prompt else "no", remedies=())
    assert divided.judge.divided > 0
    grader = Grader([Question("Who?", ())], judge=lambda prompt: "yes" if "First answer: Ann" in prompt else "no")
    assert grader.classes(Question("Who?", ()), ["Ann", "Bo"]) == [3, 4]  # divided by their order, they differ


def test_embeddings_tell_other_words_from_other_answers() -> None:
    asked = Question("Who built it, and when?", ())
    grader = Grader([asked])
    said = ["Ann built the bridge in 1912.", "The bridge was built by Ann in 1912.", "Ann built the bridge in 1913."]
    said += ["Ann did not build the bridge in 1912.", "Bertrand built the bridge in 1912."]
    assert grader.embeds
    assert grader.classes(asked, said)[:4] == [3, 3, 4, 5]
    assert grader.classes(asked, ["Yes.", "No."]) != grader.classes(asked, ["Yes.", "Yes!"])


def test_errors_and_exits_are_an_outcome(tmp_path: Path) -> None:
    def failing(question: str, segments: Sequence[Segment]) -> str:
        if "right" in segments[0].text:
            raise RuntimeError("no such page")
        return symmetric(question, segments)

    found = audit(failing, records(20), retries=0, out=tmp_path / "out", remedies=())
    assert found.order_matters
    assert 0.1 < found.measures["errors"].value < 0.4
    assert "RuntimeError: no such page" in dict(found.advice)["To know"]
    assert "failed" in (tmp_path / "out" / "report.md").read_text()
    stored = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    assert len(stored) == sum(answer.text is not None for each in found.asked for answer in each.answers)

    def exits(question: str, segments: Sequence[Segment]) -> str:
        return sys.exit(3) if "right" in segments[0].text else "x"

    async def exits_later(question: str, segments: Sequence[Segment]) -> str:
        return exits(question, segments)

    for system in (exits, exits_later):
        found = audit(system, records(8), retries=0, remedies=())
        assert 0 < found.measures["errors"].value < 1
        assert found.errors == ["RuntimeError: the system called sys.exit(3); expected an answer or an error"]


def test_an_audit_is_resumed_and_asks_nothing_twice(tmp_path: Path) -> None:
    calls = list[str]()

    def counting(question: str, segments: Sequence[Segment]) -> str:
        calls.append(question)
        return first(question, segments)

    def stopping(question: str, segments: Sequence[Segment]) -> str:
        if len(calls) == 60:
            raise KeyboardInterrupt
        return counting(question, segments)

    with pytest.raises(KeyboardInterrupt):
        audit(stopping, records(30), out=tmp_path / "run", name="mine")
    whole = audit(counting, resume=tmp_path / "run", name="mine", remedies=())
    direct = audit(first, records(30), remedies=())
    assert (whole.screen, len(calls)) == (direct.screen, direct.calls)
    assert len(calls) == whole.calls
    more = audit(counting, resume=tmp_path / "run", name="mine", remedies=("sort",))  # a remedy is added later
    assert [each.name for each in more.comparisons] == ["sort"]
    assert len(calls) == more.calls


def test_an_edited_system_never_gets_answers_of_the_old_one(tmp_path: Path) -> None:
    audit(first, records(4), out=tmp_path / "run")
    for wrong in (lambda: audit(last, records(4), out=tmp_path / "run"), lambda: audit(last, resume=tmp_path / "run")):
        with pytest.raises((UnusableFile, UnsupportedCombination)) as refused:
            wrong()
        assert "resume" in refused.value.hint or "new folder" in refused.value.hint


def refused(error: type[Exception], message: str, options: Any = None, **changes: Any) -> Any:
    return pytest.param(changes, options or {}, error, message, id=message)


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        refused(UnknownName, "did you mean 'sort'", {"remedies": ["srot"]}),
        refused(UnsupportedCombination, "not one of ours", {"remedies": ["rotor"]}),
        refused(InvalidChoice, "metric: expected a function", {"metric": "best"}),
        refused(InvalidChoice, "margin", {"margin": 0}),
        refused(InvalidChoice, "workers", {"workers": 0}),
        refused(InvalidChoice, "audit takes no 'max_new_tokens'", {"max_new_tokens": 4}),
        refused(InvalidChoice, "resume", {"out": "a", "resume": "b"}),
        refused(InvalidQuestion, "with question as text, got question", question=" "),
        refused(InvalidQuestion, "there is no order", segments=["a"]),
        refused(InvalidQuestion, "got NoneType", segments=["a", None]),
        refused(InvalidQuestion, "there is no order", {"retriever": lambda question: []}, segments=[]),
        refused(InvalidChoice, "a number from 0 to 1, got 7", {"metric": lambda answer, golds: 7}),
        refused(ZeroDivisionError, "by zero", {"metric": lambda answer, golds: 1 / 0}),
        refused(InvalidChoice, "judge: expected a model", {"judge": 3}),
        refused(AuditFailed, "replied with NoneType", {"judge": lambda prompt: None}),
        refused(AuditFailed, "wrong on 50% of the verdicts", {"judge": lambda prompt: "yes"}),
    ],
)
def test_what_cannot_be_is_refused_before_a_call_is_spent(
    changes: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    calls = list[str]()
    with pytest.raises(error, match=message):
        audit(
            lambda question, segments: calls.append(question), [{**each, **changes} for each in records(2)], **options
        )
    assert not calls


def test_gates_hold_beyond_doubt_only() -> None:
    dependent, blind = (audit(each, records(100), remedies=()) for each in (first, noisy(symmetric, 0.1)))
    for text in ("order-matters", "net-sensitivity>5%", " net-sensitivity > 5.0 %"):
        assert (Gate.parse(text).holds(dependent), Gate.parse(text).holds(blind)) == (True, False)
    net = dependent.measures["net_sensitivity"]
    assert net.low < net.value
    assert not Gate.parse(f"net-sensitivity>{50 * (net.low + net.value):.3f}%").holds(dependent)
    for wrong in ("flip-rate>5%", "accuracy-today<80%", "net-sensitivity<5%", ""):
        with pytest.raises(InvalidChoice, match="expected order-matters, or a bound such as") as refused:
            Gate.parse(wrong)
        assert "moves with noise" in refused.value.hint


def test_without_evidence_nothing_is_left_and_equal_answers_are_looked_at() -> None:
    found = audit(noisy(last, 0.3), records(20), seed=2)
    advice = dict(found.advice)["Recommendation"]
    assert found.screen.outcome == "cannot tell yet"
    assert "Leave it" not in advice
    assert f"{found.screen.more:,} questions more" in advice
    for count in (20, 100):
        alike = audit(lambda question, segments: "Ann", records(count))
        assert (alike.screen.outcome, alike.screen.more) == ("cannot tell yet", 0)
        assert "with other texts in the documents, too" in dict(alike.advice)["Finding"]
        advice = dict(alike.advice)["Recommendation"]
        assert advice.startswith("Look at the call first: every answer was the same, 'Ann'")


def test_who_says_the_same_from_documents_reads_them_and_who_needs_none_does_not() -> None:
    reads = audit(lambda question, segments: str(any("right" in each.text for each in segments)), records(100))
    assert reads.screen.outcome == "order does not matter"
    assert dict(reads.advice)["Recommendation"].startswith("Leave it")
    with pytest.raises(AuditFailed, match="does not read the documents it is given"):
        audit(lambda question, segments: question, records(30))
    assert (
        audit(symmetric, records(20)).errors == []
    )  # it fails for other documents, once: that is no error of an order


def test_a_remedy_among_several_has_a_corrected_p_value() -> None:
    found = [
        {
            each.name: each.p
            for each in audit(noisy(last, 0.05), records(20, size=6), remedies=names, seed=3).comparisons
        }
        for names in (("reverse",), ("reverse", "sort", "ends-first"))
    ]
    assert found[1]["reverse"] >= min(1.0, 1.5 * found[0]["reverse"])


def test_calls_are_tried_again_and_given_up_where_nothing_is_ever_answered(tmp_path: Path) -> None:
    failed, calls = list[str](), list[str]()

    def flaky(question: str, segments: Sequence[Segment]) -> str:
        if not failed:
            failed.append(question)
            raise ConnectionError("try later")
        return symmetric(question, segments)

    found = audit(flaky, records(4), remedies=())
    assert found.measures["errors"].value == 0.0
    assert found.errors == ["ConnectionError: try later"]

    def failing(question: str, segments: Sequence[Segment]) -> str:
        calls.append(question)
        raise ConnectionError("no line")

    with pytest.raises(AuditFailed, match="ConnectionError: no line"):
        audit(failing, records(20), retries=0)
    assert len(calls) == 10
    with pytest.raises(AuditFailed, match="expected an answer as text"):
        audit(lambda question, segments: {"docs": 1}, records(2))
    with pytest.raises(AuditFailed, match="the server cannot be reached: Connection refused"):
        audit(first, records(4), judge="http://127.0.0.1:9/v1", out=tmp_path / "out")
    assert not list(tmp_path.iterdir()), "what fails before the first call leaves no folder"


@pytest.mark.parametrize("is_async", [False, True])
def test_async_systems_are_awaited_in_one_loop_and_an_interrupt_stops_an_audit(is_async: bool) -> None:
    loops = set()

    async def awaited(question: str, segments: Sequence[Segment]) -> Reply:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return Reply(first(question, segments), tokens=3)

    def interrupted(question: str, segments: Sequence[Segment]) -> str:
        raise KeyboardInterrupt

    async def interrupted_later(question: str, segments: Sequence[Segment]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(interrupted_later if is_async else interrupted, records(3))
    if is_async:
        assert audit(awaited, records(3), workers=4).as_dict()["tokens"] == 45
        assert len(loops) == 1


def test_the_result_is_plain_data_that_does_not_depend_on_threads(tmp_path: Path) -> None:
    found = audit(first, records(12), out=tmp_path / "out", workers=6)
    one, many = audit(first, records(12)).as_dict(), found.as_dict()
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert (written["schema_version"], written["screen"]["outcome"]) == (1, found.screen.outcome)
    assert list(written["measures"]) == [name for name in ABOUT if name in found.measures]
    assert set(ABOUT) == {*written["measures"], "worst_slot"}
    assert len(written["questions"]) == 12
    for each in (one, many):
        del each["date"], each["seconds"]
    assert one == many


@pytest.mark.parametrize("gold", ["", [], None, [""], float("nan"), "*", "A", "the", "no"])
def test_an_odd_gold_answer_ends_no_audit_and_an_empty_one_is_none(gold: Any) -> None:
    asked = [{"question": f"q{n}", "segments": ["a b", "c d"], "answers": gold} for n in range(3)]
    found = audit(lambda question, segments: str(gold), asked, metric=None)
    assert found.measures.get("accuracy_today", Estimate(0, 0, 0)).value == (isinstance(gold, str) and gold != "")
    assert ("No gold answers" in dict(found.advice)["Today"]) is ("accuracy_today" not in found.measures)
    if gold == "no":
        right = audit(lambda question, segments: "yes", asked, metric=lambda answer, golds: golds[0] == "no")
        assert right.measures["accuracy_today"].value == 1.0, "a metric may say True"


def test_questions_without_an_order_are_counted_and_not_asked() -> None:
    alone = [{"question": "Who?", "segments": ["Ann."]}, {"question": "When?", "segments": ["May.", "May."]}]
    found = audit(first, [*records(3), *alone])
    assert (found.planned, found.unordered) == (3, 2)
    assert "2 questions with fewer than two different documents" in dict(found.advice)["To know"]
