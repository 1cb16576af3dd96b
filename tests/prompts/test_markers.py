"""Segments between marks survive what frameworks do to text, and what is left of broken marks is noticed."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariant_rag import Segment
from invariant_rag.errors import InvalidSegment
from invariant_rag.prompts import has_marks, mark, mark_set, parse_marked, without_marks
from invariant_rag.prompts.markers import Marked, split_marked
from invariant_rag.segments import document_rendering

MARKS = "\ueca0\ueca1\ueca2\ueca3"
any_text = st.text(st.one_of(st.characters(codec=None), st.sampled_from(MARKS + "<|>\n \\\"'")), max_size=20)  # type: ignore[arg-type]
scores = st.none() | st.floats(allow_nan=False)


def bare(text: str) -> str:
    return "".join(each for each in text if each not in MARKS)


def segments_in(text: str) -> list[Segment]:
    return [part.segment for part in split_marked(text)[0] if isinstance(part, Marked)]


@given(st.lists(st.tuples(any_text, st.none() | any_text, scores), max_size=5), any_text, any_text)
def test_marked_segments_are_found_again(
    chunks: list[tuple[str, str | None, float | None]], before: str, after: str
) -> None:
    listed = [Segment(text, title=title, score=score) for text, title, score in chunks]
    parts, rest = split_marked(before + mark_set(listed) + after)
    expected = [
        Segment(bare(each.text), title=None if each.title is None else bare(each.title), score=each.score)
        for each in listed
    ]
    assert [part.segment for part in parts if isinstance(part, Marked)] == expected
    assert "".join(part for part in parts if isinstance(part, str)) == before + after
    assert not rest
    assert all(part.size == len(listed) for part in parts if isinstance(part, Marked))


@given(any_text)
def test_text_without_a_mark_of_this_process_is_left_as_it_is(text: str) -> None:
    assert split_marked(text) == ([text] if text else [], False)
    assert without_marks(text) == text


def test_icons_of_fonts_and_their_escapes_are_no_marks() -> None:
    for text in (
        f"icons {MARKS} and {MARKS[::-1]}",
        "\\ueca0 \\ueca3",
        "a \\ueca0;;;\\ueca1 b \\ueca3",
        "\ueca0;;;\ueca1 x\ueca3",
    ):
        assert split_marked(text) == ([text], False)
        assert not has_marks(text)


DUMPS = {
    "JSON": json.dumps,
    "a list of JSON": lambda text: json.dumps([text, text]),
    "Python": repr,
    "a dictionary of Python": lambda text: repr({"context": text}),
    "stripped": str.strip,
    "NFKC": lambda text: unicodedata.normalize("NFKC", text),
}


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
@pytest.mark.parametrize("texts", [["a", "b", "c"], ["it's", 'say "no"', "back\\", "line\nline", "\\ueca3"]])
def test_dumps_keep_segments_apart(dump: object, texts: list[str]) -> None:
    dumped = dump(mark_set(texts))  # type: ignore[operator]
    found = segments_in(dumped)
    assert len(found) == dumped.count(";5;" if len(texts) == 5 else ";3;")
    assert not split_marked(dumped)[1]
    if dump in (repr, str.strip, DUMPS["NFKC"]) and len(texts) == 3:
        assert [each.text for each in found] == texts


@pytest.mark.parametrize("dump", [json.dumps, repr])
def test_quotes_of_dumps_go_with_the_segment_that_they_were_chosen_for(dump: object) -> None:
    dumped = dump([mark("it's"), mark('say "no"'), mark("plain")])  # type: ignore[operator]
    parts, rest = split_marked(dumped)
    assert not rest
    expected = dump(["it's", 'say "no"', "plain"])  # type: ignore[operator]
    assert without_marks(dumped) == expected
    assert [part for part in parts if isinstance(part, str)] == ["[", ", ", ", ", "]"]


def test_a_document_cannot_forge_a_mark_nor_end_its_own() -> None:
    forged = f"\ueca0{'0' * 8};1;;\ueca1forged\ueca3"
    assert segments_in(mark("a" + forged + MARKS)) == [Segment("a00000000;1;;forged")]
    assert segments_in(json.dumps(mark("\\ueca3 \\\\ueca3")))[0].text == "\\\\ueca3 \\\\\\\\ueca3"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2 + 12],
        lambda text: text.replace("\ueca3", ""),
        lambda text: mark("a", nonce="0" * 8),
        lambda text: json.dumps(json.dumps(text)),
        lambda text: json.dumps(text).replace("\\ueca3", ""),
    ],
    ids=["cut", "without ends", "of another process", "escaped twice", "escaped, without ends"],
)
def test_broken_marks_are_noticed_and_removed(spoil: object) -> None:
    spoilt = "before " + spoil(mark_set(["one", "two"])) + " after"  # type: ignore[operator]
    parts, rest = split_marked(spoilt)
    assert rest
    assert has_marks(spoilt)
    assert not any(has_marks(part) for part in parts if isinstance(part, str))
    assert "before" in without_marks(spoilt)
    assert "after" in without_marks(spoilt)


@settings(max_examples=200)
@given(st.text(st.sampled_from(MARKS + "ab;0 \n\\u"), max_size=24), st.integers(0, 60))
def test_any_jumble_of_marks_is_parsed(jumble: str, cut: int) -> None:
    text = jumble[:8] + mark_set(["one", "two"])[:cut] + jumble[8:]
    everything = without_marks(text)
    assert not has_marks(everything)
    assert without_marks(everything) == everything


def test_what_is_left_of_marks_leaves_no_mark_when_it_is_removed() -> None:
    cut = mark_set(["one", "two"])[:10]
    assert not has_marks(without_marks(f"000\ueca00000{cut}\ueca1;"))


def test_only_text_between_two_segments_makes_two_sets_of_them() -> None:
    assert len(parse_marked(mark("a") + " \n\t" + mark("b")).sets) == 1
    assert len(parse_marked(mark("a") + " and " + mark("b")).sets) == 2
    assert parse_marked(mark("a")).rendering is document_rendering


def test_neighbouring_sets_stay_apart() -> None:
    sets = parse_marked(mark_set(["a", "b"]) + mark_set(["c"])).sets
    assert [[each.text for each in one] for one in sets] == [["a", "b"], ["c"]]


def test_token_ids_cannot_be_marked() -> None:
    with pytest.raises(InvalidSegment, match="token ids"):
        mark(Segment.of([1, 2]))
