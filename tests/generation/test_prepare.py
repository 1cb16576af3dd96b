"""What the model reads: in physical order, what fits; and what is said of it: the ledger, and citations."""

import random
from functools import partial
from itertools import chain, permutations
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from invariant_rag import MicroBatcher, Prompt, Segment, SegmentSet
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.errors import ContextOverflow
from invariant_rag.generation.choices import ResolvedChoices
from invariant_rag.generation.citations import cite_spans
from invariant_rag.generation.outputs import ledger
from invariant_rag.generation.prepare import fit_segments, prepare
from invariant_rag.methods import RoToR
from invariant_rag.orderings import Frequency, Given, Lexical, LexicalReversed, Score
from invariant_rag.rag import cite
from invariant_rag.testing import toy_tokenizer

TOY, ORDERINGS = toy_tokenizer(), (Lexical(), Frequency(), Given())
ids = st.lists(st.integers(0, 3), max_size=6)
sets = st.lists(st.lists(ids, max_size=6), min_size=1, max_size=3)
policies = st.sampled_from(["drop_last", "trim_segments"])
small = st.integers(0, 9)
lengths = st.lists(st.lists(small, max_size=6), max_size=3)
strategies = st.sampled_from(["error", "drop_last", "trim_segments"])


def prepared(prompt, ordering=None, new_tokens=0, **limits):
    choices = ResolvedChoices(method=RoToR(), ordering=ordering or Lexical(), backend=SDPA(), **limits)
    return prepare(prompt, TOY, choices, new_tokens)


@given(sets, st.integers(4, 40), st.none() | st.integers(1, 6), policies, st.sampled_from(ORDERINGS), st.randoms())
def test_the_input_ignores_order_and_accounts_for_every_segment(chosen, window, limit, overflow, ordering, shuffle):
    prompt = Prompt.of([9], *chain.from_iterable((SegmentSet(each), [9]) for each in chosen))
    shuffled = prompt.shuffled(shuffle)
    options = {"context_window": window, "max_segment_tokens": limit, "overflow": overflow}
    result, other = (prepared(each, ordering, **options) for each in (prompt, shuffled))
    assert (result.input_ids, result.arrangement) == (other.input_ids, other.arrangement) or not ordering.invariant
    for name, as_listed in (("order", list), ("dropped", sorted), ("trimmed", sorted)) if ordering.invariant else ():
        pairs = ((prompt, result), (shuffled, other))
        one, two = ([source.segments[i].token_ids for i in getattr(each, name)] for source, each in pairs)
        assert as_listed(one) == as_listed(two)
    layout, order = result.arrangement.layout, list(result.order)
    assert sorted([*order, *result.dropped]) == list(range(len(prompt.segments)))
    assert set(result.trimmed) <= set(order)
    lengths = [len(each.token_ids or ()) for each in prompt.segments]
    if sum(lengths) + len(prompt.texts) <= window and max(lengths, default=0) <= (limit or window):
        assert (result.dropped, result.trimmed) == ((), ()), "there is room for all of them"
    assert layout.length == len(result.input_ids) <= window
    assert (result.input_ids[0], result.suffix_length) == (9, 1)
    for span in (span for spans in layout.set_spans for span in spans):
        index = order.pop(0)
        whole = prompt.segments[index].token_ids or ()
        assert result.input_ids[span.start : span.stop] == whole[: len(span)]
        assert (len(span) < len(whole)) == (index in result.trimmed)
    assert not order
    assert all(prompt.segments[index].token_ids for index in result.dropped), "an empty segment is never dropped"


CHUNKS_WITH_SCORES = [Segment(text, score=score) for text, score in (("low", 0.1), ("high", 0.9), ("mid", 0.5))]
SEVERAL = Prompt.of("p", SegmentSet(["bb", "aa"]), "m", SegmentSet(["dddd", "cccc"]), "s")


def test_rank_zero_is_next_to_the_suffix_and_the_last_goes_first():
    for prompt, ordering, window, order, dropped, text in (
        (Prompt("p", ["b", "a", "c"], "s"), Lexical(), None, (2, 0, 1), (), "pcbas"),
        (Prompt("p", ["b", "a", "c"], "s"), LexicalReversed(), None, (1, 0, 2), (), "pabcs"),
        (Prompt("p", ["b", "a", "", "c"], "s"), Given(), None, (0, 1, 2, 3), (), "pbacs"),
        (Prompt("p", CHUNKS_WITH_SCORES, "s"), Score(), 10, (2, 1), (0,), "pmidhighs"),
        (SEVERAL, Lexical(), 12, (0, 1, 3), (2,), "pbbaamccccs"),  # the fullest of several sets gives first
    ):
        result = prepared(prompt, ordering, context_window=window, overflow="drop_last")
        assert (result.order, result.dropped, TOY.decode(list(result.input_ids))) == (order, dropped, text)


