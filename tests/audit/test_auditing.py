"""Claims about whole audits of systems of known behaviour: outcome and advice, remedies, meaning, failures, runs."""

import asyncio
import csv
import json
import random
import re
import sys

import pytest

from invariant_rag import errors
from invariant_rag.audit import ABOUT, Estimate, Question, SystemReply, audit
from invariant_rag.audit.grading import Grader
from invariant_rag.audit.plan import LISTINGS, screen_calls, slot_of
from invariant_rag.audit.report import Gate, p_value
from invariant_rag.audit.result import Comparison, worst_slot
from invariant_rag.segments import Segment
from tests.audit.known import first, interrupted, last, listening, noisy, records, symmetric, where_first

MATTERS, DOES_NOT, UNKNOWN = "order matters", "order does not matter", "cannot tell yet"
ALIKE = "Look at the call first, below: every answer was the same, 'Ann'"


@pytest.mark.parametrize(
    ("system", "count", "outcome", "recommendation"),
    [
        (first, 200, MATTERS, "Against today: sort"),
        (symmetric, 100, DOES_NOT, "Leave it: change nothing"),
        (lambda _, segments: str("right" in str(segments)), 100, DOES_NOT, "Leave it: change nothing"),
        (lambda _, segments: random.choice(segments).text, 100, UNKNOWN, "Decide nothing yet"),
        (noisy(last, 0.6), 20, UNKNOWN, "Decide nothing yet"),
        (lambda question, segments: "Ann", 20, UNKNOWN, ALIKE),
        (lambda *_: "Ann", 100, UNKNOWN, ALIKE),
        (lambda _, segments: segments[0].text[::-1], 100, UNKNOWN, "Look at answers.csv first: do gold answers say"),
    ],
)
def test_outcome_and_advice_are_right(system, count, outcome, recommendation):
    random.seed(0)
    found = audit(system, records(count))
    advice, more = dict(found.advice), found.screen.more
    finding, said = advice["Finding"], advice["Recommendation"]
    assert (found.screen.outcome, bool(found.comparisons)) == (outcome, outcome == MATTERS)
    assert finding.startswith(outcome.replace("order", "The order").replace("cannot", "Cannot"))
    assert recommendation in said
    assert ("Leave it" in said, f"{more:,} questions more" in said) == (outcome == DOES_NOT, more > 0)
    assert (more > 0) is ("Decide nothing" in said)
    assert outcome != DOES_NOT or f"below {100 * found.screen.bound:.1f} with 95% confidence" in finding
    assert ("with other texts in the documents, too" in finding) is ("First call" in advice) is (said.startswith(ALIKE))
    if "First call" in advice:  # as it was sent
        asked = found.asked[0].question
        assert all(repr(each) in advice["First call"] for each in (asked.text, *(each.text for each in asked.segments)))
    if count == 200:  # it stops early, and a file may be sorted by topic
        assert found.screen.asked <= 100
        assert {each.question.id for each in found.asked} != {f"q{number}" for number in range(found.screen.asked)}
    assert found.errors == []  # who fails for other documents, asked once, has made no error of an order


def test_who_needs_no_documents_is_refused_with_what_was_sent_and_calls_are_given_up_where_none_is_answered():
    asked = []
    with pytest.raises(errors.AuditFailed, match="does not read the documents it is given") as refused:
        audit(lambda question, segments: asked.append(1) or question, records(200))
    assert len(asked) == 5 * 20 + 3  # of the first look
    assert re.search(r"The first call was: .*What is number \d+\?.*Nothing \d+ \d\.", str(refused.value))
    calls = []
    with pytest.raises(errors.AuditFailed, match="ZeroDivisionError: division by zero") as refused:
        audit(listening(lambda *_: 1 / 0, calls), records(20), retries=0)
    assert (len(calls), "to_input=lambda" in refused.value.hint) == (10, True)
    with pytest.raises(errors.AuditFailed, match="expected an answer as text"):
        audit(lambda question, segments: {"docs": 1}, records(2))


