"""What people and models write arrives as it was written; only slots and declared segments are sets."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from invariant_rag.api_models import set_text
from invariant_rag.prompts import Recognition, Retrieval, Turn, mark, mark_set, recognize
from invariant_rag.segments import Segment, SegmentSet, verdict

STEPS = ("Open the valve.", "Start the pump.", "Close the hatch.")
FACTS = (
    Segment("Revenue was 9 million.", metadata={"year": 2021, "source": "a.txt"}),
    Segment("Revenue was 14 million.", metadata={"year": 2019, "source": "b.txt"}),
    Segment("Revenue was 11 million.", metadata={"year": 2020, "source": "c.txt"}),
)

ORDERED = [
    template.format(*STEPS)
    for template in (
        "My steps: 1. {0} 2. {1} 3. {2} What did I do in step 1?",
        "I wrote '{0}' first, then '{1}', then '{2}'. Was that right?",
        "{0} {1} {2} Is that the order?",
        "{0}\n{1}\n{2}\nWhich of these lines comes first?",
        "Day 1: {0} Day 2: {1} Day 3: {2} What was on day 2?",
        "9:00 {0}\n10:00 {1}\n11:00 {2}\nWhat happened at ten?",
        "Version 1: {0} Version 2: {1} Version 3: {2} Which is the oldest?",
        "Grade A: {0}\nGrade B: {1}\nGrade C: {2}",
        "docs = [Document(page_content='{0}'), Document(page_content='{1}'), Document(page_content='{2}')]",
        '[{{"text": "{0}"}}, {{"text": "{1}"}}, {{"text": "{2}"}}]',
        "<a>{0}</a><b>{1}</b><c>{2}</c>",
        "- {0}\n- {1}\n- {2}\n\nPut these in the right order.",
        "{0} But {1} And {2}",
        "first: {0}\nsecond: {1}\nthird: {2}",
        "for each in ({0!r}, {1!r}, {2!r}): print(each)",
        "| 1 | {0} |\n| 2 | {1} |\n| 3 | {2} |",
        "A then B then C: {0} -> {1} -> {2}",
        "Page 1\n{0}\nPage 2\n{1}\nPage 3\n{2}",
        "If '{0}' fails, '{1}' is next; '{2}' is last.",
        "[1] {0}\n[2] {1}\n[3] {2}\nWhat does [1] say?",
    )
]
"""Twenty texts whose order has a meaning, of which each names all retrieved documents."""


def asked(
    text: str, *, system: str = "Be brief.", history: Sequence[Turn] = (), slots: Sequence[str] = ()
) -> Recognition:
    known = [Retrieval(tuple(Segment(each) for each in STEPS), text)]
    return recognize([Turn("system", (system,)), *history, Turn("user", (text,))], known, [text, *slots])


@pytest.mark.parametrize("text", [*ORDERED, "\n\n".join(STEPS)])
def test_what_people_and_models_wrote_arrives_byte_for_byte(text: str) -> None:
    assert asked(text).turns[-1].parts == (text,), "the question"
    prompt = f"Draft:\n{text}\n\nImprove it."
    if text in ORDERED:
        history = [Turn("user", (text,)), Turn("assistant", (text,)), Turn("user", (prompt,))]
        found = asked("And now?", system=text, history=history, slots=[text])
        assert [turn.parts for turn in found.turns] == [(text,), (text,), (text,), (prompt,), ("And now?",)]
    found = asked("Why?", history=[Turn("assistant", (text,))], slots=[text])
    assert found.turns[1].parts == (text,), "an answer, although it is a set"


def test_a_slot_is_a_set_where_it_stands_and_the_text_around_it_stays() -> None:
    slot = "\n\n".join(STEPS)
    prompt = f"Context:\n{slot}\n\nQuestion: Is '{STEPS[0]}' right?"
    known = [Retrieval(tuple(Segment(each) for each in STEPS), "right?")]
    before, found, after = recognize([Turn("user", (prompt,))], known, [slot]).turns[0].parts
    assert (before, after) == ("Context:\n", f"\n\nQuestion: Is '{STEPS[0]}' right?")
    assert sorted(each.text for each in found) == sorted(STEPS)
    assert before + set_text(found) + after == prompt


def test_a_slot_that_stands_twice_stays_text_and_warns() -> None:
    slot = "\n\n".join(STEPS)
    prompt = f"{slot}\n\nAgain: {slot}"
    found = recognize([Turn("user", (prompt,))], [Retrieval(tuple(Segment(each) for each in STEPS))], [slot])
    assert found.turns[0].parts == (prompt,)
    assert [each.kind for each in found.findings] == ["no_segments"]
    listed = Retrieval(tuple(Segment(each) for each in STEPS), is_set=False)
    found = recognize([Turn("user", (slot,))], [listed], [slot])
    assert found.turns[0].parts == (slot,), "no retriever returned it: it keeps its order"
    assert [each.kind for each in found.findings] == ["no_segments"]


def test_an_order_that_is_stated_above_a_set_warns_and_stays() -> None:
    turn = Turn("user", ("Newest first:\n", SegmentSet(["a", "b"]), "\nWhich ferry came first?"))
    found = recognize([turn])
    assert found.turns == (turn,)
    assert [each.kind for each in found.findings] == ["stated"]


# --- the verdict ---


def test_several_sets_of_one_promise_nothing() -> None:
    assert verdict([1, 1, 2]) is False
    assert verdict([1, 1]) is False
    assert verdict([1, 2]) is verdict([2, 2]) is verdict([1]) is True
    assert verdict([]) is verdict([0]) is None
    assert verdict([], recognized=False) is verdict([3], recognized=False) is verdict([3], sorts=False) is False


# --- declared segments ---


def test_neighbouring_segments_are_a_set_and_text_between_parts_them() -> None:
    a, b, c = map(Segment, "abc")
    assert recognize([Turn("user", ("Read: ", a, " \n", b, "Which?"))]).turns[0].parts == (
        "Read: ", SegmentSet([a, b]), "Which?",
    )  # fmt: skip
    found = recognize([Turn("user", (a, "and also", b, "but not", c))])
    assert [len(each) for each in found.turns[0].sets] == [1, 1, 1]
    assert [each.kind for each in found.findings] == ["separate", "incomplete"]


def test_marked_segments_are_sets_with_the_text_between_them_or_a_reason_to_warn() -> None:
    text = "Read:\n- " + "\n- ".join(mark(each) for each in STEPS) + "\nWhich?"
    before, found, after = recognize([Turn("user", (text,))]).turns[0].parts
    assert before + set_text(found) + after == "Read:\n- " + "\n- ".join(STEPS) + "\nWhich?"
    assert [each.kind for each in recognize([Turn("user", (mark(STEPS[0], 3),))]).findings] == ["incomplete"]
    assert "marks" in [each.kind for each in recognize([Turn("user", (mark_set(STEPS)[:-3],))]).findings]


def test_marked_segments_get_their_metadata_from_the_retrieval() -> None:
    found = recognize([Turn("user", (mark_set(each.text for each in FACTS),))], [Retrieval(FACTS)])
    assert found.turns[0].sets[0] == SegmentSet(FACTS)


def test_what_is_no_text_stays_the_same_object() -> None:
    class Text(str):
        __slots__ = ("block",)

    image, text = {"type": "image"}, Text("Look: [1, 2]")
    parts = recognize([Turn("user", (text, image, json.dumps(STEPS)))]).turns[0].parts
    assert parts[0] is text
    assert parts[1] is image
    assert parts[2] == json.dumps(STEPS)
