"""Claims about advice: it starts from what users get today, and never sells noise as order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import pytest

from invariant_rag.evaluation.audit import Audit, Question, audit
from invariant_rag.segments import Segment
from tests.evaluation.audit.known import first, records, symmetric

AS_IS = "as it is"
System = Callable[[str, Sequence[Segment]], str]


def scored(count: int, gold_first: float, size: int = 6, *, by_score: bool = True) -> list[Question]:
    """Questions of which a share has the right segment first by score; else it is anywhere after it."""
    source, questions = random.Random(1), []
    for number in range(count):
        rank = 0 if number < gold_first * count else source.randint(1, size - 1)
        segments = [
            Segment(
                f"Number {number} is right{number}." if place == rank else f"Nothing {number} {place}.", score=-place
            )
            for place in range(size)
        ]
        if not by_score:
            source.shuffle(segments)
        questions.append(Question(f"What is number {number}?", tuple(segments), (f"right{number}",)))
    return questions


def noisy(system: System, share: float, seed: int) -> System:
    """Let a system say something wrong in a share of the calls, whatever the order."""
    source = random.Random(seed)
    return lambda question, segments: "wrong" if source.random() < share else system(question, segments)


def lost_in_the_middle(question: str, segments: Sequence[Segment]) -> str:
    """Read the first and the last third only."""
    third = max(1, len(segments) // 3)
    seen = [*segments[:third], *segments[-third:]]
    return next((each.text for each in seen if "right" in each.text), "unknown")


def test_what_users_get_today_is_said_first_and_no_remedy_worse_than_that_is_recommended() -> None:
    result = audit(first, scored(100, 0.95))
    today = result[AS_IS].measures["today"]
    assert today.value == 0.95
    assert 0.88 < today.low < 0.95 < today.high < 0.98
    assert "95.0%" in result.advice.sections[0][1][0]
    assert result[AS_IS].measures["accuracy"].value < 0.35
    assert result["sort"].versus["today"].value < -0.6
    assert result["rerank"].versus["today"].value == 0.0
    assert result.advice.choice == "leave it"
    assert "Keep that order" in result.advice.headline
    reasons = {each.partition(":")[0]: each for each in result.advice.reasons}
    assert "what you do today" in next(each for each in result.advice.reasons if each.startswith("rerank"))
    assert "a loss" in reasons["sort"]
    assert "a loss" in reasons["vote"]


def test_a_remedy_that_gives_more_than_today_is_recommended_with_what_it_gives() -> None:
    result = audit(first, scored(60, 0.95, by_score=False), remedies=["sort", "rerank", "vote"])
    assert result.advice.choice == "rerank"
    gain = result["rerank"].versus["today"]
    assert gain.low > 0.5
    assert f"{100 * gain.value:+.1f}" in result.advice.headline


def test_remedies_whose_fairness_was_not_measured_are_not_called_fair() -> None:
    result = audit(symmetric, scored(20, 0.5), remedies=["rerank", "top-3", "sort"], retries=0)
    of = {each.name: each.unfair for each in result.effects.remedies}
    assert of == {"rerank": None, "top-3": None, "sort": False}
    said = next(each for each in result.advice.reasons if each.startswith("top-3"))
    assert "fairness unknown" in said


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
def test_errors_that_no_order_makes_are_never_sold_as_order(share: float) -> None:
    choices = [audit(noisy(symmetric, share, seed), records(40, 5), orders=6).advice.choice for seed in range(3)]
    assert choices == ["leave it"] * 3


def test_an_order_effect_is_seen_through_noise() -> None:
    found = audit(noisy(lost_in_the_middle, 0.05, 0), scored(80, 0.1), remedies=["sort"])
    assert found.effects.order.is_real
    assert any(reason.startswith("Yes") for reason in found.advice.reasons)


def test_other_words_are_no_flip_where_the_answer_is_right_in_every_order() -> None:
    def rephrasing(question: str, segments: Sequence[Segment]) -> str:
        return f"{segments[0].text[:7]}, so {symmetric(question, segments)}"

    result = audit(rephrasing, records(62), remedies=["sort"])
    assert result[AS_IS].measures["flip_rate"].value == 0.0
    assert result[AS_IS].measures["wording_rate"].value == 1.0
    assert result.advice.choice == "leave it"
    assert "does not matter" in result.advice.headline


@pytest.mark.parametrize("share", [0.05, 0.25])
def test_sorting_that_stops_flips_is_not_called_no_help(share: float) -> None:
    result = audit(by_hash_of_order(share), records(200, 5), remedies=["sort"])
    assert 0.8 * share < result[AS_IS].measures["flip_rate"].value <= share
    assert result["sort"].measures["flip_rate"].value == 0.0
    assert "always lists the same documents alike" in result.advice.headline
    assert "can change from one time to the next: sort the documents by a hash" in result.advice.headline
    assert "0.0% of the questions flip instead of" in result.advice.headline


def test_hash_tags_reorder_no_system_that_reads_all_documents_alike() -> None:
    def joined(question: str, segments: Sequence[Segment]) -> str:
        return " ".join(sorted(segment.text for segment in segments))

    result = audit(joined, records(62), remedies=["sort"])
    assert not result.effects.order.has_own_rule
    assert "does not matter" in result.advice.headline


@pytest.mark.parametrize("name", ["today", "accuracy", "worst", "flip_rate", "noise"])
def test_no_share_has_an_interval_without_width(name: str) -> None:
    estimate = audit(symmetric, records(10), remedies=[])[AS_IS].measures[name]
    assert estimate.high - estimate.low > 0.1


def test_answers_are_kept_with_their_orders_scores_and_the_fields_of_their_questions() -> None:
    questions: list[Any] = [{**each, "article": f"page {n}"} for n, each in enumerate(records(3))]
    result: Audit = audit(first, questions, remedies=["sort"], slots=3)
    asked = result.asked[1]
    assert asked.question.extra == {"article": "page 1"}
    kinds = [each.kind for each in asked.answers if each.remedy == AS_IS]
    assert kinds == ["given"] * 3 + ["order"] * 23 + ["slot 1", "slot 2", "slot 3"]
    for each in asked.answers[3:26]:
        assert each.text == asked.question.segments[each.order[0]].text
        assert each.score == float("right" in each.text)
    assert sum(each.remedy == "sort" for each in asked.answers) == 3
    plain = result.as_dict()["asked"][1]
    assert plain["extra"] == {"article": "page 1"}
    assert len(plain["asked"]) == len(asked.answers)


def by_hash_of_order(share: float) -> System:
    """Answer a share of the questions from some orders and not from others, whatever the slot."""

    def sensitive(question: str, segments: Sequence[Segment]) -> str:
        number = int(question.removesuffix("?").split()[-1])
        key = sha256("".join(each.text.split("] ")[-1] for each in segments).encode()).digest()[0]
        return "unknown" if number % 100 < 100 * share and key % 4 == 0 else symmetric(question, segments)

    return sensitive