def test_orderings_are_asked_with_the_query_or_else_the_last_text():
    asked = []

    class Asked(Lexical):
        def sort_keys(self, candidates, query):
            asked.append(query)
            return super().sort_keys(candidates, query)

    for suffix, query in (("suffix", "query"), ("suffix", ""), ("suffix", None), (TOY("ids")["input_ids"], None)):
        prepared(Prompt("p", ["a"], suffix, query=query), Asked())
    assert asked == ["query", "", "suffix", "ids"]


@given(lengths, small, small, st.none() | st.integers(0, 60), st.none() | st.integers(1, 9), strategies, st.booleans())
@example([[100, 3, 2]], 1, 1, 10, None, "drop_last", False)  # one that is too long pushes out no other
@example([[7, 2, 7, 3], [5, 1]], 0, 0, 9, None, "drop_last", True)  # the longest make room
def test_what_fits_is_kept_by_the_rule_of_the_strategy(ranked, texts, new, window, limit, overflow, shares_positions):
    """The largest common length; or without what is too long alone, and then without the last of the fullest set."""
    limits = {"window": window, "max_segment_tokens": limit, "text_tokens": texts, "new_tokens": new}
    fit = partial(fit_segments, ranked, overflow, shares_positions=shares_positions, **limits)
    room, size = inf if window is None else window - texts - new, partial(max, default=0) if shares_positions else sum
    limit = limit or 100

    def fits(sets):
        return sum(map(size, sets)) <= room

    def cut(most):
        return [[min(each, most) for each in one] for one in ranked]

    is_whole = fits(ranked) and cut(limit) == ranked
    if room < 0 or (overflow == "error" and not is_whole):
        with pytest.raises(ContextOverflow):
            fit()
    elif is_whole or overflow == "error":
        assert fit() == ranked
    elif overflow == "trim_segments":
        assert fit() == next(filter(fits, map(cut, range(limit, -1, -1))))
    else:
        kept = [[each if each <= limit else 0 for each in one] for one in ranked]
        if not fits(kept):
            kept = [[each if each <= room else 0 for each in one] for one in kept]
        while not fits(kept):
            fullest = max(kept, key=size)
            least = max(fullest) if shares_positions else 1  # of those that count
            fullest[max(index for index, length in enumerate(fullest) if length >= least)] = 0
        assert fit() == kept


@pytest.mark.parametrize(
    ("ranked", "overflow", "limits", "message"),
    [
        ([[60, 7], [30]], "error", {"window": 100, "text_tokens": 11, "new_tokens": 13},
         r"100 tokens.*108 in the prompt \(11 of text, 97 in 3 segments\) and 13 to generate"),
        ([[3]], "drop_last", {"window": 5, "text_tokens": 6}, r"at most 5 tokens.*9 in the prompt"),
        ([[1, 9]], "error", {"max_segment_tokens": 4}, r"max_segment_tokens=4 .* got 9"),
        ([[7, 2, 7, 3], [5, 1]], "error", {"window": 10, "text_tokens": 1, "shares_positions": True},
         r"at most 10 tokens.*13 in the prompt \(1 of text, 12 in the longest of 6"),
    ],
)  # fmt: skip
def test_the_message_of_an_overflow_names_every_number(ranked, overflow, limits, message):
    with pytest.raises(ContextOverflow, match=message) as caught:
        fit_segments(ranked, overflow, **limits)
    assert "drop_last" in caught.value.hint


def test_a_thousand_segments_are_laid_out():
    chunks = [f"chunk {random.Random(n).random()}" for n in range(1000)]
    one, other = Prompt("p", chunks, "s"), Prompt("p", chunks[::-1], "s")
    assert prepared(one).input_ids == prepared(other).input_ids
    assert [999 - index for index in prepared(other).order] == list(prepared(one).order)
    fitted = prepared(one, context_window=3000, overflow="drop_last")
    assert len(fitted.order) + len(fitted.dropped) == 1000
    assert 2900 < len(fitted.input_ids) <= 3000


# --- citations and the ledger ---

CHUNKS = [
    Segment("The ferry to Ostra leaves the harbour at noon.", "Ferry", score=0.9),
    Segment("The mill of Brenn was built by Ada Kolm.", "Mill", score=0.5),
    Segment("Ada Kolm, a builder, lived by the river.", "People", score=0.7),
    Segment("The river is long.", score=0.1),
]
QUESTION = "Who built the mill of Brenn?"
KOLM = [(2, True), (1, True)]
TOWER = [Segment("塔の高さは三十メートルです。"), Segment("橋は古い。")]


