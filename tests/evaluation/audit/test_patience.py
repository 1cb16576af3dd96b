"""Claims about systems that fail, are slow or are awaited: none of that stops an audit or is silent."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit import Reply, audit
from invariant_rag.evaluation.audit.patience import Patience
from invariant_rag.evaluation.audit.report_text import summary
from invariant_rag.segments import Segment
from tests.evaluation.audit.known import first, numbers, records


def test_one_exception_does_not_stop_an_audit_and_is_said(tmp_path: Path) -> None:
    def failing(question: str, segments: Sequence[Segment]) -> str:
        if "number 7" in question and "right" in segments[-1].text:
            raise RuntimeError("no such page")
        return first(question, segments)

    result = audit(failing, records(20), remedies=["sort"], out=tmp_path, retries=0)
    assert result.complete == 20
    assert result.failed == sum(each.text is None for asked in result.asked for each in asked.answers if each) > 0
    assert result.errors == (("RuntimeError: no such page", result.failed),)
    report = (tmp_path / "report.md").read_text()
    assert "calls failed" in report
    assert "RuntimeError" in report
    stored = len((tmp_path / "answers.jsonl").read_text().splitlines())
    assert stored == result.calls - result.failed
    assert audit(failing, records(20), remedies=["sort"], out=tmp_path, retries=0).reused.answers == stored
    assert result.failures.questions == 1
    assert "20 questions asked, with" in summary(result)
    assert f"{result.failed} calls failed ({result.failures.share:.1%}), about 1 of 20 questions" in summary(result)
    assert "in full" not in summary(result)


@pytest.mark.usefixtures("undrawn")
def test_a_failure_that_passes_is_tried_again_changes_no_number_and_is_counted(tmp_path: Path) -> None:
    failed: set[tuple[str, ...]] = set()

    def flaky(question: str, segments: Sequence[Segment]) -> str:
        asked = (question, *(each.text for each in segments))
        if "number 1" in question and segments[0].text.startswith("No") and asked not in failed and len(failed) < 3:
            failed.add(asked)
            raise ConnectionError("try later")
        return first(question, segments)

    result = audit(flaky, records(4), remedies=["sort"], out=tmp_path)
    assert len(failed) == 3
    assert result.failed == 0
    assert numbers(result) == numbers(audit(first, records(4), remedies=["sort"]))
    again = audit(flaky, records(4), remedies=["sort"], out=tmp_path)  # of stored answers
    for each in (result, again):
        assert (each.failures.failed_tries, each.failures.tries) == (3, each.calls + 3)
        assert each.errors == (("ConnectionError: try later", 3),)
    assert again.reused.answers == again.calls
    share = f"{3 / (again.calls + 3):.1%}"
    assert f"({share}), and a retry cured each of them: 3 x ConnectionError" in summary(again)
    assert any(each.startswith(f"{share} of the tries failed") for each in again.advice.sections[0][1])


def test_pauses_grow_and_an_error_that_no_retry_cured_is_not_retried_again() -> None:
    calls, start = [], time.perf_counter()

    def failing() -> Reply:
        calls.append(time.perf_counter() - start)
        raise ValueError("always")

    with pytest.raises(ValueError, match="always"):
        Patience(retries=2, pause=0.05).call(failing, lambda error: False)
    assert len(calls) == 3
    assert calls[1] >= 0.05
    assert calls[2] - calls[1] >= 0.1
    with pytest.raises(ValueError, match="always"):
        Patience(retries=2).call(failing, lambda error: True)
    assert len(calls) == 4


def test_a_system_that_never_answers_stops_the_audit_soon(tmp_path: Path) -> None:
    calls = []

    def failing(question: str, segments: Sequence[Segment]) -> str:
        calls.append(question)
        raise ConnectionError("no line")

    with pytest.raises(AuditFailed, match="ConnectionError: no line"):
        audit(failing, records(20), retries=0, out=tmp_path)
    assert len(calls) == 10
    with pytest.raises(AuditFailed, match="ConnectionError: no line"):
        audit(failing, records(1, size=2), remedies=[], slots=2, repeats=1, retries=0)


def test_many_failures_are_to_be_fixed_first() -> None:
    def failing(question: str, segments: Sequence[Segment]) -> str:
        if "right" in segments[0].text or "right" in segments[1].text:
            raise RuntimeError("no")
        return first(question, segments)

    assert audit(failing, records(20), remedies=["sort"], retries=0).advice.choice == "fix the errors"


def test_a_slow_call_fails_and_the_others_count() -> None:
    def slow(question: str, segments: Sequence[Segment]) -> str:
        if "number 1" in question and "right" in segments[0].text:
            time.sleep(5)
        return first(question, segments)

    start = time.perf_counter()
    result = audit(slow, records(3), remedies=[], timeout=0.1, retries=0, workers=8, slots=2)
    assert time.perf_counter() - start < 4
    assert 0 < result.failed < result.calls
    assert "TimeoutError: no answer within 0.1 seconds, the timeout of one try" in result.errors[0][0]
    assert "--timeout" in result.errors[0][0]


def exits(question: str, segments: Sequence[Segment]) -> str:
    if "number 1" in question and "right" in segments[0].text:
        sys.exit(3)
    return first(question, segments)


async def exits_later(question: str, segments: Sequence[Segment]) -> str:
    await asyncio.sleep(0)
    return exits(question, segments)


@pytest.mark.parametrize("system", [exits, exits_later])
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_system_that_exits_fails_that_call_and_no_other(system: Callable[..., object], timeout: float | None) -> None:
    result = audit(system, records(3), remedies=[], retries=0, slots=2, timeout=timeout)
    assert 0 < result.failed < result.calls
    assert result.errors[0][0].startswith("RuntimeError: the system called sys.exit(3)")


def test_a_system_that_always_exits_ends_the_audit_with_a_word() -> None:
    with pytest.raises(AuditFailed, match=r"called sys.exit\(\)"):
        audit(lambda question, segments: sys.exit(), records(3), remedies=[], retries=0)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_stops_an_audit(is_async: bool) -> None:
    def interrupted(question: str, segments: Sequence[Segment]) -> str:
        raise KeyboardInterrupt

    async def interrupted_later(question: str, segments: Sequence[Segment]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(interrupted_later if is_async else interrupted, records(3), remedies=[])


def test_a_call_that_was_tried_once_had_no_retries() -> None:
    result = audit(exits, records(3), remedies=[], retries=0, slots=2)
    assert "each call was tried once: " in summary(result)
    assert "retries" not in summary(result)


def test_a_budget_that_is_too_small_says_what_one_question_takes() -> None:
    with pytest.raises(
        AuditFailed, match=r"the budget of 3 calls is used up, the first question alone takes \d+"
    ) as error:
        audit(first, records(3), remedies=[], budget=3)
    assert "--budget" in error.value.hint


def test_async_systems_are_awaited_in_one_loop() -> None:
    loops = set()

    async def awaited(question: str, segments: Sequence[Segment]) -> Reply:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return Reply(first(question, segments), tokens=3)

    result = audit(awaited, records(3), remedies=["sort"], workers=4)
    assert len(loops) == 1
    assert result["as it is"].measures["tokens"].value == 3.0
    assert result["as it is"].measures["worst"].value == 0.0
