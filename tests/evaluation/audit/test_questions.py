"""Claims about where questions come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from invariant_rag.errors import InvalidQuestion, UnsupportedCombination
from invariant_rag.evaluation.audit.questions import Question, as_retrieve_function, read_questions
from invariant_rag.rag.retrieval import BM25Retriever
from invariant_rag.segments import Segment

EXPECTED = Question(
    "Who?", (Segment("It was Ann.", "Page", score=0.5), Segment("Nobody.", score=0.25)), ("Ann", "Anna"), (0,), id="7"
)


def test_a_jsonl_a_csv_and_mappings_say_the_same(tmp_path: Path) -> None:
    lines = tmp_path / "questions.jsonl"
    lines.write_text(
        '{"id": 7, "question": "Who?", "answers": ["Ann", "Anna"], "gold": [0], "segments": ['
        '{"text": "It was Ann.", "title": "Page", "score": 0.5}, {"text": "Nobody.", "score": 0.25}]}\n\n'
    )
    rows = tmp_path / "questions.csv"
    rows.write_text(
        "id,question,segment,title,score,gold,answer\n7,Who?,It was Ann.,Page,0.5,1,Ann|Anna\n7,Who?,Nobody.,,0.25,0,\n"
    )
    mapping = {
        "id": 7,
        "question": "Who?",
        "answers": ["Ann", "Anna"],
        "segments": [{"text": "It was Ann.", "title": "Page", "score": 0.5, "gold": True}, EXPECTED.segments[1]],
    }
    assert read_questions(lines, None) == read_questions(rows, None) == read_questions([mapping], None) == [EXPECTED]


def test_segments_that_hold_an_answer_are_gold_unless_all_do() -> None:
    def gold(*segments: str) -> tuple[int, ...]:
        return read_questions([{"question": "q", "answer": "Ann", "segments": segments}], None)[0].gold

    assert gold("none", "the ANN!", "ann") == (1, 2)
    assert gold("Ann", "Ann too") == gold("nobody") == ()


def test_segments_come_live_from_a_retriever() -> None:
    retriever = BM25Retriever([Segment("a mill"), Segment("a ferry"), Segment("a bridge")])
    (question,) = read_questions([{"question": "ferry", "answer": "ferry"}], as_retrieve_function(retriever, 2))
    assert question.segments[0].text == "a ferry"
    assert len(question.segments) == 2
    (question,) = read_questions([{"question": "ferry"}], as_retrieve_function(lambda text: [text, "b"], 2))
    assert [each.text for each in question.segments] == ["ferry", "b"]
    with pytest.raises(UnsupportedCombination):
        as_retrieve_function(3, 2)


def test_cells_may_hold_any_character_but_a_line_break(tmp_path: Path) -> None:
    rows = tmp_path / "questions.csv"
    rows.write_text("question,segment\nWho?,page one\x0cpage\u2028two\x85\n", encoding="utf-8")
    (question,) = read_questions(rows, None)
    assert question.segments[0].text == "page one\x0cpage\u2028two\x85"


def test_numbers_are_answers_too() -> None:
    (one, several) = read_questions(
        [
            {"question": "q", "answer": 42, "segments": ["42", "x"]},
            {"question": "q", "answers": [4.5, "x"], "segments": ["a"]},
        ],
        None,
    )
    assert (one.answers, one.gold, several.answers) == (("42",), (0,), ("4.5", "x"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q", "segments": "abc"}, "segments in a list"),
        ({"question": "q", "segments": ["a"], "gold": "1"}, "gold as an index"),
        ({"question": "q", "segments": ["a"], "gold": [True]}, "gold as an index"),
        ({"question": "q", "segments": ["a"], "answers": {"a": 1}}, "answers as a text"),
        ({"question": "q"}, "no retriever"),
        ({"prompt": "q"}, "expected a mapping"),
        ("q", "got str"),
        ({"question": "q", "segments": ["a"], "gold": [1]}, "below 1"),
        ({"question": "q", "segments": [{"body": "a"}]}, "expected a segment with text"),
        ({"question": "q", "segments": [3]}, "got int"),
    ],
)
def test_what_is_no_question_is_named(record: Any, message: str) -> None:
    with pytest.raises(InvalidQuestion, match=message):
        read_questions([record], None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.txt", "", "expected a file of .jsonl, .json, .yaml"),
        ("q.jsonl", "{", "line 1: expected JSON"),
        ("q.jsonl", "\n", "at least one question"),
        ("q.csv", "text\nx\n", "expected columns"),
        ("q.csv", "question,segment\na,b,c\n", "expected a table"),
        ("q.csv", "question,segment,gold\na,b,maybe\n", "1 or 0"),
        ("q.csv", "question,segment,score\na,b,high\n", "a number"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InvalidQuestion, match=message):
        read_questions(path, None)


def test_a_message_about_a_long_text_stays_short(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    for content in ("," * 100_000, f"question,segment,gold\na,b,{'1' * 5000}\n", f"{{{'a' * 9000}"):
        path.write_text(content)
        with pytest.raises(InvalidQuestion) as caught:
            read_questions(path, None)
        assert len(str(caught.value)) < 5000
    with pytest.raises(InvalidQuestion) as caught:
        read_questions(tmp_path / f"{'d' * 200}/{'e' * 9000}.csv", None)
    assert len(str(caught.value)) < 5000
