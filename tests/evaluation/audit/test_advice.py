"""Claims about advice, on outcomes that are made up: no system is asked."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from invariant_rag.evaluation.audit import Estimate, Question, audit
from invariant_rag.evaluation.audit.advice import Advice, advise
from invariant_rag.evaluation.audit.effects import Effects, Listing, OrderEffect, assess
from invariant_rag.evaluation.audit.failures import Failures
from invariant_rag.evaluation.audit.finding import Finding, Kind
from invariant_rag.evaluation.audit.measures import RemedyMeasures
from invariant_rag.evaluation.audit.outcomes import Outcomes
from invariant_rag.evaluation.audit.preparing import prepare
from invariant_rag.evaluation.audit.report_text import summary
from invariant_rag.evaluation.statistics import mean_interval
from invariant_rag.segments import Segment
from tests.evaluation.audit.known import first, records, symmetric
from tests.evaluation.audit.test_today import by_hash_of_order, noisy

AS_IS = "as it is"
NONE_FAILED = Failures(1)
Floats = NDArray[np.float64]


def outcomes(given: Floats, orders: Floats, slots: Floats | None = None) -> Outcomes:
    """Outcomes of which the scores are the same; by default, the slots do nothing."""
    moved = np.ones((len(given), 3)) if slots is None else slots
    return Outcomes(given, orders, moved, given, orders, moved, moved)


def measures(name: str, found: Outcomes, calls: float) -> RemedyMeasures:
    every = np.hstack([found.given, found.orders])
    numbers = {
        "today": found.today,
        "flip_rate": (every.min(axis=1) < every.max(axis=1)).astype(float),
        "noise": found.noise,
        "calls": np.full(len(every), calls),
        "seconds": np.zeros(len(every)),
    }
    slots = tuple(mean_interval(column.tolist()) for column in found.slot_scores.T)
    shares = {each: mean_interval(values.tolist()) for each, values in numbers.items()}
    return RemedyMeasures(name, shares, {}, slots, slots, None, None, ())


def advice(
    system: Outcomes, remedies: dict[str, tuple[float, Outcomes]], listing: Listing, failures: Failures = NONE_FAILED
) -> Advice:
    calls = {name: each for name, (each, _) in remedies.items()}
    found = {name: each for name, (_, each) in remedies.items()}
    effects = assess(system, found, calls, listing=listing)
    measured = [measures(AS_IS, system, 1.0), *(measures(name, each, calls[name]) for name, each in found.items())]
    return advise(measured, effects, len(system.given), failures)


def fixed(right: Floats) -> Outcomes:
    """Outcomes with a remedy that gives every input order the same answer."""
    return outcomes(np.repeat(right, 3, axis=1), np.repeat(right, 9, axis=1))


def sensitive(questions: int, today: float = 0.5) -> tuple[Outcomes, Outcomes]:
    """A system that answers a quarter of the questions from half of the orders; and sorting, as often right."""
    source = np.random.default_rng(0)
    easy = np.arange(questions)[:, None] % 4 > 0
    given = easy | (np.arange(questions)[:, None] % 40 < 40 * today)
    orders = easy | (source.random((questions, 9)) < 0.5)
    return outcomes(np.repeat(given, 3, axis=1) * 1.0, orders * 1.0), fixed(np.roll(given, 80, axis=0) * 1.0)


@pytest.mark.parametrize("listing", [Listing.BY_SCORE, Listing.UNKNOWN])
def test_the_same_answers_get_the_same_advice_whether_or_not_the_scores_are_known(listing: Listing) -> None:
    system, sort = sensitive(200)
    found = advice(system, {"sort": (1.0, sort)}, listing)
    assert found.choice == "leave it"
    assert "users" in found.headline
    assert "get one order" in found.headline
    assert "If that order can change from one time to the next: sort the documents by a hash" in found.headline
    assert "0.0% of the questions flip instead of 25.0%" in found.headline


def test_whoever_lists_by_score_is_told_what_keeps_to_that() -> None:
    system, sort = sensitive(200)
    calls = {"rerank": 1.0, "sort": 1.0}
    effects = assess(
        system, {"rerank": fixed(system.given[:, :1]), "sort": sort}, calls, ["rerank"], 0, Listing.BY_SCORE
    )
    measured = [measures(name, each, 1.0) for name, each in ((AS_IS, system), ("rerank", sort), ("sort", sort))]
    found = advise(measured, effects, 200, NONE_FAILED)
    assert found.choice == "leave it"
    assert found.headline.endswith("Keep that order: rerank makes sure of it, in whatever order documents come in.")


def test_steadier_answers_are_recommended_where_the_order_is_known_to_be_no_ranking() -> None:
    system, sort = sensitive(200)
    assert advice(system, {"sort": (1.0, sort)}, Listing.NOT_BY_SCORE).choice == "sort"
    # Listed by something better than the known scores: today's order is the best, and a remedy is only steadier.
    best, steadier = sensitive(200, today=1.0)
    assert advice(best, {"vote": (5.0, steadier)}, Listing.NOT_BY_SCORE).choice == "leave it"


def listing(*scores: list[float | None]) -> Listing:
    asked = [
        Question("q", tuple(Segment(str(place), score=score) for place, score in enumerate(each))) for each in scores
    ]
    return prepare(first, asked, remedies=["sort"]).listing


def test_how_a_retriever_lists_is_told_from_scores_that_differ_whatever_is_tried() -> None:
    assert listing([3.0, 2.0, 1.0], [0.9, 0.5, 0.5]) is Listing.BY_SCORE
    assert listing([2.0, 4.0, 3.0, 1.0][::-1], [1.0, 3.0, 4.0, 2.0][::-1]) is Listing.NOT_BY_SCORE
    assert listing([3.0, 1.0, 0.0, 2.0], [4.0, 2.0, 0.0, 1.0, 3.0]) is Listing.NOT_BY_SCORE
    assert listing([2.0, 0.0, 1.0, 3.0], [4.0, 2.0, 0.0, 1.0, 3.0]) is Listing.BY_SCORE  # best at both ends
    assert listing([None, None], [None, None, None]) is Listing.UNKNOWN
    assert listing([1.0, 1.0, 1.0]) is Listing.UNKNOWN


def one_slot(best: int, questions: int = 40) -> Floats:
    scores = np.zeros((questions, 3))
    scores[:, best] = 1.0
    return scores


@pytest.mark.parametrize(("best", "named"), [(0, "the first slot"), (1, "slot 2 of 3"), (2, "the last slot")])
@pytest.mark.parametrize("listed", Listing)
def test_a_system_that_reads_one_slot_is_said_to_ride_on_the_order_of_its_retriever(
    best: int, named: str, listed: Listing
) -> None:
    right = np.ones((40, 3))
    right[:2] = 0.0
    system = outcomes(right, np.random.default_rng(0).integers(0, 2, (40, 9)) * 1.0, one_slot(best))
    worse = {"sort": (1.0, fixed(np.arange(40)[:, None] % 3 * 0.5))}
    said = advice(system, worse, listed)
    assert said.choice == "leave it"
    assert f"with the right document in {named}, 100.0% of the answers are right, in any other none." in (said.headline)
    assert "everything rides on the order in which your retriever lists" in said.headline
    assert "Rerank so that" not in said.headline
    missed = outcomes(right * 0.0, system.orders, one_slot(best))
    where = ("comes first", "comes into slot 2 of 3", "comes last")[best]
    what_to_do = f"Rerank so that the best document {where}: the system answers from {named} alone. "
    assert advice(missed, {}, listed).headline.startswith(what_to_do)
    better = {"rerank": (1.0, fixed(np.ones((40, 1)))), "vote": (5.0, fixed(np.ones((40, 1))))}
    assert advice(missed, {"rerank": better["rerank"]}, listed).headline.startswith(
        f"{what_to_do}List the documents by"
    )
    assert advice(missed, {"vote": better["vote"]}, listed).headline.endswith(what_to_do.strip())
    two = one_slot(best) + one_slot((best + 1) % 3)
    other = advice(outcomes(system.given, system.orders, two), worse, listed)
    assert "one slot" not in " ".join(other.reasons)


def test_no_more_questions_are_asked_for_where_a_remedy_was_right_less_often() -> None:
    system, _ = sensitive(48)
    right = system.given[:, :1].copy()
    right[np.flatnonzero(right)[:4]] = 0.0
    less_often = advice(system, {"sort": (1.0, fixed(right))}, Listing.UNKNOWN).headline
    assert less_often == (
        "Leave it: sort stops flips, but was right less often here (81.2% against 89.6%); 48 questions cannot tell "
        "whether by chance."
    )
    as_often = advice(system, {"sort": (1.0, fixed(np.roll(system.given[:, :1], 4)))}, Listing.UNKNOWN).headline
    assert as_often.endswith("48 questions cannot rule out that it loses more than 5 points; about 280 would do.")


@pytest.mark.parametrize("gold", [True, False])
def test_what_voting_gives_a_noisy_system_is_said(gold: bool) -> None:
    source = np.random.default_rng(0)
    calls = source.random((200, 12)) < 0.9
    votes = outcomes((source.random((200, 3)) < 0.99) * 1.0, (source.random((200, 9)) < 0.99) * 1.0)
    system = outcomes(calls[:, :3] * 1.0, calls[:, 3:] * 1.0)
    found = advice(system, {"vote": (5.0, votes if gold else system)}, Listing.UNKNOWN)
    assert found.choice == "leave it"
    assert "remove the randomness" in found.headline
    assert ("What gives more right answers than today is vote: +" in found.headline) is gold
    assert ("5.0 calls per answer" in found.headline) is gold


def test_failed_tries_are_said_and_failed_calls_are_to_be_fixed_first() -> None:
    system, sort = sensitive(40)
    cured = advice(system, {"sort": (1.0, sort)}, Listing.UNKNOWN, Failures(100, 0, 0, 150, 50, (("E: x", 50),)))
    assert cured.choice == "leave it"
    assert any(each.startswith("33.3% of the tries failed") for each in cured.sections[0][1])
    lost = Failures(100, 30, 7, 220, 150, (("E: x", 150),))
    broken = advice(system, {"sort": (1.0, sort)}, Listing.UNKNOWN, lost)
    assert broken.choice == "fix the errors"
    assert broken.verdict.startswith("30% of the calls failed; whether the order makes them fail was not tested. ")
    assert lost.describe(10).startswith("30 calls failed (30.0%), about 7 of 10 questions (70.0%); of the tries")
    assert "150 of 220 tries failed (68.2%): 150 x E: x" in lost.describe(10)


def test_a_gain_whose_interval_excludes_zero_and_that_is_not_sure_says_why() -> None:
    right = np.arange(60) % 2 == 0
    better = right | (np.arange(60) < 10)
    system, sort = (fixed(each[:, None].astype(float)) for each in (right, better))
    said = advice(system, {"sort": (1.0, sort), "vote": (4.0, sort)}, Listing.UNKNOWN).sections[3][1]
    assert "not surely a gain (p = 0.06" in said[0]
    assert "corrected for 2 remedies; below 0.02 would count)" in said[0]


def finding(p: float, questions: int, flip_rate: float = 0.1, noise: float = 0.0, needed: int = 100) -> Finding:
    """The finding of an audit with these numbers."""
    around = {"flip_rate": flip_rate, "noise": noise}
    found = {name: Estimate(value, max(0.0, value - 0.01), value + 0.01) for name, value in around.items()}
    system = RemedyMeasures(AS_IS, found, {}, (), (), None, None, ())
    return Finding.of(system, Effects(OrderEffect({"difference": p}, None, needed), (), frozenset()), questions)


@pytest.mark.parametrize(
    ("found", "kind", "said"),
    [
        (
            finding(0.02, 200),
            Kind.MATTERS,
            "Yes. The order of the documents matters: it changes answers more than chance explains",
        ),
        (finding(0.02, 200), Kind.MATTERS, "(p = 0.020)"),
        (finding(0.0001, 200), Kind.MATTERS, "(p < 0.001)"),
        (finding(0.03, 200), Kind.NOTHING, "makes no difference that counts (p = 0.030; below 0.02 would count)"),
        (finding(0.03, 99), Kind.UNKNOWN, "99 questions are too few to tell: use about 100."),
        (finding(1.0, 20, 0.0, needed=10), Kind.UNKNOWN, "20 questions are too few to tell: use about 59."),
        (finding(1.0, 20, 0.1, needed=10), Kind.NOTHING, "20 questions are enough"),
        (finding(1.0, 59, 0.0, needed=10), Kind.NOTHING, "59 questions are enough"),
        (finding(1.0, 200, noise=0.1), Kind.NOISE, "No. Answers change even when the same order is asked twice"),
        (
            finding(0.731, 12, noise=0.1, needed=197),
            Kind.UNKNOWN,
            (
                "Answers change even when the same order is asked twice. Whether the order adds to that cannot be told "
                "from 12 questions (p = 0.731; below 0.02 would count): use about 200."
            ),
        ),
        (finding(1.0, 1), Kind.UNKNOWN, "1 question is too few to tell"),
    ],
)
def test_one_finding_of_the_order_is_worded_by_the_level_that_counts(found: Finding, kind: Kind, said: str) -> None:
    assert found.kind is kind
    assert said in found.answer


@pytest.mark.parametrize("with_gold", [0, 20])
def test_noise_without_gold_answers_is_not_called_order(with_gold: int) -> None:
    """Answers are numbered as they come, so those of the given order, which comes first, have lower numbers."""
    questions = [
        Question(f"Which of {number}?", tuple(map(Segment, "abcd")), answers=("0",) if number < with_gold else ())
        for number in range(60)
    ]
    for seed in range(3):
        source = random.Random(seed)
        found = audit(lambda *_, source=source: str(source.randrange(3)), questions, remedies=[])
        assert not found.effects.order.is_real, seed


@pytest.mark.parametrize("count", [1, 12, 62])
def test_headline_and_sections_agree_in_whether_the_questions_are_too_few(count: int) -> None:
    for system in (first, symmetric, noisy(symmetric, 0.2, 1)):
        found = audit(system, records(count, 3), remedies=[], slots=2).advice
        noise = found.sections[2][1][-1]
        assert noise.endswith(found.verdict)
        assert (": use about " in noise) == ("too few to tell" in found.headline)
        assert "1 questions" not in " ".join(found.reasons)


def test_a_few_questions_that_flip_are_not_called_a_rule_of_the_systems_own() -> None:
    found = audit(by_hash_of_order(0.05), records(200, 3), remedies=[], slots=2)
    assert found.effects.order.is_real
    assert not found.effects.order.has_own_rule
    assert "rule of its own" not in " ".join(found.advice.reasons)


def test_the_report_says_in_words_which_answers_are_right_and_that_wording_is_another_thing() -> None:
    def graded(answer: str, gold: Sequence[str]) -> float:
        return float(answer in gold)

    pair = {"question": "Which?", "segments": ["a", "b"], "gold": [0], "pairwise": True}
    bare = {"question": "Who?", "segments": ["a", "b"]}
    for asked, metric, meaning in (
        (records(1, 2), "best_subspan_em", "; an answer is right if it contains a gold answer; seed 0."),
        (
            records(1, 2),
            "exact_match",
            "; an answer is right if it is a gold answer, case, punctuation and articles aside",
        ),
        (records(1, 2), graded, "; an answer is right if graded gives at least 0.5; seed 0."),
        ([pair], "best_subspan_em", "; a verdict is right if it names the better response; seed 0."),
        ([bare], "best_subspan_em", " different calls; seed 0."),
    ):
        found = audit(first, asked, metric=metric, remedies=[])
        assert meaning in summary(found)
        assert "best_subspan_em" not in summary(found)
        assert any(each.startswith("Wording, right or wrong aside, changes for") for each in found.advice.reasons) is (
            found.asked[0].question.has_gold
        )
