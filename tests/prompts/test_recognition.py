"""A slot is a set in every order of its documents or in none, as declared segments are; all else stays as written."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariant_rag.api_models import set_text
from invariant_rag.errors import InvariantRAGError, OrderWarning
from invariant_rag.prompts import Finding, Retrieval, RunRetrievals, Turn, find_set, mark, mark_set, recognize, report
from invariant_rag.prompts import run_retrievals as outside
from invariant_rag.prompts.order_warnings import holds_documents, looks_listed, states_order
from invariant_rag.segments import Segment, SegmentSet, is_invariant

FERRY = Segment("The ferry leaves at noon.", "Ferries", {"source": "ferry.txt", "page": 12, "year": 2021})
MILL = Segment("The mill grinds barley all day.", "Mills", {"source": "mill.txt", "page": 3, "year": 2019})
SALT = Segment("Salt is sold in Brenn.\n\nIt is cheap.", "Trade", {"source": "salt.txt", "page": 7, "year": 2020})
DOCUMENTS = (FERRY, MILL, SALT)
JOINED = "\n".join(each.text for each in DOCUMENTS)

SETS = {
    **{repr(sep): (lambda n, each: each.text, sep) for sep in ("\n\n", "\n", " ", "\n\n---\n\n", "\nNEXT\n")},
    "bullets": (lambda n, each: f"- {each.text}\n", ""),
    "tags": (lambda n, each: f"<doc>{each.text}</doc>", "\n"),
    "metadata": (lambda n, each: f"Source: {dict(each.metadata)}\nContent: {each.text}", "\n\n"),
    "source": (lambda n, each: f"Source: {each.metadata['source']}\nContent: {each.text}", "\n\n"),
    "title": (lambda n, each: f"# {each.title}\n{each.text}", "\n\n"),
    "tag with fields": (lambda n, each: f"<doc id={each.metadata['source']!r}>{each.text}</doc>", "\n"),
    "fields behind": (lambda n, each: f"{each.text} ({each.metadata['source']}, {each.metadata['page']})", "\n"),
    "pages": (lambda n, each: f"Page {each.metadata['page']}: {each.text}", "\n"),
}
TEXTS = {
    "numbered": (lambda n, each: f"[{n}] {each.text}", "\n"),
    "ordinals": (lambda n, each: f"{['First', 'Second', 'Third'][n - 1]}: {each.text}", "\n"),
    "days and sources": (lambda n, each: f"Day {n}, {each.metadata['source']}: {each.text}", "\n"),
    "upper case": (lambda n, each: each.text.upper(), "\n"),
    "cut": (lambda n, each: each.text[:15], "\n"),
    "json": (lambda n, each: json.dumps({"n": n, "text": each.text}), "\n"),
}


def written(template, listed):
    return template[1].join(template[0](n, each) for n, each in enumerate(listed, start=1))


def readings(template, documents):
    """Return what each order of documents is recognised as; the retriever returned them in that order."""
    slots = [(listed, written(template, listed)) for listed in permutations(documents)]
    found = [find_set(slot, [Retrieval(tuple(listed), "When?")]) for listed, slot in slots]
    for (_, slot), each in zip(slots, found, strict=True):
        assert each is None or set_text(each) == slot
    return found


@pytest.mark.parametrize("name", [*SETS, *TEXTS])
def test_a_constant_template_is_a_set_in_every_order_and_one_that_counts_or_changes_texts_in_none(name):
    first, *others = readings({**SETS, **TEXTS}[name], DOCUMENTS)
    assert (first is None) == (name in TEXTS)
    assert all(each == first for each in others)
    for segment in first or ():  # what is beside a document belongs to it
        (document,) = [each for each in DOCUMENTS if each.text in segment.text]
        assert dict(segment.metadata) == dict(document.metadata)
    for listed in permutations(DOCUMENTS):
        assert holds_documents("Answer from this:\n" + written({**SETS, **TEXTS}[name], listed), Retrieval(DOCUMENTS))


def test_what_cannot_be_told_from_the_template_or_counts_leaves_text_in_every_order():
    def filed(*values, texts=tuple(each.text for each in DOCUMENTS)):
        return [Segment(text, metadata={"k": k}) for text, k in zip(texts, values, strict=True)]

    pages = [Segment(each.text, metadata={"page": n, "id": "_abc"[n]}) for n, each in enumerate(DOCUMENTS, 1)]
    for template, sep, listed in (
        # `[1]` beside the page 1 may be its page, or its place; in another order it is only one of them.
        (lambda n, each: f"[{n}] {each.text}", "\n", pages),
        (lambda n, each: f"[{each.metadata['page']}] {each.text}", "\n", pages),
        (lambda n, each: f"({each.metadata['id']}) {each.text}", "\n", pages),
        # 3 is also a part of 300; a value may be the separator; two equal texts have different fields.
        (lambda n, each: f"Page {each.metadata['k']} of 300: {each.text}", "\n", filed(12, 3, 7)),
        (lambda n, each: f"{each.metadata['k']}: {each.text}", "\n", filed("", "en", "en")),
        (lambda n, each: f"{each.metadata['k']}: {each.text}", "\n", filed(*"012", texts="aab")),
        # Words that stand between two documents are no template.
        *((lambda n, each: each.text, sep, DOCUMENTS[:2]) for sep in (" or ", " is newer than ", "\nBut later: ")),
    ):
        assert set(readings((template, sep), listed)) == {None}


def test_anything_else_is_text_also_the_users_question_and_one_document_is_a_set_alone_or_beside_its_fields():
    for slot in (
        f"{FERRY.text}\n\n{MILL.text}",  # two of three
        f"{FERRY.text}\n\n" * 3,
        "So? " + JOINED.replace("noon.\n", "noon.\n\n"),
        f"{FERRY.text}\n\n{MILL.text}\n---\n{SALT.text}",  # unequal gaps
        f"docs = [{FERRY.text!r}, {MILL.text!r}]",
        *("When?", ""),
    ):
        assert find_set(slot, [Retrieval(DOCUMENTS, "When?")]) is None
    assert find_set(JOINED, [Retrieval(DOCUMENTS)]) is not None
    for question in (JOINED, "\n".join(each.text for each in DOCUMENTS[::-1])):
        assert find_set(JOINED, [Retrieval(DOCUMENTS, question)]) is None
    alone = [Retrieval((FERRY,))]
    assert list(find_set(FERRY.text, alone) or ()) == [FERRY]
    assert find_set(f"Source: ferry.txt\nContent: {FERRY.text}", alone) is not None
    assert find_set(f"They said: {FERRY.text}", alone) is None
    assert find_set(f"ferry.txt: {FERRY.text}\n{MILL.text}", [*alone, Retrieval((MILL, SALT))]) is None


AMBIGUOUS = [
    *((dict(enumerate(texts)), "{text}", sep) for texts, sep in (
        (["a b", "c", "a b\n\nc"], "\n\n"),  # one is two others and the separator
        (["a", "a", "b"], "\n"), (["a\n", "b", "c"], "\n"), (["", "b", "c"], "\n"), (["- a", "a", "b"], "\n- "),
        (["b\n\nc", "a", "c\n\na"], "\n\n"), (["1", "a ", "a "], "-"),
        (["xb\n\nc", "ay", "c\n\na"], "\n\n"),  # the third is also where the first two meet
    )),
    # one order could be parsed in two ways
    ({"x": "aa", "xx": "b a"}, "{year}:{text}", ": "),
    ({"y": "b a", "xy": "ab"}, "{year}x{text}", " "),
    ({"x": "a", "x y": "b"}, "{text} {year}", "\n"),
    ({"y": "aa", "y ": "b a", "xy": "ba"}, "{year} {text}", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "template", "sep"), AMBIGUOUS)
def test_documents_that_cannot_be_told_apart_are_treated_alike_in_every_order(texts, template, sep):
    listed = [Segment(text, metadata={"year": str(year).strip()}) for year, text in texts.items()]
    found = readings((lambda n, each: template.format(text=each.text, **each.metadata), sep), listed)
    assert found == found[:1] * len(found)


_letters = st.sampled_from(["a", "b", " ", "\n", "-", "1"])
_values = st.one_of(st.integers(0, 12), st.text(_letters, max_size=2), st.sampled_from(["x.txt", "y.txt", "xx.txt"]))
_fields = st.fixed_dictionaries({"k": _values, "m": _values})
_documents = st.lists(st.builds(Segment, st.text(_letters, min_size=1), metadata=_fields), min_size=2, max_size=4)
_pieces = st.lists(st.sampled_from(["", "- ", "\n", "a", ": ", ("k",), ("m",)]), max_size=3)


@settings(max_examples=150, deadline=None)
@given(_documents, _pieces, _pieces, st.sampled_from(["", "\n", "\n\n", " ", "a", "-", "\n---\n"]), st.booleans())
def test_any_template_is_read_alike_in_every_order(documents, before, after, separator, strips):
    def fill(pieces, each):
        return "".join(str(each.metadata[piece[0]]) if isinstance(piece, tuple) else str(piece) for piece in pieces)

    def template(_, each):
        return fill(before, each) + (each.text.strip() if strips else each.text) + fill(after, each)

    found = readings((template, separator), documents)
    assert found == found[:1] * len(found)
    assert len({None if each is None else each.slots for each in found}) == 1


def test_twenty_long_documents_take_a_fraction_of_a_second():
    texts = [f"Sentence {n} says something. " * 70 + f"\n\nMore of {n}" for n in range(20)]
    listed = [Segment(text, metadata={"source": f"{n}.txt", "start_index": n * 100}) for n, text in enumerate(texts)]
    start = time.process_time()
    assert find_set(written(SETS["source"], listed), [Retrieval(tuple(listed))]) is not None
    assert time.process_time() - start < 1.0


def test_documents_that_are_only_named_are_noticed_and_other_texts_are_not():
    listed = Retrieval(tuple(Segment(f"Text number {n}.", metadata={"id": f"{e}-{n}"}) for n, e in enumerate("abc")))
    assert holds_documents("Which of a-0, b-1, c-2?", listed)
    assert not holds_documents("Which of a-0, b-1, xc-2?", listed)
    for text in ("When does the ferry leave?", "Answer briefly.", "Where is salt sold, and is it cheap?", "ferry.txt"):
        assert not holds_documents(text, Retrieval(DOCUMENTS))


# --- what was retrieved for no model ---

FERRY_TEXTS = ["The ferry leaves at noon.", "It carries salt."]
MILL_TEXTS = ["The mill grinds barley."]
FERRIES = Retrieval(tuple(map(Segment, FERRY_TEXTS)), "When?")
MILLS = Retrieval(tuple(map(Segment, MILL_TEXTS)), "What?")


def texts():
    return [[each.text for each in one.segments] for one in outside.outside_retrievals()]


def retrieve(*found, asks=False, failed=False):
    """Run a root run that retrieves, and that may ask a model or fail."""
    runs = RunRetrievals()
    outside.begin_outside()
    runs.start("root", query="When?")
    for each in found:
        runs.add("root", each)
    if asks:
        runs.of("root")
    runs.end("root", failed=failed)


def test_the_last_retrieval_for_no_model_is_known_to_warn_and_is_no_set():
    def known(then):
        assert texts() == []
        retrieve(FERRIES)
        (found,) = outside.outside_retrievals()
        assert (found.is_set, found.one_by_one, found.query) == (False, True, "When?")
        then()
        return texts()

    for then, expected in (
        (lambda: None, [FERRY_TEXTS]),
        (lambda: retrieve(MILLS), [MILL_TEXTS]),
        (retrieve, [FERRY_TEXTS]),  # a run that retrieved nothing
        (lambda: retrieve(MILLS, failed=True), [FERRY_TEXTS]),
        (lambda: retrieve(MILLS, asks=True), []),
        (lambda: outside.forget_outside([" ".join(FERRY_TEXTS)]), []),
        (lambda: outside.forget_outside(FERRY_TEXTS[:1]), [FERRY_TEXTS]),
        (lambda: copy_context().run(outside.forget_outside, FERRY_TEXTS), []),
    ):
        assert Context().run(known, then) == expected


def test_other_threads_and_tasks_know_nothing_of_it():
    def in_threads():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(retrieve, MILLS).result()
            before = texts()
            retrieve(FERRIES)
            return before, pool.submit(texts).result()

    async def in_tasks():
        outside.begin_outside()

        async def tenant(*found):
            retrieve(*found)
            await asyncio.sleep(0.01)
            return texts()

        return [*await asyncio.gather(tenant(FERRIES), tenant(MILLS), tenant()), texts()]

    assert Context().run(in_threads) == ([], [MILL_TEXTS])
    assert Context().run(asyncio.run, in_tasks()) == [[FERRY_TEXTS], [MILL_TEXTS], [], []]


# --- conversations: what people and models write arrives as it was written ---

A, B, C = STEPS = ("Open the valve.", "Start the pump.", "Close the hatch.")
SLOT = "\n\n".join(STEPS)
KNOWN = Retrieval(tuple(map(Segment, STEPS)))
ORDERED = (  # texts whose order has a meaning, of which each names all retrieved documents
    f"My steps: 1. {A} 2. {B} 3. {C} What did I do in step 1?",
    f"I wrote '{A}' first, then '{B}', then '{C}'. Was that right?",
    f"{A}\n{B}\n{C}\nWhich of these lines comes first?",
    f'[{{"text": "{A}"}}, {{"text": "{B}"}}, {{"text": "{C}"}}]',
    f"- {A}\n- {B}\n- {C}\n\nPut these in the right order.",
)


def asked(text, *, system="Be brief.", history=(), slots=()):
    known = [Retrieval(KNOWN.segments, text)]
    return recognize([Turn("system", (system,)), *history, Turn("user", (text,))], known, [text, *slots])


def kinds(*parts):
    return [each.kind for each in recognize([Turn("user", parts)]).findings]


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
    (turn,) = recognize([Turn("user", ("Read: ", a, " \n", b, "Which?"))]).turns
    assert turn.parts == ("Read: ", SegmentSet([a, b]), "Which?")
    assert [len(each) for each in recognize([Turn("user", (a, "and also", b, "but not", c))]).sets] == [1, 1, 1]
    assert kinds(a, "and also", b, "but not", c) == ["separate", "incomplete"]


def test_marked_segments_are_sets_or_a_reason_to_warn_and_what_is_no_text_stays_the_same_object():
    text = "Read:\n- " + "\n- ".join(mark(each) for each in STEPS) + "\nWhich?"
    before, found, after = recognize([Turn("user", (text,))]).turns[0].parts
    assert before + set_text(found) + after == "Read:\n- " + "\n- ".join(STEPS) + "\nWhich?"
    assert kinds(mark(STEPS[0], 3)) == ["incomplete"]
    assert "marks" in kinds(mark_set(STEPS)[:-3])
    facts = tuple(Segment(each, metadata={"source": each[:4]}) for each in STEPS)
    (marked,) = recognize([Turn("user", (mark_set(STEPS),))], [Retrieval(facts)]).sets
    assert marked == SegmentSet(facts), "with the metadata of the retrieval"
    image, text = {"type": "image"}, type("Text", (str,), {})("Look: [1, 2]")
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


def test_a_prompt_that_states_an_order_above_a_set_warns_and_stays():
    for text in (
        *("Documents, newest first:", "The documents are ranked by price.", "Context, sorted from cheapest to dearest"),
        *("The last document is the authority.", "Later passages win: the final passage is right."),
        *("In chronological order:", "Most relevant results at the top:", "The first source is the contract."),
        *("Listed in descending order of score.", "Prefer the earlier document where two disagree."),
    ):
        turn = Turn("user", (f"{text}\n", SegmentSet(["a", "b"]), "\nWhich ferry came first?"))
        assert recognize([turn]).turns == (turn,)
        assert kinds(*turn.parts) == ["stated"]
        assert not states_order(f"Question: {text}", [Retrieval((Segment("a"),), text)])
    other = "Answer from the documents. First, greet. Who ranked highest? Provide a final result in this format:"
    assert not states_order(other)


def test_a_list_of_documents_in_text_is_noticed_and_a_context_if_two_paragraphs_of_it_follow():
    one, other = "The ferry leaves at noon.\n\n", "The mill grinds barley.\n\n"
    for listed in ("Document {0}: {1}\n", "[Source {0}]\n{1}\n", "<document>{1}</document>"):
        text = listed.format(1, one.strip()) + listed.format(2, other.strip())
        assert looks_listed(text)
        assert kinds(text) == ["no_segments"]
    above = "Use the provided context.\nBelow:\n---\n"
    below = "---\nGiven the context information, answer.\nQuery: when?"
    assert looks_listed(above + one + other + below, introduced=True)
    assert not looks_listed(above + one + below, introduced=True), "what follows is what to do with it"
