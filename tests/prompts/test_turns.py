"""What people and models write arrives as it was written; slots and declared segments are sets, and the rest warns."""

import json

import pytest

from invariant_rag.api_models import set_text
from invariant_rag.errors import InvariantRAGError, OrderWarning
from invariant_rag.prompts import Finding, Retrieval, Turn, mark, mark_set, recognize, report
from invariant_rag.prompts.order_warnings import looks_listed, states_order
from invariant_rag.segments import Segment, SegmentSet, is_invariant

STEPS = ("Open the valve.", "Start the pump.", "Close the hatch.")
SLOT = "\n\n".join(STEPS)
KNOWN = Retrieval(tuple(map(Segment, STEPS)))
ORDERED = [
    template.format(*STEPS)
    for template in (
        "My steps: 1. {0} 2. {1} 3. {2} What did I do in step 1?",
        "I wrote '{0}' first, then '{1}', then '{2}'. Was that right?",
        "{0} {1} {2} Is that the order?",
        "{0}\n{1}\n{2}\nWhich of these lines comes first?",
        "9:00 {0}\n10:00 {1}\n11:00 {2}\nWhat happened at ten?",
        "Version 1: {0} Version 2: {1} Version 3: {2} Which is the oldest?",
        "docs = [Document(page_content='{0}'), Document(page_content='{1}'), Document(page_content='{2}')]",
        '[{{"text": "{0}"}}, {{"text": "{1}"}}, {{"text": "{2}"}}]',
        "<a>{0}</a><b>{1}</b><c>{2}</c>",
        "- {0}\n- {1}\n- {2}\n\nPut these in the right order.",
        "{0} But {1} And {2}",
        "for each in ({0!r}, {1!r}, {2!r}): print(each)",
        "| 1 | {0} |\n| 2 | {1} |\n| 3 | {2} |",
        "Page 1\n{0}\nPage 2\n{1}\nPage 3\n{2}",
        "[1] {0}\n[2] {1}\n[3] {2}\nWhat does [1] say?",
    )
]
"""Texts whose order has a meaning, of which each names all retrieved documents."""


def asked(text, *, system="Be brief.", history=(), slots=()):
    known = [Retrieval(KNOWN.segments, text)]
    return recognize([Turn("system", (system,)), *history, Turn("user", (text,))], known, [text, *slots])


def kinds(*parts, known=(), slots=()):
    found = recognize([Turn("user", parts)], known, slots)
    return [each.kind for each in found.findings]


@pytest.mark.parametrize("text", [*ORDERED, SLOT])
def test_what_people_and_models_wrote_arrives_byte_for_byte(text):
    assert asked(text).turns[-1].parts == (text,), "the question"
    prompt = f"Draft:\n{text}\n\nImprove it."
    if text in ORDERED:
        history = [Turn("user", (text,)), Turn("assistant", (text,)), Turn("user", (prompt,))]
        found = asked("And now?", system=text, history=history, slots=[text])
        assert [turn.parts for turn in found.turns] == [(text,), (text,), (text,), (prompt,), ("And now?",)]
    found = asked("Why?", history=[Turn("assistant", (text,))], slots=[text])
    assert found.turns[1].parts == (text,), "an answer, although it is a set"


def test_a_slot_is_a_set_where_it_stands_once_and_the_text_around_it_stays():
    prompt = f"Context:\n{SLOT}\n\nQuestion: Is '{STEPS[0]}' right?"
    known = [Retrieval(KNOWN.segments, "right?")]
    before, found, after = recognize([Turn("user", (prompt,))], known, [SLOT]).turns[0].parts
    assert (before, after) == ("Context:\n", f"\n\nQuestion: Is '{STEPS[0]}' right?")
    assert sorted(each.text for each in found) == sorted(STEPS)
    assert before + set_text(found) + after == prompt
    history = [Turn("assistant", (SLOT,)), Turn("user", (prompt,))]
    said, asking = recognize(history, known, [SLOT]).turns
    assert (said.parts, len(asking.sets)) == ((SLOT,), 1), "what an assistant said is text beside the set"
    listed = Retrieval(KNOWN.segments, is_set=False)  # no retriever returned it: it keeps its order
    for text, retrieval in ((f"{SLOT}\n\nAgain: {SLOT}", KNOWN), (SLOT, listed)):
        found = recognize([Turn("user", (text,))], [retrieval], [SLOT])
        assert found.turns[0].parts == (text,)
        assert [each.kind for each in found.findings] == ["no_segments"]


