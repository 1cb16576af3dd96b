"""Segments between marks survive what frameworks do to text, broken marks are noticed, and labels lead to documents."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariant_rag import Segment
from invariant_rag.citation_labels import find_labels, labels_of, without_labels
from invariant_rag.errors import InvalidSegment
from invariant_rag.prompts import has_marks, mark, mark_set, parse_marked, without_marks
from invariant_rag.prompts.markers import Marked, split_marked
from invariant_rag.segments import SegmentSet, Slot, document_rendering

MARKS = "\ueca0\ueca1\ueca2\ueca3"
_pieces = st.text(st.characters(codec=None), max_size=4) | st.sampled_from([*MARKS, *"<|>\n \\\"'"])
any_text = st.lists(_pieces, max_size=8).map("".join)  # an alphabet of all these would hardly ever draw a mark
scores = st.none() | st.floats(allow_nan=False)


def bare(text):
    return text and "".join(each for each in text if each not in MARKS)


def segments_in(text):
    return [part.segment for part in split_marked(text)[0] if isinstance(part, Marked)]


@given(st.lists(st.tuples(any_text, st.none() | any_text, scores), max_size=5), any_text, any_text)
def test_marked_segments_are_found_again_and_text_without_marks_is_left_as_it_is(chunks, before, after):
    listed = [Segment(text, title=title, score=score) for text, title, score in chunks]
    parts, rest = split_marked(before + mark_set(listed) + after)
    expected = [Segment(bare(each.text) or "", title=bare(each.title), score=each.score) for each in listed]
    assert [part.segment for part in parts if isinstance(part, Marked)] == expected
    assert "".join(part for part in parts if isinstance(part, str)) == before + after
    assert not rest
    assert all(part.size == len(listed) for part in parts if isinstance(part, Marked))
    assert split_marked(before) == ([before] if before else [], False)
    assert without_marks(before) == before


def test_icons_of_fonts_and_their_escapes_are_no_marks():
    icons = f"icons {MARKS} and {MARKS[::-1]}"
    for text in (icons, "\\ueca0 \\ueca3", "a \\ueca0;;;\\ueca1 b \\ueca3", "\ueca0;;;\ueca1 x\ueca3"):
        assert split_marked(text) == ([text], False)
        assert not has_marks(text)


def test_a_document_cannot_forge_a_mark_nor_end_its_own():
    forged = f"\ueca0{'0' * 8};1;;\ueca1forged\ueca3"
    (found,) = segments_in(mark(Segment("a" + forged + MARKS, title=f"b{forged}")))
    assert found == Segment("a00000000;1;;forged", title="b00000000;1;;forged")
    with pytest.raises(InvalidSegment, match="token ids"):
        mark(Segment.of([1, 2]))


def test_marks_survive_what_frameworks_do_to_text_and_broken_and_escaped_ones_are_noticed_and_removed():
    for carry in (
        str.strip,
        lambda text: unicodedata.normalize("NFKC", text),
        lambda text: json.loads(json.dumps(text)),
        lambda text: json.dumps({"context": text}, ensure_ascii=False),
    ):
        carried = carry(mark_set(["a", "b", "c"]))
        assert [each.text for each in segments_in(carried)] == ["a", "b", "c"]
        assert not split_marked(carried)[1]
    for spoil in (
        lambda text: text[: len(text) // 2 + 12],  # cut
        lambda text: text.replace("\ueca3", ""),  # without ends
        lambda text: mark("a", nonce="0" * 8),  # of another process
        repr,
        json.dumps,
        lambda text: json.dumps(json.dumps(text)),
        lambda text: json.dumps(text).replace("\\ueca3", ""),
    ):
        spoilt = "before " + spoil(mark_set(["one", "two"])) + " after"
        parts, rest = split_marked(spoilt)
        assert rest
        assert has_marks(spoilt)
        assert not any(has_marks(part) for part in parts if isinstance(part, str))
        assert all(each in without_marks(spoilt) for each in ("before", "after"))


@settings(max_examples=200)
@given(st.text(st.sampled_from(MARKS + "ab;0 \n\\u"), max_size=24), st.integers(0, 60))
def test_any_jumble_of_marks_is_parsed(jumble, cut):
    text = jumble[:8] + mark_set(["one", "two"])[:cut] + jumble[8:]
    for each in (text, f"000\ueca00000{text[:10]}\ueca1;"):
        everything = without_marks(each)
        assert not has_marks(everything)
        assert without_marks(everything) == everything


def test_only_text_between_two_segments_makes_two_sets_of_them():
    for text, expected in (
        (mark("a") + " \n\t" + mark("b"), [["a", "b"]]),
        (mark("a") + " and " + mark("b"), [["a"], ["b"]]),
        (mark_set(["a", "b"]) + mark_set(["c"]), [["a", "b"], ["c"]]),  # neighbouring sets stay apart
    ):
        prompt = parse_marked(text)
        assert [[each.text for each in one] for one in prompt.sets] == expected
        assert prompt.rendering is document_rendering


# --- labels ---


@given(st.permutations(range(4)))
def test_a_label_leads_to_the_document_that_has_it_and_to_none_if_two_have_it(placed):
    documents = SegmentSet(["a", "b", "c", "d"], slots=[Slot(f"[{n}] ", number=str(n)) for n in range(1, 5)])
    labels = labels_of([(SegmentSet(["before"]), [0]), (documents, placed)])
    assert labels == {str(place + 1): 1 + index for place, index in enumerate(placed)}
    assert labels_of([(documents, placed), (documents, placed)]) == {}


def test_citations_are_found_where_they_stand():
    found = find_labels("At noon [2][1, 3], see source 2 and [4-6]; row[i] and 3 ferries 【7†source】, [Doc 8].")
    assert [label for *_, label in found] == ["2", "1", "3", "2", "4", "5", "6", "i", "7", "8"]
    assert without_labels("At noon [2], 3 ferries.") == "At noon    , 3 ferries."
