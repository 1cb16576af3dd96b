"""Text between the segments of a set: what stays in its place, what goes with a segment, what is not understood."""

from __future__ import annotations

from itertools import permutations

import pytest

from invariant_rag import Segment
from invariant_rag.prompts.decorations import slots_of
from invariant_rag.segments import Field, Slot

A = Segment("alpha", title="Ferries", metadata={"source": "f.txt", "page": 3})
B = Segment("beta", title="Mills", metadata={"source": "m.txt", "page": 7})
C = Segment("gamma", title="Salt", metadata={"source": "s.txt", "page": 5})


def split(text: str, listed: list[Segment]) -> list[str]:
    """The texts around segments in a prompt."""
    texts = []
    for each in listed:
        before, _, text = text.partition(each.text)
        texts.append(before)
    return [*texts, text]


def slots(text: str, *listed: Segment) -> tuple[tuple[str, str], list[Slot]] | None:
    return slots_of(split(text, list(listed)), listed)


def test_running_numbers_stay_and_metadata_goes_with_the_segment() -> None:
    understood = slots("Read:\n[1] Ferries (f.txt): alpha\n[2] Mills (m.txt): beta\nWhy?", A, B)
    assert understood is not None
    around, (first, second) = understood
    assert around == ("Read:\n", "\nWhy?")
    assert first == Slot(("[1] ", Field("title"), " (", Field("source"), "): "), ("\n",), "1")
    assert second == Slot(("[2] ", Field("title"), " (", Field("source"), "): "), (), "2")
    assert first.render(B) + second.render(A) == "[1] Mills (m.txt): beta\n[2] Ferries (f.txt): alpha"


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("label", ["Source {n}:", "[{n}]"])
@pytest.mark.parametrize("pages", [(1, 2, 3), (3, 1, 12), (7, 2, 1), (2, 3, 4)])
def test_a_page_that_equals_the_running_number_beside_it_is_the_page(
    pages: tuple[int, ...], label: str, order: tuple[int, ...]
) -> None:
    texts = ("alpha", "beta", "gamma")
    listed = [Segment(texts[index], metadata={"page_label": str(pages[index])}) for index in order]
    shown = [
        f"page_label: {each.metadata['page_label']}\n{label.format(n=n)} {each.text}\n\n"
        for n, each in enumerate(listed, start=1)
    ]
    understood = slots("Read:\n" + "".join(shown) + "Why?", *listed)
    assert understood is not None
    _, found = understood
    assert [slot.number for slot in found] == ["1", "2", "3"]
    assert all(Field("page_label") in slot.before for slot in found)


def test_an_id_with_a_digit_is_no_number_that_is_counted_from_elsewhere() -> None:
    listed = [Segment(text, metadata={"id": f"n{n}"}) for n, text in enumerate(("alpha", "beta", "gamma"))]
    assert slots("Rank 1: alpha\nRank 2: beta\nRank 3: gamma", *listed) is not None
    paged = [Segment(each.text, metadata={"page": str(n)}) for n, each in enumerate(listed)]
    assert slots("Rank 1: alpha\nRank 2: beta\nRank 3: gamma", *paged) is None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[1] alpha [2] beta [3] gamma", ["1", "2", "3"]),
        ("0: alpha 1: beta 2: gamma", ["0", "1", "2"]),
        ("(a) alpha (b) beta (c) gamma", ["a", "b", "c"]),
        ("A. alpha B. beta C. gamma", ["A", "B", "C"]),
        ("alpha [1] beta [2] gamma [3]", ["1", "2", "3"]),
        ("Source 09 alpha Source 10 beta Source 11 gamma", ["09", "10", "11"]),
        ("- alpha - beta - gamma", [None, None, None]),
        ("page 4: [1] alpha page 4: [2] beta page 4: [3] gamma", ["1", "2", "3"]),
        ("alpha\n\nbeta\n\ngamma", [None, None, None]),
    ],
)
def test_what_counts_is_the_number_of_a_slot(text: str, numbers: list[str | None]) -> None:
    understood = slots(text, A, B, C)
    assert understood is not None
    assert [slot.number for slot in understood[1]] == numbers


@pytest.mark.parametrize(
    "text",
    [
        "[1] alpha [2] beta [4] gamma",
        "[1] alpha [3] beta [2] gamma",
        "alpha, but beta, so gamma",
        "alpha and beta",
        "score 0.7: alpha score 0.4: beta score 0.2: gamma",
        "Ferries: alpha Mills: beta Sand: gamma",
        "<a>alpha<b>beta",
        "alpha <hr> beta",
        "alpha\nbeta\n\ngamma",
        "[1] alpha [2] beta [b] gamma",
    ],
)
def test_what_is_not_the_same_for_each_is_not_understood(text: str) -> None:
    listed = [each for each in (A, B, C) if each.text in text]
    assert slots(text, *listed) is None


@pytest.mark.parametrize("text", ["[1] alpha\n[2] beta\n[3] gamma\nWhy?", "<d>alpha</d><d>beta</d><d>gamma</d>"])
def test_slots_are_the_same_in_every_order(text: str) -> None:
    found = set()
    for order in permutations([A, B, C]):
        understood = slots_of(split(text, [A, B, C]), order)
        assert understood is not None
        found.add((understood[0], tuple(understood[1])))
    assert len(found) == 1


def test_titles_in_metadata_are_titles() -> None:
    one, two = Segment("alpha", metadata={"title": "Ferries"}), Segment("beta", metadata={"title": "Mills"})
    understood = slots("Ferries: alpha\nMills: beta", one, two)
    assert understood is not None
    assert understood[1][0].render(two) == "Mills: beta\n"


def test_numbers_that_may_be_either_are_not_understood() -> None:
    def with_pages(*pages: object) -> list[Segment]:
        return [Segment(each.text, metadata={"page": page}) for each, page in zip((A, B), pages, strict=True)]

    assert slots("page 1: alpha page 2: beta", *with_pages(1, 2)) is None
    assert slots("page 2: alpha page 1: beta", *with_pages(2, 1)) is not None
    assert slots("page 1: alpha page 2: beta", *with_pages(2, 1)) is not None
    assert slots("page 4: alpha page 5: beta", *with_pages(4, 5)) is not None, "nothing counts from 4"
    assert slots("(2) alpha (1) beta", *with_pages(2, 1)) is None, "not named"
    assert (
        slots("Doc 1: alpha Doc 2: beta", Segment("alpha", title="Doc 1"), Segment("beta", title="Doc 2")) is not None
    )


def test_only_what_is_near_a_long_prompt_is_looked_at() -> None:
    long = "7 " * 100_000
    understood = slots(f"{long}\n[1] alpha\n[2] beta\n{long}", A, B)
    assert understood is not None
    assert understood[0] == (f"{long}\n", f"\n{long}")


def test_characters_that_stand_for_numbers_inside_are_not_understood() -> None:
    assert slots("\U0010fffd alpha \U0010fffd beta", A, B) is None