def test_several_sets_of_one_promise_nothing():
    assert is_invariant([1, 1, 2]) is is_invariant([1, 1]) is False
    assert is_invariant([1, 2]) is is_invariant([2, 2]) is is_invariant([1]) is True
    assert is_invariant([]) is is_invariant([0]) is None
    assert is_invariant([], recognized=False) is is_invariant([3], recognized=False) is False
    assert is_invariant([3], sorts=False) is False


# --- declared segments ---


def test_neighbouring_segments_are_a_set_and_text_between_parts_them():
    a, b, c = map(Segment, "abc")
    assert recognize([Turn("user", ("Read: ", a, " \n", b, "Which?"))]).turns[0].parts == (
        "Read: ", SegmentSet([a, b]), "Which?",
    )  # fmt: skip
    assert [len(each) for each in recognize([Turn("user", (a, "and also", b, "but not", c))]).sets] == [1, 1, 1]
    assert kinds(a, "and also", b, "but not", c) == ["separate", "incomplete"]


def test_marked_segments_are_sets_with_the_text_between_them_or_a_reason_to_warn():
    text = "Read:\n- " + "\n- ".join(mark(each) for each in STEPS) + "\nWhich?"
    before, found, after = recognize([Turn("user", (text,))]).turns[0].parts
    assert before + set_text(found) + after == "Read:\n- " + "\n- ".join(STEPS) + "\nWhich?"
    assert kinds(mark(STEPS[0], 3)) == ["incomplete"]
    assert "marks" in kinds(mark_set(STEPS)[:-3])
    facts = tuple(Segment(each, metadata={"source": each[:4]}) for each in STEPS)
    (marked,) = recognize([Turn("user", (mark_set(STEPS),))], [Retrieval(facts)]).sets
    assert marked == SegmentSet(facts), "with the metadata of the retrieval"


def test_what_is_no_text_stays_the_same_object():
    class Text(str):
        __slots__ = ("block",)

    image, text = {"type": "image"}, Text("Look: [1, 2]")
    parts = recognize([Turn("user", (text, image, json.dumps(STEPS)))]).turns[0].parts
    assert parts[0] is text
    assert parts[1] is image
    assert parts[2] == json.dumps(STEPS)


# --- warnings ---


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")  # or it would be raised without strict
def test_every_finding_warns_with_its_fix_and_strict_raises_the_first():
    findings = [Finding("separate", "two segments stand apart."), Finding("marks", "marks are left.")]
    with pytest.warns(OrderWarning) as caught:
        report(findings, fixes={"marks": "Do this."})
    said = [str(each.message).rpartition(". ")[2] for each in caught]
    assert said == ["Write the same text around each segment, or none.", "Do this."]
    with pytest.raises(OrderWarning, match="stand apart") as raised:
        report(findings, strict=True)
    assert isinstance(raised.value, InvariantRAGError)
    report([], strict=True)


@pytest.mark.parametrize(
    "text",
    [
        "Documents, newest first:", "The documents are ranked by price.", "Context, sorted from cheapest to dearest",
        "The last document is the authority.", "Later passages win: the final passage is right.",
        "In chronological order:", "Most relevant results at the top:", "The first source is the contract.",
        "Listed in descending order of score.", "Prefer the earlier document where two disagree.",
    ],
)  # fmt: skip
def test_a_prompt_that_states_an_order_above_a_set_warns_and_stays(text):
    turn = Turn("user", (f"{text}\n", SegmentSet(["a", "b"]), "\nWhich ferry came first?"))
    assert recognize([turn]).turns == (turn,)
    assert kinds(*turn.parts) == ["stated"]
    other = "Answer from the documents. First, greet. Who ranked highest? Provide a final result in this format:"
    assert not states_order(other)
    assert not states_order(f"Question: {text}", [Retrieval((Segment("a"),), text)])


@pytest.mark.parametrize("listed", ["Document {0}: {1}\n", "[Source {0}]\n{1}\n", "<document>{1}</document>"])
def test_a_list_of_documents_in_text_is_noticed(listed):
    text = listed.format(1, "The ferry leaves at noon.") + listed.format(2, "The mill grinds barley.")
    assert looks_listed(text)
    assert kinds(text) == ["no_segments"]


def test_a_context_is_introduced_only_if_two_paragraphs_of_it_follow():
    above, below = (
        "Use the provided context.\nBelow:\n---\n",
        "---\nGiven the context information, answer.\nQuery: when?",
    )
    one, other = "The ferry leaves at noon.\n\n", "The mill grinds barley.\n\n"
    assert looks_listed(above + one + other + below, introduced=True)
    assert not looks_listed(above + one + below, introduced=True), "what follows is what to do with it"
