"""A slot is a set in every order of its documents or in none; what stays text, or no model got, is noticed."""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariant_rag.api_models import set_text
from invariant_rag.prompts import Retrieval, RunRetrievals, begin_outside, find_set, forget_outside, outside_retrievals
from invariant_rag.prompts.order_warnings import holds_documents
from invariant_rag.segments import Segment

FERRY = Segment("The ferry leaves at noon.", "Ferries", {"source": "ferry.txt", "page": 12, "year": 2021})
MILL = Segment("The mill grinds barley all day.", "Mills", {"source": "mill.txt", "page": 3, "year": 2019})
SALT = Segment("Salt is sold in Brenn.\n\nIt is cheap.", "Trade", {"source": "salt.txt", "page": 7, "year": 2020})
DOCUMENTS = (FERRY, MILL, SALT)
JOINED = "\n".join(each.text for each in DOCUMENTS)

Template = Callable[[int, Segment], str]
SETS = {
    **{repr(sep): (lambda n, each: each.text, sep) for sep in ("\n\n", "\n", " ", "\n\n---\n\n", "\nNEXT\n")},
    "bullets": (lambda n, each: f"- {each.text}\n", ""),
    "quotes": (lambda n, each: f'"{each.text}"', ", "),
    "tags": (lambda n, each: f"<doc>{each.text}</doc>", "\n"),
    "label": (lambda n, each: f"Document:\n{each.text}", "\n\n"),
    "metadata": (lambda n, each: f"Source: {dict(each.metadata)}\nContent: {each.text}", "\n\n"),
    "source": (lambda n, each: f"Source: {each.metadata['source']}\nContent: {each.text}", "\n\n"),
    "title": (lambda n, each: f"# {each.title}\n{each.text}", "\n\n"),
    "tag with fields": (lambda n, each: f"<doc id={each.metadata['source']!r}>{each.text}</doc>", "\n"),
    "fields behind": (lambda n, each: f"{each.text} ({each.metadata['source']}, {each.metadata['page']})", "\n"),
    "years": (lambda n, each: f"{each.metadata['year']}: {each.text}", "\n"),
    "pages": (lambda n, each: f"Page {each.metadata['page']}: {each.text}", "\n"),
}
TEXTS = {
    "numbered": (lambda n, each: f"[{n}] {each.text}", "\n"),
    "from zero": (lambda n, each: f"[{n - 1}] {each.text}", "\n"),
    "lettered": (lambda n, each: f"({'abc'[n - 1]}) {each.text}", "\n"),
    "versions": (lambda n, each: f"Version {n}: {each.text}", " "),
    "ordinals": (lambda n, each: f"{['First', 'Second', 'Third'][n - 1]}: {each.text}", "\n"),
    "hours": (lambda n, each: f"{8 + n}:00 {each.text}", "\n"),
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


PAGES = [Segment(each.text, metadata={"page": n, "id": "_abc"[n]}) for n, each in enumerate(DOCUMENTS, 1)]


def filed(*values):
    return [Segment(each.text, metadata={"k": k}) for each, k in zip(DOCUMENTS, values, strict=True)]


@pytest.mark.parametrize(
    ("template", "sep", "listed"),
    [
        # `[1]` beside the page 1 may be its page, or its place; in another order it is only one of them.
        (lambda n, each: f"[{n}] {each.text}", "\n", PAGES),
        (lambda n, each: f"[{each.metadata['page']}] {each.text}", "\n", PAGES),
        (lambda n, each: f"({each.metadata['id']}) {each.text}", "\n", PAGES),
        # 3 is also a part of 300; a value may be the separator; two equal texts have different fields.
        (lambda n, each: f"Page {each.metadata['k']} of 300: {each.text}", "\n", filed(12, 3, 7)),
        (lambda n, each: f"{each.metadata['k']}: {each.text}", "\n", filed("", "en", "en")),
        (lambda n, each: f"{each.metadata['k']}: {each.text}", "\n",
         [Segment(text, metadata={"k": f"{n}.txt"}) for n, text in enumerate("aab")]),
        # Words that stand between two documents are no template.
        *((lambda n, each: each.text, sep, DOCUMENTS[:2]) for sep in (" or ", " is newer than ", "\nBut later: ")),
    ],
)  # fmt: skip
def test_what_cannot_be_told_from_the_template_or_counts_leaves_text_in_every_order(template, sep, listed):
    assert set(readings((template, sep), listed)) == {None}


@pytest.mark.parametrize(
    "slot",
    [
        f"{FERRY.text}\n\n{MILL.text}",  # two of three
        f"{FERRY.text}\n\n" * 3,
        "So? " + JOINED.replace("noon.\n", "noon.\n\n"),
        f"{FERRY.text}\n\n{MILL.text}\n---\n{SALT.text}",  # unequal gaps
        f"{FERRY.text} But {MILL.text} And {SALT.text}",
        f"docs = [{FERRY.text!r}, {MILL.text!r}]",
        *("When?", ""),
    ],
)
def test_anything_else_is_text(slot):
    assert find_set(slot, [Retrieval(DOCUMENTS, "When?")]) is None


def test_the_users_question_is_no_set_even_if_it_is_nothing_but_documents():
    assert find_set(JOINED, [Retrieval(DOCUMENTS)]) is not None
    for question in (JOINED, "\n".join(each.text for each in DOCUMENTS[::-1])):
        assert find_set(JOINED, [Retrieval(DOCUMENTS, question)]) is None


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
    assert all(each == found[0] for each in found)


_letters = st.sampled_from(["a", "b", " ", "\n", "-", "1"])
_values = st.one_of(st.integers(0, 12), st.text(_letters, max_size=2), st.sampled_from(["x.txt", "y.txt", "xx.txt"]))
_documents = st.lists(
    st.builds(
        lambda text, k, m: Segment(text, metadata={"k": k, "m": m}), st.text(_letters, min_size=1), _values, _values
    ),
    min_size=2,
    max_size=4,
)
_pieces = st.lists(st.sampled_from(["", "- ", "\n", "a", ": ", ("k",), ("m",)]), max_size=3)


@settings(max_examples=150, deadline=None)
@given(_documents, _pieces, _pieces, st.sampled_from(["", "\n", "\n\n", " ", "a", "-", "\n---\n"]), st.booleans())
def test_any_template_is_read_alike_in_every_order(documents, before, after, separator, strips):
    def fill(pieces, each):
        return "".join(str(each.metadata[piece[0]]) if isinstance(piece, tuple) else str(piece) for piece in pieces)

    def template(_, each):
        return fill(before, each) + (each.text.strip() if strips else each.text) + fill(after, each)

    found = readings((template, separator), documents)
    assert all(each == found[0] for each in found)
    assert len({None if each is None else each.slots for each in found}) == 1


def test_a_single_document_is_a_set_alone_or_beside_its_own_fields():
    alone = [Retrieval((FERRY,))]
    assert list(find_set(FERRY.text, alone) or ()) == [FERRY]
    assert find_set(f"Source: ferry.txt\nContent: {FERRY.text}", alone) is not None
    assert find_set(f"They said: {FERRY.text}", alone) is None
    assert find_set(f"ferry.txt: {FERRY.text}\n{MILL.text}", [*alone, Retrieval((MILL, SALT))]) is None


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
    return [[each.text for each in one.segments] for one in outside_retrievals()]


def retrieve(*found, asks=False, failed=False):
    """Run a root run that retrieves, and that may ask a model or fail."""
    runs = RunRetrievals()
    begin_outside()
    runs.start("root", query="When?")
    for each in found:
        runs.add("root", each)
    if asks:
        runs.of("root")
    runs.end("root", failed=failed)


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda: None, [FERRY_TEXTS]),
        (lambda: retrieve(MILLS), [MILL_TEXTS]),
        (retrieve, [FERRY_TEXTS]),  # a run that retrieved nothing
        (lambda: retrieve(MILLS, failed=True), [FERRY_TEXTS]),
        (lambda: retrieve(MILLS, asks=True), []),
        (lambda: forget_outside([" ".join(FERRY_TEXTS)]), []),
        (lambda: forget_outside(FERRY_TEXTS[:1]), [FERRY_TEXTS]),
        (lambda: copy_context().run(forget_outside, FERRY_TEXTS), []),
    ],
)
def test_the_last_retrieval_for_no_model_is_known_to_warn_and_is_no_set(then, expected):
    def known():
        assert texts() == []
        retrieve(FERRIES)
        (found,) = outside_retrievals()
        assert (found.is_set, found.one_by_one, found.query) == (False, True, "When?")
        then()
        return texts()

    assert Context().run(known) == expected


def test_other_threads_and_tasks_know_nothing_of_it():
    def in_threads():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(retrieve, MILLS).result()
            before = texts()
            retrieve(FERRIES)
            return before, pool.submit(texts).result()

    async def in_tasks():
        begin_outside()

        async def tenant(*found):
            retrieve(*found)
            await asyncio.sleep(0.01)
            return texts()

        return [*await asyncio.gather(tenant(FERRIES), tenant(MILLS), tenant()), texts()]

    assert Context().run(in_threads) == ([], [MILL_TEXTS])
    assert Context().run(asyncio.run, in_tasks()) == [[FERRY_TEXTS], [MILL_TEXTS], [], []]
