"""Claims about right answers: whole tokens, by value, and what only looks right is wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from invariant_rag.audit.matching import contains_gold, is_refusal, is_right, normal_tokens

ROWS = [line.split("\t") for line in (Path(__file__).parent / "scores.tsv").read_text("utf-8").splitlines()[1:]]
"""Verdict, gold answer and answer: numbers, dates, units, yes and no, refusals, denials, spellings."""


def test_what_only_looks_right_is_wrong_and_what_is_right_is_right_however_it_is_written() -> None:
    assert min(Counter(verdict for verdict, _, _ in ROWS).values()) > 100
    found = [[("wrong", "right")[is_right(answer, [gold])], gold, answer] for _, gold, answer in ROWS]
    assert [row for row, other in zip(found, ROWS, strict=True) if row != other] == []
    assert all(
        is_right(answer, ["something else entirely", gold]) for verdict, gold, answer in ROWS if verdict == "right"
    )


@pytest.mark.parametrize("gold", ["no", "yes", "No.", "TRUE"])
def test_who_never_knows_is_never_right(gold: str) -> None:
    assert not is_right("I do not know.", [gold])


def test_gold_documents_are_found_by_whole_tokens_and_never_by_yes_or_no() -> None:
    assert contains_gold("It was built in the year 12.", ["12"])
    assert not contains_gold("It was built in 1912.", ["12"])
    assert not contains_gold("There is no bridge here.", ["no"])


def test_a_short_answer_of_no_is_no_refusal() -> None:
    assert not is_refusal("No.")
    assert not is_refusal("He was unable to walk.")
    assert is_refusal("There is not enough information in the documents.")


def test_texts_that_say_the_same_have_the_same_tokens() -> None:
    assert normal_tokens("On May 3rd, 1999 U.S. forces") == normal_tokens("on 3 may 1999 us forces")
