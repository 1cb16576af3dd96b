"""Claims about question files of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from invariant_rag.errors import InvalidQuestion
from invariant_rag.evaluation.audit.questions import Question, read_questions
from invariant_rag.segments import Segment

ROOT = Path(__file__).parents[3]
EXPECTED = Question("Who?", (Segment("It was Ann."), Segment("Nobody.")), ("Ann",), (0,), id="0")


def test_the_questions_of_the_cookbook_are_read_with_all_of_their_fields() -> None:
    questions = read_questions(ROOT / "cookbook" / "data" / "questions.jsonl", lambda question: ["a", "b"])
    assert len(questions) == 42
    assert questions[0].answers == ("orange and black",)
    assert questions[0].extra == {"article": "gesthaven.txt"}


RAGAS: list[dict[str, Any]] = [
    {"user_input": "Who?", "retrieved_contexts": ["It was Ann.", "Nobody."], "reference": "Ann", "response": "Bo"},
    {"question": "Who?", "contexts": ["It was Ann.", "Nobody."], "ground_truth": "Ann", "answer": "Bo"},
    {"question": "Who?", "contexts": ["It was Ann.", "Nobody."], "ground_truths": ["Ann"], "answer": "Bo"},
]


@pytest.mark.parametrize("record", RAGAS)
def test_ragas_samples_are_read_and_what_a_system_said_is_no_gold_answer(record: Any, tmp_path: Path) -> None:
    assert read_questions([record], None) == [EXPECTED]
    lines = tmp_path / "ragas.jsonl"
    lines.write_text(json.dumps(record))
    assert read_questions(lines, None) == [EXPECTED]
    assert "Bo" in read_questions(lines, None)[0].extra.values()
    table = tmp_path / "ragas.csv"  # as pandas writes lists: the texts of Python
    cells = [str(each).replace('"', '""') for each in record.values()]
    table.write_text(f"{','.join(record)}\n" + ",".join(f'"{cell}"' for cell in cells) + "\n")
    assert read_questions(table, None) == [EXPECTED]


def test_reference_contexts_of_ragas_are_gold() -> None:
    record = {
        "user_input": "Who?",
        "retrieved_contexts": ["a", "b", "c"],
        "reference_contexts": ["b"],
        "reference": "x",
    }
    assert read_questions([record], None)[0].gold == (1,)


PROMPTFOO = """
description: Who did it
defaultTest:
  vars: {tone: dry}
tests:
  - description: the first
    vars:
      question: Who?
      context: [It was Ann., Nobody.]
    assert:
      - {type: icontains, value: Ann}
      - {type: llm-rubric, value: is polite}
  - file://more.csv
"""


def test_tests_of_promptfoo_are_read(tmp_path: Path) -> None:
    (tmp_path / "promptfooconfig.yaml").write_text(PROMPTFOO)
    (tmp_path / "more.csv").write_text('question,context,answer\nWhen?,"[""In May."", ""In June.""]",June\n')
    first, second = read_questions(tmp_path / "promptfooconfig.yaml", None)
    assert first == EXPECTED
    assert first.extra["tone"] == "dry"
    assert (second.text, second.answers, second.gold) == ("When?", ("June",), (1,))
    (tmp_path / "tests.json").write_text(
        json.dumps([{"vars": {"query": "Who?", "context": ["It was Ann.", "Nobody."]}}])
    )
    assert read_questions(tmp_path / "tests.json", None)[0].segments == EXPECTED.segments


@pytest.mark.parametrize("streamed", [True, False])
def test_a_folder_of_a_saved_dataset_is_read(streamed: bool, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = pa.Table.from_pylist(
        [{"question": "Who?", "context": ["It was Ann.", "Nobody."], "answers": {"text": ["Ann"], "answer_start": [7]}}]
    )
    if streamed:  # as `save_to_disk` of datasets does
        (tmp_path / "train").mkdir()
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
        with ipc.new_stream(str(tmp_path / "train" / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
    else:
        parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    assert read_questions(tmp_path, None) == [EXPECTED]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "q.jsonl",
            '{"question": "a", "segments": ["x"]}\n\n{"question": "b", "segments": ["x"], "gold": [4]}',
            "line 3",
        ),
        ("q.csv", 'question,segment,score\n"a\nb",x,1\nc,y,high\n', "line 4: expected a number"),
        ("q.csv", "question,segment,gold\na,x,1\nb,y\n", "line 3: expected 3 fields"),
        ("q.yaml", "tests: [3]", "test 1: expected a mapping"),
        ("q.yaml", "tests: [", "cannot be parsed"),
        ("q.json", '[{"vars": {"context": "x"}}]', "test 1: expected a mapping with keys"),
        ("q.jsonl", '{"question": "a", "segments": [{"text": "x", "metadata": 3}]}', "line 1: metadata"),
        ("q.jsonl", '{"question": "a", "segments": [{"text": "x", "score": "high"}]}', "line 1: score"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InvalidQuestion, match=message):
        read_questions(path, None)


def test_an_empty_folder_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(InvalidQuestion, match=r"expected a folder with \.arrow"):
        read_questions(tmp_path, None)