@pytest.mark.parametrize("cached", [False, True])
def test_noise_is_no_order_even_behind_a_cache(cached):
    calls, steps = [], []
    found = audit(listening(noisy(symmetric, 0.1, cached=cached), calls), records(200), seed=1, on_step=steps.append)
    assert not found.order_matters
    assert len(calls) == found.calls <= 1000
    assert any("at most 100 calls" in each for each in steps)
    assert steps[-1].endswith(f"{found.screen.outcome}.")
    assert (found.screen.repeated == 0.0) is cached
    assert ("hides noise" in dict(found.advice)["To know"]) is cached


def test_later_repeats_are_placebos_and_no_placebo_changes_the_answer():
    answer = Segment("Ann did it.")
    for place, prompts in ((19, 2), (20, 3)):
        calls = screen_calls(Question("Who?", (Segment("Bo did not."), answer), gold=(1,)), 0, place, 0)
        assert len({call.segments for call in calls[:3]}) == prompts
        assert all(answer in call.segments for call in calls)
        assert [call.order for call in calls[3:]] == [(1, 0)] * 2  # and no other order is today's


def test_gates_hold_beyond_doubt_only():
    dependent, blind = (audit(each, records(100), remedies=()) for each in (first, noisy(symmetric, 0.1)))
    for text in ("order-matters", "net-sensitivity>5%", " net-sensitivity > 5.0 %"):
        assert (Gate.parse(text).holds(dependent), Gate.parse(text).holds(blind)) == (True, False)
    net = dependent.measures["net_sensitivity"]
    assert net.low < net.value
    assert not Gate.parse(f"net-sensitivity>{50 * (net.low + net.value):.3f}%").holds(dependent)
    for wrong in ("flip-rate>5%", "accuracy-today<80%", "net-sensitivity<5%", ""):
        with pytest.raises(errors.InvalidChoice, match="expected order-matters, or a bound such as") as refused:
            Gate.parse(wrong)
        assert "moves with noise" in refused.value.hint


def test_remedies_and_today_have_as_many_distinct_draws():
    seen = []
    found = audit(listening(first, seen), records(30), remedies=("sort", "reverse", "ends-first"))
    assert [each.name for each in found.comparisons] == ["sort", "reverse", "ends-first"]
    assert found.calls == len(seen) == 5 * 30 + 3 * 2 * 30
    repeats = 20  # of the first questions, one call is a plain repeat
    assert len(seen) - len(set(seen)) <= repeats + 30  # sorting may give the order of today
    found = audit(lambda *call: symmetric(*call) if "  " in str(call) else "no", records(20), remedies=["sort"])
    (even,) = found.comparisons
    assert (even.accuracy.value, even.gain.value) == (0.5, 0.0)  # of both, one draw is the placebo
    assert found.flips == []  # that is no order


def test_a_vote_is_compared_on_request_and_its_calls_are_told():
    steps = []
    found = audit(noisy(symmetric, 0.2), records(100, size=5), remedies=("vote",), on_step=steps.append)
    (vote,) = found.comparisons
    assert (vote.calls, vote.fixes, found.calls) == (5, True, 5 * 100 + 1000)
    assert steps[-1] == "vote against today: 100 questions, 1,000 calls more."
    few = audit(first, records(20, size=3), remedies=("vote", "sort")).comparisons
    assert [each.calls for each in few] == [3, 1]
    assert len({each.order for each in LISTINGS["vote"].calls("vote", found.asked[0].question, 0)}) == 5
    assert vote.accuracy.value > 0.9 > found.measures["accuracy_today"].value  # of single calls, 0.8 are right


def test_who_reads_the_last_is_told_to_reverse_and_a_remedy_among_several_has_a_corrected_p_value():
    found = audit(last, [{**each, "segments": sorted(each["segments"], reverse=True)} for each in records(60, size=6)])
    assert found.screen.outcome == "order matters"
    assert {each.name: each.gain for each in found.comparisons}["reverse"].value > 0.4
    assert dict(found.advice)["Recommendation"].startswith("Use `reverse`")
    one, three = (
        audit(noisy(last, 0.05), records(20, size=6), remedies=names, seed=3).comparisons[0].p
        for names in (("reverse",), ("reverse", "sort", "ends-first"))
    )
    assert three >= min(1.0, 1.5 * one)
    better = [Comparison("", "", False, 1, gain=Estimate(0.2, 0.1, 0.3), p=p).is_better for p in (0.02, 0.021)]
    assert (better, p_value(0.0009), p_value(0.001)) == ([True, False], "p < 0.001", "p = 0.001")


