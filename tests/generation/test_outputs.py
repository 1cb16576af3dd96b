"""Which chunks an answer is found in; and the ledger, which says what was read in words that no order changes."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag import Prompt, Segment, SegmentSet
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.citations import cite_spans
from invariant_rag.generation.outputs import ledger
from invariant_rag.rag import cite

CHUNKS = [
    Segment("The ferry to Ostra leaves the harbour at noon.", "Ferry", score=0.9),
    Segment("The mill of Brenn was built by Ada Kolm.", "Mill", score=0.5),
    Segment("Ada Kolm, a builder, lived by the river.", "People", score=0.7),
    Segment("The river is long.", score=0.1),
]
QUESTION = "Who built the mill of Brenn?"


KOLM = [(2, True), (1, True)]
TOWER = [Segment("塔の高さは三十メートルです。"), Segment("橋は古い。")]


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        ("Ada Kolm", {}, KOLM),  # best score first
        (" ada  KOLM.\n", {}, KOLM),
        ("Ada Kol", {}, [(2, False), (1, False)]),
        ("da", {}, []),  # half a word is none
        ("ferry", {"question": "What is it?"}, [(0, True)]),  # in the title
        # "built", "the", "mill" and "of" are in the question; "ada", "kolm" and "it" are left.
        ("It was Ada Kolm who built the mill of Brenn", {}, [(1, False), (2, False)]),
        *((nothing, {}, []) for nothing in ("The mill of Brenn the", "Purple elephants", "", " .!\n")),
        ("三十メートル", {"question": "塔の高さは？", "segments": TOWER}, [(0, True)]),
        ("Kolm, Ada", {"segments": [CHUNKS[1]]}, [(0, False)]),
        ("Purple elephants", {"segments": [CHUNKS[1]]}, []),
        # of chunks that were read
        ("Ada Kolm", {"included": (3, 2, 0)}, [(2, True)]),
        *(("Ada Kolm", {"included": read}, []) for read in ((3, 0), ())),
        ("built by Ada Kolm", {"included": (2, 3)}, [(2, False)]),  # what has it word for word was not read
    ],
)
def test_chunks_are_cited_that_were_read_and_hold_the_answer_or_half_of_its_distinctive_words(
    answer, options, expected
):
    found = cite(answer, **{"question": QUESTION, "segments": CHUNKS, **options})
    assert [(each.index, each.exact) for each in found] == expected


def spans(answer, chunks=CHUNKS, **options):
    found = cite_spans(answer, chunks, **options)
    assert all(chunks[each.index] == each.segment for each in found)
    return [(answer[each.start : each.end], each.index) for each in found]


NUMBERS = {"1": 3, "2": 1}


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        ("By Ada Kolm. She was 3.5 m tall!\nThe river is long", {}, [("By Ada Kolm.", 1), ("The river is long", 3)]),
        ("Kolm? Kolm.", {}, [("Kolm?", 2), ("Kolm?", 1), ("Kolm.", 2), ("Kolm.", 1)]),
        ("塔は高い。橋は古い。", {"chunks": [Segment("橋は古い")]}, [("橋は古い。", 0)]),
        (
            "By Ada Kolm [2]. See [1, 2], source 1 and [7].",  # numbers name chunks, and are no words of a sentence
            {"numbers": NUMBERS},
            [("By Ada Kolm [2].", 1), ("[2]", 1), ("[1, 2]", 3), ("[1, 2]", 1), ("source 1", 3)],
        ),
        ("As in [2].", {}, []),
        ("Ada Kolm [2].", {"included": [2], "numbers": NUMBERS}, [("Ada Kolm [2].", 2)]),
        ("The river is long", {"chunks": [CHUNKS[3], CHUNKS[3]]}, [("The river is long", 0)]),
    ],
)
def test_sentences_and_numbers_are_cited_by_the_chunks_that_were_read(answer, options, expected):
    assert spans(answer, **options) == expected


@given(st.sampled_from(["Ada Kolm", "It was Ada, by the river", "noon", ""]), st.randoms(use_true_random=False))
def test_citations_and_spans_ignore_the_order_of_the_chunks(answer, order):
    # Two of them with equal scores.
    chunks = [*CHUNKS, Segment("Noon: Ada Kolm slept.", score=0.7), Segment("By noon Ada Kolm was gone.", score=0.7)]
    text = "Ada Kolm. The ferry [2] leaves at noon; [1, 2]. The river is long."

    def cited(listed):
        numbers = {str(chunks.index(each) + 1): place for place, each in enumerate(listed)}
        found = [(each.start, each.end, each.segment) for each in cite_spans(text, listed, numbers=numbers)]
        return found, [(each.segment, each.exact) for each in cite(answer, QUESTION, listed)]

    assert len(cited(chunks)[0]) >= 6
    assert cited(order.sample(chunks, len(chunks))) == cited(chunks)


THREE = [Segment("one"), Segment("two, longer"), Segment("three, the longest")]


def ledger_of(lm, prompt, **options):
    return ledger(lm.generate(prompt, max_new_tokens=2), prompt, **options)


NAMES = [each.content_hash for each in sorted(THREE, key=lambda each: each.text, reverse=True)]  # two, three, one
LEDGER = {"sets": [3], "order": NAMES, "dropped": [], "trimmed": [], "cached_tokens": 0, "method": "rotor"}


@pytest.mark.parametrize(
    ("overflow", "limit", "expected"),
    [
        ("error", 100, {}),
        ("drop_last", 12, {"sets": [2], "order": [NAMES[0], NAMES[2]], "dropped": [NAMES[1]]}),
        ("drop_last", 3, {"sets": [1], "order": [NAMES[2]], "dropped": sorted(NAMES[:2])}),
        ("trim_segments", 12, {"trimmed": [NAMES[1]]}),
        ("trim_segments", 3, {"trimmed": sorted(NAMES[:2])}),
    ],
)
def test_the_ledger_is_the_same_in_every_order_and_names_what_did_not_fit(model, overflow, limit, expected):
    lm = model.with_method(max_segment_tokens=limit, overflow=overflow)
    for order in permutations(THREE):
        assert ledger_of(lm, Prompt("Read:", order, "Why?")) == {**LEDGER, "invariant": True, **expected}


def test_the_ledger_says_what_was_read_and_not_what_the_model_promises(model):
    prompt = Prompt("Read:", THREE, "Why?")
    assert ledger_of(model, Prompt("Why?")).items() >= {"invariant": None, "sets": []}.items(), "no documents"
    assert ledger_of(model, prompt, recognized=False)["invariant"] is False
    plain = ledger_of(model.with_method("sequential", ordering="given"), prompt)
    assert (plain["invariant"], plain["method"]) == (False, "sequential")
    assert ledger_of(model.with_method("sequential", ordering="lexical"), prompt)["invariant"] is True
    several = Prompt.of("Rubrics:", SegmentSet(["a", "b"]), "Answers:", SegmentSet(["d", "c", "e"]), "Which?")
    found = ledger_of(model, several)
    assert (found["sets"], found["order"]) == ([2, 3], [Segment(text).content_hash for text in "baedc"])


def test_a_batch_of_several_prompts_is_in_the_verdict_unless_it_changes_no_bit(model):
    prompts = [Prompt("Read:", THREE, question) for question in ("Why?", "When?")]
    for lm, expected in ((model, False), (model.with_method(deterministic=True), None)):
        calls = [(prompt, {"max_new_tokens": 2}) for prompt in prompts]
        for prompt, generation in zip(prompts, MicroBatcher().generate_all(lm, calls), strict=True):
            assert ledger(generation, prompt).get("bitwise") is expected
        alone = MicroBatcher().generate(lm, prompts[0], {"max_new_tokens": 2})
        assert "bitwise" not in ledger(alone, prompts[0])
