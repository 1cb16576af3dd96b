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
It has 112 rooms. | 12
Built in 2012. | 12
$12.50 | 12
It took 12 hours. | 12 days
Founded 1912-1913 | 1914
The answer is 30. | 13
around 1,200 | 12
In December 1972. | December 14, 1972
14 November 1972 | December 14, 1972
December 14, 1973 | December 14, 1972
2021-03-04 | March 5, 2021
illegally obtained | legal
The USS Enterprise | US
Please let us know. | US
USB | US
I am unsure. | no
I have no idea. | no
There is no information about that. | no
Nothing in the context says so. | no
I'd rather not say. | no
Sorry, I can't help with that. | no
No information is given. | no
No one knows. | no
Not sure. | yes
That is incorrect. | yes
He never did. | yes
It isn't the case. | yes
It is neither Paris nor London. | Paris
Not Paris but London. | Paris
It was not built by Ann. | Ann
It is anything but safe. | safe
Ann did not build it. | Ann
I do not know whether it was Ann. | Ann
No documents mention Ann. | Ann
It could be Paris, but I can't confirm. | Paris
5 kg | 5 g
5 km | 5 m
10 miles | 10 km
20 \xb0C | 20 \xb0F
$5 | \u20ac5
5 million | 5 billion
-3 degrees | 3 degrees
three hundred | three
1.5 | 15
0.5 | 5
1/2 | 2
Thirteen | 3
fourteen | four
forty-two | forty
Annabel | Anna
Newcastle | Castle
Georgetown | George
nonfiction | fiction
dissatisfied | satisfied
inexpensive | expensive
Yes and no. | yes
Not yet known. | no
Paris was never the capital. | Paris
Ann and not Bo | Bo
Ask it. | IT
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
The 5th of May, 2020 | 2020-05-05
The answer is (c). | C
Ann, who did not like it | Ann
0.75 | 3/4
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
14 Dec 1972 | December 14, 1972
Dec 14th, 1972 | 1972-12-14
1972/12/14 | December 14, 1972
12/14/1972 | December 14, 1972
14.12.1972 | December 14, 1972
Thursday, December 14, 1972 | December 14, 1972
It was on the 14th of December in 1972. | December 14, 1972
three | 3
Three people | 3
3.0 | 3
about 3 | three
one hundred and one | 101
1.2 million | 1,200,000
1,200,000 | 1.2 million
1 200 000 | 1200000
1.2M | 1.2 million
$1.2bn | 1.2 billion dollars
2k | 2000
twenty two | 22
half | 1/2
0.5 | 1/2
\xbd | 1/2
50 per cent | 50 percent
Yes. | yes
Yes, it is. | yes
Correct. | yes
No. | no
No, they did not. | no
False | no
It was not. | no
They did not. | no
They don't. | no
It does not mention it. | unknown
I don't know. | I do not know
Not enough information. | unanswerable
The documents don't say. | unanswerable
Unclear from the context. | unanswerable
U.S.A. | USA
the USA | USA
United States (US) | US
Z\xfcrich | Zurich
na\xefve | naive
\u201cHamlet\u201d | Hamlet
Hamlet\u2019s author | Hamlet
Rock \u2019n\u2019 Roll | Rock 'n' Roll
A Tale of Two Cities | Tale of Two Cities
the Beatles | The Beatles
Beatles, The | The Beatles
Marie Curie | Curie, Marie
Einstein, Albert | Albert Einstein
It's 5km away. | 5 km
5 kilometres | 5km
100 metres | 100 m
5 kg | 5 kilograms
10 mph | 10 miles per hour
20\xb0C | 20 \xb0C
20 degrees Celsius | 20 \xb0C
5 ft | 5 feet
5 PM | 17:00
5:00 p.m. | 5 pm
17h00 | 17:00
noon | 12:00 pm
Either Ann or Bo. | Ann
Ann and Bo. | Ann and Bo
Ann & Bo | Ann and Bo
Bo and Ann | Ann and Bo
St. Louis | Saint Louis
Dr. Watson | Doctor Watson
e-mail | email
color | colour
organisation | organization
1980s | the 1980s
19th century | nineteenth century
the 2nd | second
Chapter IV | Chapter 4
Louis XIV | Louis 14
It is not only Paris. | Paris
Paris, not London. | Paris
Not London but Paris. | Paris
It isn't London, it's Paris. | Paris
I'm not certain, but Paris. | Paris
There's no doubt: Paris. | Paris
Without a doubt, Paris. | Paris
\u4eac\u90fd\u5e02 | \u4eac\u90fd
\u0395\u03bb\u03bb\u03ac\u03b4\u03b1 | \u03b5\u03bb\u03bb\u03b1\u03b4\u03b1
Stra\xdfe | strasse
\uff21\uff22\uff23 | ABC
B) Paris | B
(b) | B
**Paris** | Paris
Answer: Paris | Paris
"""


def pairs(table: str) -> list[tuple[str, str]]:
    found = [tuple(part.strip() for part in line.split(" | ")) for line in table.strip().splitlines()]
    assert len(found) >= 40
    return found  # type: ignore[return-value]


def test_what_only_looks_right_is_wrong() -> None:
    assert [pair for pair in pairs(WRONG) if is_right(pair[0], pair[1:])] == []


def test_what_is_right_is_right_however_it_is_written() -> None:
    assert [pair for pair in pairs(RIGHT) if not is_right(pair[0], pair[1:])] == []
    assert all(is_right(answer, ["something else entirely", gold]) for answer, gold in pairs(RIGHT))


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
