"""Claims about question files of other tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from invariant_rag.errors import FieldWarning, InvalidQuestion, UnknownName
from invariant_rag.evaluation.audit import audit
from invariant_rag.evaluation.audit.questions import Question, parse_questions, read_questions
from invariant_rag.segments import Segment

ROOT = Path(__file__).parents[3]
EXPECTED = Question("Who?", (Segment("It was Ann."), Segment("Nobody.")), ("Ann",), (0,), id="0")


def test_the_questions_of_the_cookbook_are_read_with_all_of_their_fields() -> None:
    with pytest.warns(FieldWarning, match=r"questions\.jsonl: Not used, but kept with the questions: 'article'\.$"):
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
    with pytest.warns(FieldWarning, match="'tone'"):
        first, second = read_questions(tmp_path / "promptfooconfig.yaml", None)
    assert first == replace(EXPECTED, rubrics=("is polite",))
    assert first.extra["tone"] == "dry"
    assert (second.text, second.answers, second.gold) == ("When?", ("June",), (1,))
    (tmp_path / "tests.json").write_text(
        json.dumps([{"vars": {"query": "Who?", "context": ["It was Ann.", "Nobody."]}}])
    )
    assert read_questions(tmp_path / "tests.json", None)[0].segments == EXPECTED.segments


@pytest.mark.parametrize("streamed", [True, False])
def test_a_folder_of_a_saved_dataset_is_read(streamed: bool, tmp_path: Path) -> None:
    import pyarrow as pa
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
        ("q.csv", 'question,segment,score\n"a\nb",x,1\nc,y,high\n', "row 2: expected a number"),
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


COLUMNS: list[dict[str, Any]] = [
    {"question": ["Who?"], "contexts": [["It was Ann.", "Nobody."]], "ground_truth": ["Ann"], "answer": ["Bo"]},
    {"user_input": {"0": "Who?"}, "retrieved_contexts": {"0": ["It was Ann.", "Nobody."]}, "reference": {"0": "Ann"}},
    {"version": "1", "questions": [{"question": "Who?", "contexts": ["It was Ann.", "Nobody."], "expected": "Ann"}]},
]


@pytest.mark.parametrize("document", COLUMNS)
def test_columns_and_a_list_in_a_document_are_read(document: dict[str, Any], tmp_path: Path) -> None:
    assert read_questions(document, None) == [EXPECTED]
    for name in ("q.json", "q.jsonl", "q.yaml"):  # a document of JSON is one of YAML
        (tmp_path / name).write_text(json.dumps(document))
        assert read_questions(tmp_path / name, None) == [EXPECTED]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidQuestion, match=r"expected columns of 2 rows each, as ragas .* 'contexts' has others"):
        read_questions({"question": ["a", "b"], "contexts": [["x"]]}, None)


ROWS = "question;segment;score;gold;answer\nWho?;It was Ann.;0,5;1;Ann\nWho?;Nobody.;0,25;;\n"


@pytest.mark.parametrize("separator", [";", ",", "\t"])
@pytest.mark.parametrize("names", ["Question|Context 1|Context 2|Answer", "QUESTION| segment_1|Segment_2 |Reference"])
def test_a_table_with_a_column_per_document_is_read_whatever_the_case_of_its_names(
    names: str, separator: str, tmp_path: Path
) -> None:
    path = tmp_path / "q.csv"
    path.write_text(f"{names}|Page\nWho?|It was Ann.|Nobody.|Ann|3\nWhen?|In May.||May|4\n".replace("|", separator))
    with pytest.warns(FieldWarning, match="'Page'"):
        one, other = read_questions(path, None)
    assert one == EXPECTED
    assert (other.segments, other.answers, other.extra) == ((Segment("In May."),), ("May",), {"Page": "4"})


def test_the_columns_of_a_table_without_questions_are_named_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text("Frage;Kontext;Antwort\na;b;c\n")
    with pytest.raises(InvalidQuestion, match=r"with question; got \['Frage', 'Kontext', 'Antwort'\]"):
        read_questions(path, None)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.csv", "gone"])
def test_a_missing_file_is_said_to_be_missing_and_nothing_else(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidQuestion) as refused:
        read_questions(tmp_path / name, None)
    assert str(refused.value) == f"no such file: {tmp_path / name}"
    assert refused.value.hint == ""


def test_questions_that_were_read_are_named_by_their_lines_and_not_warned_of_again(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('\n{"question": "Who?", "segmnets": ["a"], "answers": ["the"]}\n')
    with pytest.warns(FieldWarning):
        asked = [question for _, question in parse_questions(path)]
    with pytest.raises(InvalidQuestion, match=r"q\.jsonl, line 2: no segments"):  # a warning would be an error here
        read_questions(asked, None)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_what_spreadsheets_write_is_read(encoding: str, delimiter: str, tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_bytes(ROWS.replace(";", delimiter).replace("\n", "\r\n").encode(encoding))
    (found,) = read_questions(tmp_path / "q.csv", None)
    assert found.answers == EXPECTED.answers
    assert [each.score for each in found.segments] == [0.5, 0.25]
    lines = tmp_path / "q.jsonl"
    lines.write_bytes('{"question": "Wer?", "segments": ["Ä", "b"]}'.encode(encoding))
    assert read_questions(lines, None)[0].segments[0].text == "Ä"


def test_a_text_as_context_of_promptfoo_is_refused_with_what_to_do_and_a_list_in_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tests.yaml"
    path.write_text("tests: [{vars: {question: \"Who?\", context: 'It was Ann. Nobody.'}}]")
    with pytest.raises(InvalidQuestion, match="test 1: expected segments in a list, got one text") as refused:
        read_questions(path, None)
    assert "context: [first, second]" in refused.value.hint
    path.write_text("""tests: [{vars: {question: "Who?", context: '["It was Ann.", "Nobody."]', expected: Ann}}]""")
    assert read_questions(path, None) == [EXPECTED]


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("q.CSV", "text\nx\n", "A table has a row per segment"),
        ("q.jsonl", '{"question": "a", "segments": [3]}', "A line of a .jsonl file"),
        ("q.jsonl", '{\n"question": "a"}', "name it .json"),
        ("q.csv", b"question,segment\ncaf\xe9,b\n", "Save it as UTF-8"),
        ("q.json", '[{"question": "a"}]', "a retriever, or documents"),
    ],
)
def test_the_hint_is_about_what_is_wrong(name: str, content: str | bytes, hint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InvalidQuestion) as refused:
        read_questions(tmp_path / name, None)
    assert hint in refused.value.hint


@pytest.mark.parametrize("name", ["q.xlsx", "q.parquet", "q.tsv"])
def test_tables_of_spreadsheets_and_data_frames_are_read(name: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip({"q.xlsx": "openpyxl", "q.parquet": "pyarrow"}.get(name, "pandas"))
    rows = {"Question": ["Who?", "Who?"], "segment": ["It was Ann.", "Nobody."], "answer": ["Ann", ""], "gold": [1, 0]}
    table, path = pandas.DataFrame(rows), tmp_path / name
    if name == "q.xlsx":
        table.to_excel(path, index=False)
    elif name == "q.parquet":
        table.to_parquet(path)
    else:
        table.to_csv(path, sep="\t", index=False)
    assert read_questions(path, None) == [EXPECTED]


def test_a_field_map_names_the_fields_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"frage": "Who?", "texte": ["It was Ann.", "Nobody."], "loesung": "Ann"}\n')
    fields = {"question": "frage", "segments": "texte", "answers": "loesung"}
    assert read_questions(path, None, fields) == [EXPECTED]
    with pytest.raises(InvalidQuestion, match="expected 'prompt' for question"):
        read_questions(path, None, {"question": "prompt"})
    with pytest.raises(UnknownName, match="unknown field 'qestion'"):
        read_questions(path, None, {"qestion": "frage"})


@pytest.mark.parametrize(
    "record",
    [
        {
            "input": "Who?",
            "retrieval_context": ["It was Ann.", "Nobody."],
            "expected_output": "Ann",
            "actual_output": "x",
        },
        {"input": "Who?", "target": "Ann", "metadata": {"contexts": ["It was Ann.", "Nobody."]}},
        {"input": [{"role": "user", "content": "Who?"}], "target": ["Ann"], "documents": ["It was Ann.", "Nobody."]},
    ],
)
def test_cases_of_deepeval_and_samples_of_inspect_are_read(record: Any) -> None:
    assert read_questions([record], None) == [EXPECTED]


def test_checks_of_promptfoo_that_take_a_judge_are_rubrics_and_others_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tests.json"
    checks = [{"type": "similar", "value": "Ann"}, {"type": "llm-rubric", "value": "is polite"}, {"type": "latency"}]
    path.write_text(json.dumps([{"vars": {"question": "Who?", "context": ["a", "b"]}, "assert": checks}]))
    with pytest.warns(FieldWarning, match="'unread_checks'"):
        (found,) = read_questions(path, None)
    assert found.rubrics == ("It means the same as: Ann", "is polite")
    assert found.extra["unread_checks"] == ["latency"]
    with pytest.warns(
        FieldWarning, match="1 question with checks that take a judge .* neither right nor wrong"
    ) as caught:
        assert "without --judge" in dict(audit(lambda question, segments: "Ann", [found]).advice)["To know"]
    assert "--judge" in caught[0].message.hint


def test_misspelt_fields_are_named_once_with_what_was_meant(tmp_path: Path) -> None:
    asked = [{"question": "Who?", "segmnets": ["a"], "anwsers": ["Ann"], "page": 3} for _ in range(3)]
    path = tmp_path / "q.json"
    path.write_text(json.dumps(asked))
    with pytest.warns(FieldWarning) as caught:
        read_questions(path, lambda question: ["a", "b"])
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "'anwsers' is no field of a question: did you mean 'answers'?" in message
    assert "'segmnets' is no field of a question: did you mean 'segments'?" in message
    assert message.endswith("with the questions: 'page'.")
    with pytest.warns(FieldWarning) as caught:  # who builds records knows what else is in them
        read_questions(asked, lambda question: ["a", "b"])
    assert "page" not in str(caught[0].message)
    with pytest.raises(InvalidQuestion, match="did you mean 'question'"):
        read_questions([{"qestion": "Who?"}], None)


def test_fields_near_to_given_ones_and_fields_of_other_tools_are_not_misspelt() -> None:
    read_questions([{"question": "q", "question_id": 3, "segments": ["a", "b"], "response": "x"}], None)
