"""Claims about right answers: whole tokens, by value, and what only looks right is wrong."""

from collections import Counter
from pathlib import Path

from invariant_rag.audit.matching import contains_gold, is_refusal, is_right, normal_tokens

ROWS = [line.split("\t") for line in (Path(__file__).parent / "scores.tsv").read_text("utf-8").splitlines()[1:]]
"""Verdict, gold answer and answer: numbers, dates, units, yes and no, refusals, denials, spellings."""


def test_what_only_looks_right_is_wrong_and_what_is_right_is_right_however_it_is_written():
    assert min(Counter(verdict for verdict, _, _ in ROWS).values()) > 100
    assert [row for row in ROWS if is_right(row[2], [row[1]]) is not (row[0] == "right")] == []
    right = [(gold, answer) for verdict, gold, answer in ROWS if verdict == "right"]
    assert all(is_right(answer, ["something else entirely", gold]) for gold, answer in right)
    assert not any(is_right("I do not know.", [gold]) for gold in ("no", "yes", "No.", "TRUE"))


def test_gold_documents_are_found_by_whole_tokens_and_never_by_yes_or_no():
    assert contains_gold("It was built in the year 12.", ["12"])
    assert not contains_gold("It was built in 1912.", ["12"])
    assert not contains_gold("There is no bridge here.", ["no"])
    said = ("No.", "He was unable to walk.", "There is not enough information in the documents.")
    assert [is_refusal(each) for each in said] == [False, False, True]


def test_numbers_of_any_length_and_in_any_row_are_tokens():
    assert normal_tokens("On May 3rd, 1999 U.S. forces") == normal_tokens("on 3 may 1999 us forces")
    assert normal_tokens("one, two; three") == ("1", "2", "3")
    assert normal_tokens("9" * 5000) == (f"n{'9' * 5000}",)  # of more digits than Python turns into a number
    assert is_right("9" * 5000, ["9" * 5000])
