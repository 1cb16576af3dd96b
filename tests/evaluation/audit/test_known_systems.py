"""Claims about the numbers and the advice that systems of known behaviour get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256
from itertools import permutations

import pytest

import invariant_rag
from invariant_rag.errors import AuditFailed, InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.evaluation.audit import Audit, Question, Reply, audit
from invariant_rag.evaluation.audit.report import table
from invariant_rag.segments import Segment
from tests.evaluation.audit.known import at_random, first, records, sorting, symmetric

AS_IS = "as it is"


def value(result: Audit, name: str, of: str = AS_IS) -> float:
    return result[of].measures[name].value


@pytest.fixture(scope="module")
def of_first() -> Audit:
    return audit(first, records())


def test_the_first_segment_as_answer_flips_everywhere_and_has_the_largest_slot_spread(of_first: Audit) -> None:
    assert value(of_first, "flip_rate") == 1.0
    # Of 24 orders 6 begin with the right segment: two different orders differ in one of 23 * 12 pairs.
    assert value(of_first, "sensitivity") == pytest.approx(6 * 18 / (23 * 12))
    assert [value(of_first, name) for name in ("today", "worst", "accuracy", "best")] == [0.25, 0.0, 0.25, 1.0]
    assert value(of_first, "slot_spread") == value(of_first, "salted_spread") == 1.0
    assert [slot.value for slot in of_first[AS_IS].slots] == [1.0, 0.0, 0.0, 0.0]
    assert value(of_first, "slot_std") == pytest.approx((3 / 16) ** 0.5)


@pytest.mark.parametrize("size", [3, 5, 7])
def test_answers_in_all_orders_of_the_first_five_are_compared(size: int) -> None:
    asked: list[tuple[str, ...]] = []

    def second_kind(question: str, segments: Sequence[Segment]) -> str:
        """Answer even questions from any order, and odd ones otherwise if the very last of all orders is asked."""
        texts = tuple(segment.text for segment in segments)
        if question == "What is number 1?":
            asked.append(texts)
        number, listed = int(question.removesuffix("?").split()[-1]), min(size, 5)
        backwards = tuple(records(6, size)[number]["segments"][:listed][::-1])  # type: ignore[index]
        return "other" if number % 2 and texts == backwards else "same"

    found = audit(second_kind, records(6, size), remedies=["sort"], orders=2, slots=2, repeats=1, all_orders=True)
    top = tuple(records(6, size)[1]["segments"][: min(size, 5)])  # type: ignore[index]
    assert set(permutations(top)) <= set(asked)
    estimate = found[AS_IS].measures["psr"]
    assert estimate.value == pytest.approx(0.5)
    assert estimate.low < 0.5 < estimate.high
    assert value(found, "psr", "sort") == 1.0
    assert found["sort"].versus["psr"].value == pytest.approx(0.5)
    assert found.as_dict()["measured"][0]["measures"]["psr"]["value"] == pytest.approx(0.5)
    assert any(name == "psr" and cells[0].startswith("0.500 [") for name, *cells in table(found)[1])
    assert "psr" not in audit(second_kind, records(6, size), remedies=[], orders=2, slots=2)[AS_IS].measures


def test_sorting_stops_every_flip_and_keeps_the_slot_spread(of_first: Audit) -> None:
    assert value(of_first, "flip_rate", "sort") == 0.0
    assert value(of_first, "slot_spread", "sort") == 0.0
    assert value(of_first, "salted_spread", "sort") == 1.0
    # It would stop flips, but what 24 questions say of its accuracy is next to nothing.
    assert of_first.advice.choice == "leave it"
    assert of_first.advice.headline.startswith("Rerank so that the best document comes first: the system answers from")
    assert any("not fair" in reason for reason in of_first.advice.reasons)


@pytest.mark.parametrize("name", [AS_IS, "sort", "vote"])
def test_a_system_that_sorts_by_itself_never_flips_and_is_seen_to_favour_a_slot(name: str) -> None:
    result = audit(sorting, records(), remedies=["sort", "vote"])
    assert value(result, "flip_rate", name) == 0.0
    assert value(result, "salted_spread", name) == 1.0
    assert result.advice.choice == "leave it"
    assert "a rule of its own" in result.advice.headline


def test_a_symmetric_system_neither_flips_nor_favours_a_slot() -> None:
    result = audit(symmetric, records())
    assert value(result, "flip_rate") == value(result, "salted_spread") == value(result, "slot_spread") == 0.0
    assert value(result, "salted_sensitivity") == 0.0
    assert result.advice.choice == "leave it"
    assert "too few" in result.advice.headline
    assert "does not matter" in audit(symmetric, records(62), remedies=[]).advice.headline


def test_a_system_that_orders_by_a_rule_of_its_own_is_not_told_that_order_does_not_matter() -> None:
    def by_hash(question: str, segments: Sequence[Segment]) -> str:
        return min((segment.text for segment in segments), key=lambda text: sha256(text.encode()).digest())

    result = audit(by_hash, records(40), remedies=[])
    assert value(result, "flip_rate") == 0.0
    assert any("rule of its own" in reason for reason in result.advice.reasons)
    assert "does not matter" not in result.advice.headline


def test_a_system_that_parses_its_texts_is_audited_without_hashes() -> None:
    def parsing(question: str, segments: Sequence[Segment]) -> str:
        assert all(segment.text.startswith(("Number", "Nothing")) for segment in segments)
        return segments[0].text

    with pytest.raises(AuditFailed) as failed:
        audit(parsing, records(), retries=0)
    assert "tags=False" in failed.value.hint
    result = audit(parsing, records(), tags=False)
    assert value(result, "slot_spread") == value(result, "salted_spread") == 1.0


def test_verdicts_that_cannot_be_read_are_no_consistency() -> None:
    pairs = [
        {"question": f"q{number}", "segments": [f"one {number}", f"two {number}"], "gold": 0, "pairwise": True}
        for number in range(20)
    ]
    mumbling = audit(lambda question, segments: "Both have their merits.", pairs)
    assert value(mumbling, "unreadable") == 1.0
    assert "position_consistency" not in mumbling[AS_IS].measures
    assert mumbling.advice.choice == "make verdicts readable"
    tied = audit(lambda question, segments: "", pairs)
    assert (value(tied, "unreadable"), value(tied, "position_consistency")) == (0.0, 1.0)
    biased = audit(lambda question, segments: "Response A is better.", pairs)
    assert (value(biased, "position_consistency"), value(biased, "preference_fairness")) == (0.0, -1.0)


def test_chance_is_told_from_order() -> None:
    random.seed(5)
    result = audit(at_random, records(60), repeats=3)
    assert value(result, "noise") == pytest.approx(0.375, abs=0.12)
    net = result[AS_IS].measures["net_sensitivity"]
    assert net.low <= 0 <= net.high
    assert result[AS_IS].salt_chance is not None
    assert value(result, "salted_spread") < 2 * result[AS_IS].salt_chance
    assert value(result, "flip_rate", "sort") > 0.3  # sorting stops no dice
    assert value(result, "sensitivity", "sort") > 0.15
    assert result.advice.choice == "leave it"
    assert "remove the randomness" in result.advice.headline


def test_voting_helps_where_most_orders_are_right() -> None:
    def misled_by_the_last(question: str, segments: Sequence[Segment]) -> str:
        return "wrong" if "right" in segments[-1].text else symmetric(question, segments)

    result = audit(misled_by_the_last, records(60), remedies=["sort", "vote"])
    assert value(result, "accuracy", "vote") == 1.0
    assert value(result, "accuracy") == 0.75
    assert value(result, "calls", "vote") == 4.0
    assert result["vote"].versus["accuracy"].value == pytest.approx(0.25)
    assert result.advice.choice == "vote"


def test_reranking_brings_the_right_segment_first() -> None:
    scored = [
        Question(
            str(record["question"]),
            tuple(Segment(text, score=float("right" in text)) for text in record["segments"]),  # type: ignore[attr-defined]
            tuple(record["answers"]),  # type: ignore[arg-type]
        )
        for record in records()
    ]
    result = audit(first, scored)
    assert value(result, "accuracy", "rerank") == 1.0
    assert result.advice.choice == "rerank"


def test_a_system_that_reads_the_last_document_is_given_the_best_one_last() -> None:
    def last(question: str, segments: Sequence[Segment]) -> str:
        return segments[-1].text

    best_first = [
        {**each, "segments": sorted(each["segments"], key=lambda text: "right" not in text)}  # type: ignore[call-overload]
        for each in records()
    ]
    result = audit(last, best_first, remedies=["reverse"])
    assert (value(result, "today"), value(result, "today", "reverse")) == (0.0, 1.0)
    assert value(result, "flip_rate", "reverse") == 1.0  # still, it depends on the order
    assert result.advice.choice == "reverse"
    assert "the best last" in result.advice.headline
    assert "reverse" not in {each.name for each in audit(last, best_first[:2]).measured}


def test_the_best_are_kept_or_listed_at_both_ends() -> None:
    def listing(question: str, segments: Sequence[Segment]) -> str:
        return " ".join(segment.text for segment in segments)

    for count, ends in ((5, "0 2 4 3 1"), (4, "1 3 2 0")):
        scored = Question("q", tuple(Segment(str(rank), score=-rank) for rank in range(count)))
        asked = {"rerank": " ".join(map(str, range(count))), "top-3": "0 1 2", "long-context-reorder": ends}
        for name, listed in asked.items():
            answered: list[str] = []

            def noting(question: str, segments: Sequence[Segment], answered: list[str] = answered) -> str:
                answered.append(listing(question, segments))
                return answered[-1]

            result = audit(noting, [scored], remedies=[name])
            assert value(result, "flip_rate", name) == 0.0
            assert listed in answered


def test_a_single_segment_has_no_order_to_audit() -> None:
    with pytest.raises(AuditFailed, match="two segments"):
        audit(first, [{"question": "q", "segments": ["alone"]}])


def test_without_gold_answers_stability_is_still_measured() -> None:
    bare = [{"question": each["question"], "segments": each["segments"]} for each in records(8)]
    result = audit(first, bare)
    assert value(result, "flip_rate") == 1.0
    assert "accuracy" not in result[AS_IS].measures
    assert result[AS_IS].slots == ()
    assert any("nothing is known about accuracy" in reason for reason in result.advice.reasons)
    assert "until you know the right answers" in audit(first, bare * 4).advice.headline


def test_more_than_four_segments_are_listed_in_a_sample_that_the_seed_decides() -> None:
    asked: list[str] = []

    def listening(question: str, segments: Sequence[Segment]) -> str:
        asked.append(" ".join(segment.text for segment in segments))
        return ""

    def run(seed: int) -> list[str]:
        asked.clear()
        audit(listening, records(1, size=6), orders=7, remedies=[], seed=seed)
        return list(asked)

    first_run = run(1)
    assert first_run == run(1) != run(2)
    # 7 orders, 5 slots of which the given one is among the orders, 5 salted orders, 2 repeats.
    assert len(first_run) == 7 + 4 + 5 + 2


def test_a_judge_that_prefers_whatever_comes_first_is_inconsistent_and_unfair() -> None:
    pairs = [
        {"question": f"q{n}", "segments": [f"good {n}", f"bad {n}"], "gold": 0, "pairwise": True} for n in range(10)
    ]
    result = audit(lambda question, segments: "[[A]]", pairs, remedies=["sort"])
    assert value(result, "position_consistency") == 0.0
    assert value(result, "preference_fairness") == -1.0
    assert value(result, "accuracy") == 0.5
    assert value(result, "position_consistency", "sort") == 1.0
    fair = audit(lambda question, segments: "AB"["good" in segments[1].text], pairs, remedies=[])
    assert value(fair, "position_consistency") == value(fair, "accuracy") == 1.0
    assert value(fair, "preference_fairness") == 0.0
    last = audit(lambda question, segments: "The second response", pairs, remedies=[])
    assert value(last, "preference_fairness") == 1.0


def test_tokens_are_counted_where_they_are_told() -> None:
    result = audit(lambda question, segments: Reply("x", tokens=7), records(3))
    assert value(result, "tokens") == 7.0
    assert value(result, "tokens", "vote") == 28.0


def test_the_lazy_name_can_be_called_whether_or_not_the_package_was_imported() -> None:
    # By now `invariant_rag.evaluation.audit` is the package itself.
    assert value(invariant_rag.audit(symmetric, records(2)), "accuracy") == 1.0


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(UnsupportedCombination, match="got object"):
        audit(object(), records(1))
    with pytest.raises(UnsupportedCombination, match="inside of a model"):
        audit(first, records(1), remedies=["rotor"])
    with pytest.raises(UnsupportedCombination, match="needs a score"):
        audit(first, records(1), remedies=["rerank"])
    with pytest.raises(UnsupportedCombination, match="generation"):
        audit(first, records(1), max_new_tokens=5)
    with pytest.raises(UnknownName, match=r"choose from.*'sort'"):
        audit(first, records(1), remedies=["sorting"])
    with pytest.raises(UnknownName, match="best_subspan_em"):
        audit(first, records(1), metric="bleu")
    with pytest.raises(InvalidChoice, match="orders"):
        audit(first, records(1), orders=1)
    with pytest.raises(AuditFailed, match="got int"):
        audit(lambda question, segments: 3, records(1))
