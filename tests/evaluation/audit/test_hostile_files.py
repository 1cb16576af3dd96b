"""Claims about question files that somebody wrote to stop an audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from invariant_rag.errors import InvalidQuestion
from invariant_rag.evaluation.audit.questions import parse_questions

TEST = "tests:\n- question: Who?\n  segments: [a]\n  "
LAUGHS = "x: &a0 [l, l, l, l, l, l, l, l, l, l]\n" + "".join(
    f"x{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{LAUGHS}tests:\n- question: Who?\n  {use}\n"
            for use in ("id: *a8", "gold: *a8", "note: *a8", "segments: [{text: a, metadata: {x: *a8}}]")
        ),
    ],
)
def test_aliases_of_aliases_in_a_yaml_file_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "laughs.yaml"
    path.write_text(text)
    with pytest.raises(InvalidQuestion, match=r"laughs\.yaml: .*alias(.|\n)*line \d") as caught:
        parse_questions(path)
    assert len(str(caught.value)) < 500


def test_aliases_of_a_yaml_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("- {question: Who, segments: &both [a, b]}\n- {question: Where, segments: *both}\n")
    first, second = (each for _, each in parse_questions(path))
    assert first.segments == second.segments
    assert [each.text for each in second.segments] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.yaml", TEST + 'n: !!int ""', r"q\.yaml: (.|\n)*int(.|\n)*line 4"),
        ("q.yaml", TEST + 'n: !!float ""', r"q\.yaml: (.|\n)*float(.|\n)*line 4"),
        ("q.yaml", TEST + "n: !!bool x", r"q\.yaml: (.|\n)*bool(.|\n)*line 4"),
        ("q.yaml", TEST + "n: !!timestamp x", r"q\.yaml: (.|\n)*timestamp(.|\n)*line 4"),
        ("q.yaml", TEST + "n: 2001-99-99", r"q\.yaml: (.|\n)*timestamp(.|\n)*line 4"),
        ("q.yaml", TEST + "n: &n [*n]", r"q\.yaml: (.|\n)*alias(.|\n)*line 4"),
        ("q.yaml", "[" * 2000, r"q\.yaml: .*nested"),
        ("q.yaml", f"tests:\n- file://{'a' * 5000}.json", r"aaa\.json: cannot be read"),
        ("q.csv", 'question,segments\nWho?,"[{[]: 1}]"\n', r"q\.csv, row 1: expected segments in a list"),
        ("q.csv", 'question,segments\nWho?,"[{{}}]"\n', r"q\.csv, row 1: expected segments in a list"),
        ("q.jsonl", "\n", r"q\.jsonl: expected at least one question, got none"),
    ],
)
def test_what_a_parser_does_not_expect_is_a_typed_error_that_names_the_place(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidQuestion, match=message):
        parse_questions(path)


def test_a_message_about_a_value_that_stands_for_many_is_made_at_once() -> None:
    value: Any = ["l"] * 10
    for _ in range(20):
        value = [value] * 10
    with pytest.raises(InvalidQuestion, match=r"expected gold .*, got list \[\[") as caught:
        parse_questions([{"question": "Who?", "segments": ["a"], "gold": value}])
    assert len(str(caught.value)) < 200
