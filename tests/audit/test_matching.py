"""Claims about right answers: whole tokens, by value, and what only looks right is wrong."""

from __future__ import annotations

import pytest

from invariant_rag.audit.matching import contains_gold, is_refusal, is_right, normal_tokens

WRONG = """
It opened in 1912. | 12
It is illegal. | legal
Because they asked. | US
They told us so. | US
I do not know. | no
I don't know. | no
I cannot determine the answer. | no
The documents do not mention it. | no
Not known | no
Unknown. | no
N/A | no
Yes, no doubt about it. | no
Knowing this, yes. | no
Both yes and no. | no
No. | yes
It is not Paris. | Paris
It wasn't Paris. | Paris
Parish | Paris
unhappy | happy
It is uncertain. | certain
manslaughter | laughter
Northern | north
He was Anna's friend | Ann
The total is 120. | 12
12,000 | 12
12.5 km | 12
-5 | 5
3.14159 | 3.14
five hundred | 5
12345678901234567891 | 12345678901234567890
thirty | 3
seventy | seven
twenty-one | twenty
$50 million | $50
The 1990s | 1990
7:30 am | 7:30 pm
December 15, 1972 | December 14, 1972
1972 | December 14, 1972
A dog barked. | A
The answer is B | A
C | C++
Paris is not the capital. | Paris
All except Paris | Paris
It is not true. | yes
The answer is not yes. | yes
Johnson | John
5 miles | 5 km
a new bridge | news
"""
RIGHT = """
December 14, 1972 | 1972-12-14
It happened on 14 December 1972. | December 14, 1972
14/12/1972 | December 14, 1972
14th of December, 1972 | 14 December 1972
Dec. 14, 1972 | 14 December 1972
December 14, 1972 | 1972
December 14, 1972 | December 1972
July 4 | 4 July
Three. | 3
3 | three
There are twenty-one. | 21
two hundred and five | 205
two million three hundred thousand | 2,300,000
1.5 million | 1500000
1,500 people | 1500
nineteen ninety | 1990
minus five | -5
It is 12345678901234567890. | 12345678901234567890
12.0 | 12
the third | 3rd
50 percent | 50%
$5 million | 5 million dollars
5 kilometers | 5 km
7:30 PM | 19:30
World War II | World War 2
No, it is not. | no
Nope | no
The answer is no. | no
It is not legal. | no
No - it was abolished. | no
It is true. | yes
Yes, it was legal. | legal
The US did. | US
the U.S. | US
us | US
S\u00e3o Paulo | Sao Paulo
well-known | well known
O'Brien | O\u2019Brien
Curie, Marie | Marie Curie
The Beatles | Beatles
I am not sure, but it is Paris. | Paris
I don't know. | unanswerable
The context does not mention it. | I don't know
The answer is (B). | B
A | A
* | *
C++ | C++
on the fourth of July 1776 | July 4, 1776
in July of 1776 | July 1776
a dozen eggs | 12
25 per cent | 25%
JRR Tolkien | J. R. R. Tolkien
two cats | cat
churches | church
6 feet | 6 ft
Mount Everest | Mt. Everest
Paris is not only old. | Paris
It cannot be said. | unanswerable
\u6771\u4eac\u3067\u3059 | \u6771\u4eac
"""


def pairs(table: str) -> list[tuple[str, str]]:
    found = [tuple(part.strip() for part in line.split(" | ")) for line in table.strip().splitlines()]
    assert len(found) >= 40
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("answer", "gold"), pairs(WRONG))
def test_what_only_looks_right_is_wrong(answer: str, gold: str) -> None:
    assert not is_right(answer, [gold])


@pytest.mark.parametrize(("answer", "gold"), pairs(RIGHT))
def test_what_is_right_is_right_however_it_is_written(answer: str, gold: str) -> None:
    assert is_right(answer, [gold])
    assert is_right(answer, ["something else entirely", gold])


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