def test_the_worst_slot_is_the_worst_and_not_a_matter_of_luck():
    def middle(question, segments):
        return "lost" if "right" in segments[len(segments) // 2].text else symmetric(question, segments)

    lost, even = (
        audit(system, records(100, size=5), remedies=()).measures["worst_slot"]
        for system in (middle, noisy(symmetric, 0.2))
    )
    assert lost.value == 0.0
    assert even.low < 0.8 < even.high
    source = random.Random(2)  # chosen and measured on the same questions, the worst of three fair slots would be below
    drawn = [[[(number % 3, source.random() < 0.5)] for number in range(90)] for _ in range(40)]
    found = [each.value for outcomes in drawn if (each := worst_slot(outcomes)) is not None]
    assert sum(found) / len(found) == pytest.approx(0.5, abs=0.04)
    two, five = (Question("Who?", tuple(map(Segment, texts)), gold=(0,)) for texts in ("ab", "abcde"))
    assert [slot_of(two, order) for order in ((0, 1), (1, 0))] == [0, 4]  # first and last part, of however many
    assert LISTINGS["ends-first"].orders(five) == [(0, 2, 4, 3, 1)]


def test_a_system_that_only_rewords_is_judged_by_meaning_with_a_judge_and_without_by_embeddings():
    asked = [{name: each[name] for name in ("question", "segments")} for each in records(60)]
    source = random.Random(1)

    def rewording(question, segments):
        return source.choice(["It is Ann.", "Ann, I would say.", "The documents name Ann."])

    found = audit(rewording, asked, judge=lambda prompt: "yes" if prompt.count("Ann") >= 2 else "no", remedies=())
    assert found.screen.outcome == "order does not matter"
    assert "contradicted itself on 0 of" in dict(found.advice)["To know"]
    divided = audit(first, asked[:8], judge=lambda prompt: "yes" if "First answer: Nu" in prompt else "no", remedies=())
    assert divided.judge.divided > 0
    who = Question("Who?", ())
    grader = Grader([who], judge=lambda prompt: "yes" if "First answer: Ann" in prompt else "no")
    assert grader.classes(who, ["Ann", "Bo"]) == [3, 4]  # divided by their order, they differ
    grader = Grader([asked := Question("Who built it, and when?", ())])
    said = ["Ann built the bridge in 1912.", "The bridge was built by Ann in 1912.", "Ann built the bridge in 1913."]
    said += ["Ann did not build the bridge in 1912.", "Bertrand built the bridge in 1912."]
    assert grader.embeds
    assert grader.classes(asked, said)[:4] == [3, 3, 4, 5]
    assert grader.classes(asked, ["Yes.", "No."]) != grader.classes(asked, ["Yes.", "Yes!"])


@pytest.mark.parametrize("gold", ["", [], None, [""], float("nan"), "*", "A", "the", "no"])
def test_an_odd_gold_answer_ends_no_audit_and_an_empty_one_is_none(gold):
    asked = [{"question": f"q{n}", "segments": ["a b", "c d"], "answers": gold} for n in range(3)]
    is_gold, accuracy = isinstance(gold, str) and gold != "", "accuracy_today"
    found = audit(lambda question, segments: str(gold), asked)
    assert (accuracy in found.measures, "No gold answers" in dict(found.advice)["Today"]) == (is_gold, not is_gold)
    scores = (0.5, True)  # from one half on, a metric says right
    graded = [audit(lambda *_: "yes", asked, metric=lambda *_, score=score: score) for score in scores]
    assert not is_gold or [each.measures[accuracy].value for each in (found, *graded)] == [1.0] * 3


def later(system):
    async def answer(question, segments):
        return system(question, segments)

    return answer


def test_errors_and_exits_are_an_outcome_and_calls_are_tried_again(tmp_path):
    exits, said = where_first(lambda: sys.exit(3), symmetric), "called sys.exit(3); expected an answer or an error"
    for name, system, error in (
        ("fails", where_first(lambda: {}["no such page"], symmetric), "KeyError: 'no such page'"),
        ("exits", exits, f"the system {said}"),
        ("exits later", later(exits), f"the system {said}"),
    ):
        found = audit(system, records(20), retries=0, out=(out := tmp_path / name), remedies=())
        assert found.order_matters
        assert 0.1 < found.measures["errors"].value < 0.4
        assert found.errors[0].removeprefix("RuntimeError: ") == error
        assert error in dict(found.advice)["To know"]
        assert "failed" in (out / "report.md").read_text()
        stored = (out / "answers.jsonl").read_text().splitlines()
        assert len(stored) == sum(answer.text is not None for each in found.asked for answer in each.answers)
    calls = []
    flaky = listening(lambda *asked: 1 / 0 if len(calls) == 1 else symmetric(*asked), calls)
    found = audit(flaky, records(4), remedies=())
    assert (found.measures["errors"].value, found.errors) == (0.0, ["ZeroDivisionError: division by zero"])


def test_async_systems_are_awaited_in_one_loop_and_an_interrupt_stops_an_audit():
    loops = set()

    async def awaited(question, segments):
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return SystemReply(first(question, segments), tokens=3)

    for system in (interrupted, later(interrupted)):
        with pytest.raises(KeyboardInterrupt):
            audit(system, records(3))
    assert audit(awaited, records(3), workers=4).as_dict()["tokens"] == 45
    assert len(loops) == 1


def test_an_audit_is_resumed_and_asks_nothing_twice(tmp_path):
    calls, choices = [], {"seed": 5, "margin": 0.1, "remedies": ()}

    def stopping(question, segments):
        return interrupted(question, segments) if len(calls) == 60 else listening(first, calls)(question, segments)

    with pytest.raises(KeyboardInterrupt):
        audit(stopping, records(30), out=tmp_path / "run", name="mine", **choices)
    counting, direct = listening(first, calls), audit(first, records(30), **choices)
    whole = audit(counting, resume=tmp_path / "run", name="mine", remedies=())
    assert (whole.screen, whole.calls, len(calls)) == (direct.screen, direct.calls, direct.calls)
    more = audit(counting, resume=tmp_path / "run", name="mine", remedies=("sort",))  # a remedy is added later
    assert [each.name for each in more.comparisons] == ["sort"]
    assert len(calls) == more.calls


def test_an_edited_system_never_gets_answers_of_the_old_one(tmp_path):
    audit(first, records(4), out=tmp_path / "run")
    for wrong in (lambda: audit(last, records(4), out=tmp_path / "run"), lambda: audit(last, resume=tmp_path / "run")):
        with pytest.raises((errors.UnusableFile, errors.UnsupportedCombination)) as refused:
            wrong()
        assert "resume" in refused.value.hint or "new folder" in refused.value.hint
    run = tmp_path / "run" / "run.json"
    for other in (run.read_text().replace('"schema_version": 1', '"schema_version": 0'), "{}", "["):
        run.write_text(other)
        with pytest.raises(errors.AuditFailed, match=r"run\.json: no audit"):
            audit(first, resume=tmp_path / "run")


def test_the_result_is_plain_data_and_its_page_begins_with_the_answer_can_be_read_aloud_and_is_alone(tmp_path):
    alone = [{"question": "Who?", "segments": ["Ann."]}, {"question": "When?", "segments": ["May.", "May."]}]
    found = audit(first, [*records(30), *alone], out=tmp_path / "out", workers=6)
    one, many = audit(first, [*records(30), *alone]).as_dict(), found.as_dict()
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert (written["schema_version"], written["screen"]["outcome"]) == (1, found.screen.outcome)
    assert list(written["measures"]) == [name for name in ABOUT if name in found.measures]
    assert set(ABOUT) == {*written["measures"], "worst_slot"}
    assert len(written["questions"]) == 30
    for each in (one, many):
        del each["date"], each["seconds"]
    assert one == many, "threads change nothing"
    page = (tmp_path / "out" / "report.html").read_text()
    places = [page.index(each) for each in ("Finding:", "Recommendation:", "Questions whose outcome", ">Measures<")]
    assert places == sorted(places)
    assert page.rindex("flips: What is") < page.index("same: What is")
    for each in ("prefers-color-scheme: dark", '<html lang="en">', 'scope="col"', 'scope="row"'):
        assert each in page
    assert page.count("<caption>") == page.count("<table>") > 0
    assert re.findall(r'<svg role="img"[^>]*><title>[^<]*net sensitivity \S+%[^<]*</title>', page)
    assert not re.findall(r"(?:src|href)=", page)
    assert (found.planned, found.unordered) == (30, 2)
    assert "2 questions with fewer than two different documents" in page


def test_markup_and_control_characters_of_answers_stay_text_and_the_table_runs_no_formula(tmp_path):
    def hostile(question, segments):
        sign = "=+-@"[int(question[-2])]
        return sign + "1+1 <script>alert(1)</script> {{ 7 * 7 }} \x1b[31m \ud83d | a" + segments[0].text[:3]

    audit(hostile, records(4), out=tmp_path / "out", name="<script> *me*")
    page, text, table = ((tmp_path / "out" / name).read_text() for name in ("report.html", "report.md", "answers.csv"))
    assert "<script>" not in page + text
    assert "&lt;script&gt;" in page
    assert "49" not in re.sub(r"\d{2,}", "", page)
    assert "\x1b" not in page + text
    rows = list(csv.DictReader(table.splitlines()))
    assert len(rows) == 20
    assert {each["answer"][:5] for each in rows} == {"'=1+1", "'+1+1", "'-1+1", "'@1+1"}
    assert [each["call"] for each in rows[:5]] == ["today", "today again", "placebo", "another order", "a third order"]


def test_what_cannot_be_is_refused_before_a_call_is_spent_or_a_folder_is_made(tmp_path):
    for error, message, options, changes in (
        (errors.UnknownName, "did you mean 'sort'", {"remedies": ["srot"]}, {}),
        (errors.UnsupportedCombination, "not one of ours", {"remedies": ["rotor"]}, {}),
        (errors.InvalidChoice, "metric: expected a function", {"metric": "best"}, {}),
        (errors.InvalidChoice, "margin", {"margin": 0}, {}),
        (errors.InvalidChoice, "workers", {"workers": 0}, {}),
        (errors.InvalidChoice, "audit takes no 'max_new_tokens'", {"max_new_tokens": 4}, {}),
        (errors.InvalidChoice, "resume", {"out": "a", "resume": "b"}, {}),
        (errors.InvalidQuestion, "with question as text, got question", {}, {"question": " "}),
        (errors.InvalidQuestion, "there is no order", {}, {"segments": ["a"]}),
        (errors.InvalidQuestion, "got NoneType", {}, {"segments": ["a", None]}),
        (errors.InvalidQuestion, "there is no order", {"retriever": lambda question: []}, {"segments": []}),
        (errors.InvalidChoice, "a number from 0 to 1, got 7", {"metric": lambda answer, golds: 7}, {}),
        (ZeroDivisionError, "by zero", {"metric": lambda answer, golds: 1 / 0}, {}),
        (errors.InvalidChoice, "judge: expected a model", {"judge": 3}, {}),
        (errors.AuditFailed, "replied with NoneType", {"judge": lambda prompt: None}, {}),
        (errors.AuditFailed, "wrong on 50% of the verdicts", {"judge": lambda prompt: "yes"}, {}),
        (errors.AuditFailed, "server cannot be reached: Connection refused", {"judge": "http://127.0.0.1:9/v1"}, {}),
    ):
        calls, where = [], {"out": tmp_path / "out"}
        with pytest.raises(error, match=message):
            audit(listening(first, calls), [{**each, **changes} for each in records(2)], **{**where, **options})
        assert (calls, list(tmp_path.iterdir())) == ([], [])