def test_chunks_are_cited_that_hold_the_answer_or_half_of_its_distinctive_words():
    for answer, options, expected in (
        *((text, {}, KOLM) for text in ("Ada Kolm", " ada  KOLM.\n")),  # best score first
        ("Ada Kol", {}, [(2, False), (1, False)]),
        ("da", {}, []),  # half a word is none
        ("ferry", {"question": "What is it?"}, [(0, True)]),  # in the title
        # "built", "the", "mill" and "of" are in the question; "ada", "kolm" and "it" are left.
        ("It was Ada Kolm who built the mill of Brenn", {}, [(1, False), (2, False)]),
        *((nothing, {}, []) for nothing in ("The mill of Brenn the", "Purple elephants", "", " .!\n")),
        ("三十メートル", {"question": "塔の高さは？", "segments": TOWER}, [(0, True)]),
        ("Kolm, Ada", {"segments": [CHUNKS[1]]}, [(0, False)]),
        # of chunks that were read
        ("Ada Kolm", {"included": (3, 2, 0)}, [(2, True)]),
        *(("Ada Kolm", {"included": read}, []) for read in ((3, 0), ())),
        ("built by Ada Kolm", {"included": (2, 3)}, [(2, False)]),  # what has it word for word was not read
    ):
        found = cite(answer, **{"question": QUESTION, "segments": CHUNKS, **options})
        assert [(each.index, each.exact) for each in found] == expected, answer


NUMBERS = {"1": 3, "2": 1}


def test_sentences_and_numbers_are_cited_by_the_chunks_that_were_read():
    for answer, options, expected in (
        ("By Ada Kolm. She was 3.5 m tall!\nThe river is long", {}, [("By Ada Kolm.", 1), ("The river is long", 3)]),
        ("Kolm? Kolm.", {}, [("Kolm?", 2), ("Kolm?", 1), ("Kolm.", 2), ("Kolm.", 1)]),
        ("塔は高い。橋は古い。", {"segments": [Segment("橋は古い")]}, [("橋は古い。", 0)]),
        (
            "By Ada Kolm [2]. See [1, 2], source 1 and [7].",  # numbers name chunks, and are no words of a sentence
            {"numbers": NUMBERS},
            [("By Ada Kolm [2].", 1), ("[2]", 1), ("[1, 2]", 3), ("[1, 2]", 1), ("source 1", 3)],
        ),
        ("As in [2].", {}, []),
        ("Ada Kolm [2].", {"included": [2], "numbers": NUMBERS}, [("Ada Kolm [2].", 2)]),
        ("The river is long", {"segments": [CHUNKS[3], CHUNKS[3]]}, [("The river is long", 0)]),
    ):
        segments = options.pop("segments", CHUNKS)
        found = cite_spans(answer, segments, **options)
        assert [(answer[each.start : each.end], each.index) for each in found] == expected
        assert all(segments[each.index] == each.segment for each in found)


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
NAMES = [each.content_hash for each in sorted(THREE, key=lambda each: each.text, reverse=True)]  # two, three, one
LEDGER = {"sets": [3], "order": NAMES, "dropped": [], "trimmed": [], "cached_tokens": 0, "method": "rotor"}


def ledger_of(lm, prompt, **options):
    return ledger(lm.generate(prompt, max_new_tokens=2), prompt, **options)


def test_the_ledger_is_the_same_in_every_order_and_names_what_did_not_fit(model):
    for overflow, limit, expected in (
        ("error", 100, {}),
        ("drop_last", 12, {"sets": [2], "order": [NAMES[0], NAMES[2]], "dropped": [NAMES[1]]}),
        ("drop_last", 3, {"sets": [1], "order": [NAMES[2]], "dropped": sorted(NAMES[:2])}),
        ("trim_segments", 12, {"trimmed": [NAMES[1]]}),
        ("trim_segments", 3, {"trimmed": sorted(NAMES[:2])}),
    ):
        lm = model.with_method(max_segment_tokens=limit, overflow=overflow)
        for order in permutations(THREE):
            assert ledger_of(lm, Prompt("Read:", order, "Why?")) == {**LEDGER, "invariant": True, **expected}


def test_the_ledger_says_what_was_read_and_not_what_the_model_promises_and_a_batch_may_change_bits(model):
    prompt = Prompt("Read:", THREE, "Why?")
    assert ledger_of(model, Prompt("Why?")).items() >= {"invariant": None, "sets": []}.items(), "no documents"
    assert ledger_of(model, prompt, recognized=False)["invariant"] is False
    plain = ledger_of(model.with_method("sequential", ordering="given"), prompt)
    assert (plain["invariant"], plain["method"]) == (False, "sequential")
    assert ledger_of(model.with_method("sequential", ordering="lexical"), prompt)["invariant"] is True
    several = Prompt.of("Rubrics:", SegmentSet(["a", "b"]), "Answers:", SegmentSet(["d", "c", "e"]), "Which?")
    found = ledger_of(model, several)
    assert (found["sets"], found["order"]) == ([2, 3], [Segment(text).content_hash for text in "baedc"])
    calls = [(Prompt("Read:", THREE, question), {"max_new_tokens": 2}) for question in ("Why?", "When?")]
    for lm, expected in ((model, False), (model.with_method(deterministic=True), None)):
        for (prompt, _), generation in zip(calls, MicroBatcher().generate_all(lm, calls), strict=True):
            assert ledger(generation, prompt).get("bitwise") is expected
        assert "bitwise" not in ledger(MicroBatcher().generate(lm, *calls[0]), prompt)
