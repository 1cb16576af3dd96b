"""Claims about where questions come from, what is refused, and which answers are right: whole tokens, by value."""

import json
import re
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from invariant_rag.audit import audit
from invariant_rag.audit.matching import contains_gold, is_refusal, is_right, normal_tokens
from invariant_rag.audit.questions import Question, as_retrieve_function, parse_questions, read_questions
from invariant_rag.errors import FieldWarning, InvalidQuestion, UnknownName, UnsupportedCombination
from invariant_rag.rag.retrieval import BM25Retriever
from invariant_rag.segments import Segment

ROOT = Path(__file__).parents[2]
FILES = tomllib.loads((Path(__file__).parent / "files.toml").read_text("utf-8"))
TEXTS = ["It was Ann.", "Nobody."]
EXPECTED = Question("Who?", tuple(map(Segment, TEXTS)), ("Ann",), (0,), id="0")
FULL = Question(
    "Who?", (Segment("It was Ann.", "Page", score=0.5), Segment("Nobody.", score=0.25)), ("Ann", "Anna"), (0,), id="7"
)


def written(folder, name, content):
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder / name


@pytest.mark.parametrize("record", FILES["records"])
def test_records_of_other_tools_are_read_and_what_a_system_said_is_no_gold_answer(record, tmp_path):
    fields = json.loads(record)
    cells = ['"' + str(each).replace('"', '""') + '"' for each in fields.values()]  # lists as pandas writes them
    table = written(tmp_path, "q.csv", f"{','.join(fields)}\n{','.join(cells)}\n")
    for source in ([fields], written(tmp_path, "q.jsonl", record), *([table] if "target" not in fields else ())):
        assert read_questions(source, None) == [EXPECTED]


def test_documents_are_read_with_columns_lists_and_aliases_and_what_takes_a_judge_is_said(tmp_path):
    for document in FILES["documents"]:
        assert read_questions(written(tmp_path, "q.yaml", document), None) == [EXPECTED]  # JSON is YAML, too
    written(tmp_path, "more.csv", 'question,context,answer\nWhen?,"[""In May."", ""In June.""]",June\n')
    with pytest.warns(FieldWarning, match=r"not used: 'assert: latency', 'tone'"):
        first, second = read_questions(written(tmp_path, "promptfooconfig.yaml", FILES["promptfoo"]), None)
    assert first == replace(EXPECTED, rubrics=("is polite", "It means the same as: Ann"))
    assert (second.text, second.answers, second.gold) == ("When?", ("June",), (1,))
    ungraded = [replace(first, answers=())]
    with pytest.warns(FieldWarning, match="1 question with checks that take a judge .* 1 of them") as caught:
        advice = dict(audit(lambda question, segments: "Ann", ungraded).advice)
    assert "without --judge" in advice["To know"]
    assert "--judge" in caught[0].message.hint
    judged = audit(lambda question, segments: "Ann", ungraded, judge=lambda prompt: "yes")
    assert judged.measures["accuracy_today"].value == 1.0


def test_a_jsonl_a_csv_and_mappings_say_the_same(tmp_path):
    lines = written(tmp_path, "q.jsonl", json.dumps(FULL.as_dict()) + "\n\n")
    header = "id,question,segment,title,score,gold,answer"
    rows = f"{header}\n7,Who?,It was Ann.,Page,0.5,1,Ann|Anna\n7,Who?,Nobody.,,0.25,0,\n"
    first = {"text": "It was Ann.", "title": "Page", "score": 0.5, "gold": True}
    mapping = {"id": 7, "question": "Who?", "answers": ["Ann", "Anna"], "segments": [first, FULL.segments[1]]}
    for source in (lines, written(tmp_path, "q.csv", rows), [mapping]):
        assert read_questions(source, None) == [FULL]
    assert [each.id for each in read_questions([mapping, mapping], None)] == ["7#0", "7#1"]
    tokens = replace(FULL, segments=(Segment(token_ids=(1, 2), score=0.5), Segment("b", metadata={"page": 3})))
    assert read_questions([json.loads(json.dumps(tokens.as_dict()))], None) == [tokens]
    odd = "page one\x0cpage\u2028two\x85"  # a cell holds any character but a line break
    (found,) = read_questions(written(tmp_path, "q.csv", f"question,segment\nWho?,{odd}\n"), None)
    assert found.segments[0].text == odd


ROWS = "QUESTION; Segment ;score;gold;answer;Page\nWho?;It was Ann.;0,5;1;Ann;3\nWho?;Nobody.;0,25;;;\n"


def test_tables_are_read_in_any_encoding_and_case_of_names_and_so_are_those_of_spreadsheets(tmp_path):
    for encoding, delimiter in (("utf-8", ";"), ("utf-8-sig", "\t"), ("utf-16", ";"), ("utf-32", "\t")):
        table = written(tmp_path, "q.csv", ROWS.replace(";", delimiter).replace("\n", "\r\n").encode(encoding))
        with pytest.warns(FieldWarning, match="'Page'"):
            (found,) = read_questions(table, None)
        assert (found.answers, [each.score for each in found.segments]) == (EXPECTED.answers, [0.5, 0.25])
        lines = written(tmp_path, "q.jsonl", '{"question": "Wer?", "segments": ["Ä", "b"]}'.encode(encoding))
        assert read_questions(lines, None)[0].segments[0].text == "Ä"
    frame = pd.DataFrame({"Question": ["Who?", "Who?"], "segment": TEXTS, "answer": ["Ann", ""], "gold": [1, 0]})
    frame.to_excel(tmp_path / "q.xlsx", index=False)
    frame.to_parquet(tmp_path / "q.parquet", index=False)
    frame.to_csv(tmp_path / "q.tsv", index=False, sep="\t")
    for name in ("q.xlsx", "q.parquet", "q.tsv"):
        assert read_questions(tmp_path / name, None) == [EXPECTED]


def test_reference_contexts_and_segments_that_hold_an_answer_are_gold_unless_all_do_also_those_of_a_retriever():
    def gold(answer, *segments, **more):
        return read_questions([{"question": "q", "answer": answer, "segments": segments, **more}], None)[0].gold

    assert gold("x", "a", "b", reference_contexts=["b"]) == (1,)
    assert gold("Ann", "none", "the ANN!", "ann") == (1, 2)
    assert gold("Ann", "Ann", "Ann too") == gold("Ann", "nobody") == ()
    assert gold(42, "42", "x") == (0,)
    numbers = [{"question": "q", "answers": answers, "segments": ["a"]} for answers in (42, [4.5, "x"])]
    assert [each.answers for each in read_questions(numbers, None)] == [("42",), ("4.5", "x")]
    bm25 = BM25Retriever([Segment("a mill"), Segment("a ferry"), Segment("a bridge")])
    for retriever in (bm25, lambda text: [f"a {text}", "b"]):
        (question,) = read_questions([{"question": "ferry", "answer": "ferry"}], as_retrieve_function(retriever, 2))
        assert (question.segments[0].text, len(question.segments), question.gold) == ("a ferry", 2, (0,))
    with pytest.raises(UnsupportedCombination):
        as_retrieve_function(3, 2)


def test_a_field_map_names_the_fields_of_a_file_and_what_means_nothing_is_named_once(tmp_path):
    path = written(tmp_path, "q.csv", "Frage;Text;Loesung\nWho?;It was Ann.;Ann\nWho?;Nobody.;\n")
    assert read_questions(path, None, {"question": "Frage", "segment": "Text", "answer": "Loesung"}) == [EXPECTED]
    with pytest.raises(InvalidQuestion, match="expected 'prompt' for question"):
        read_questions(path, None, {"question": "prompt"})
    with pytest.raises(UnknownName, match="unknown field 'qestion'"):
        read_questions(path, None, {"qestion": "Frage"})
    odd = [{"question": "Who?", "segmnets": ["a"], "anwsers": ["Ann"], "page": 3}] * 3
    with pytest.warns(FieldWarning) as caught:
        parsed = parse_questions(path := written(tmp_path, "q.json", json.dumps(odd)))
    meant = "'anwsers' (did you mean 'answers'?), 'page', 'segmnets' (did you mean 'segments'?)."
    assert [str(each.message) for each in caught] == [f"{path}: No field of a question, and not used: {meant}"]
    with pytest.raises(InvalidQuestion, match=r"'Who\?': no segments"):  # a warning would be an error here
        read_questions(parsed, None)
    with pytest.warns(FieldWarning, match=r"questions\.jsonl: No field of a question, and not used: 'article'\.$"):
        questions = read_questions(ROOT / "cookbook" / "data" / "questions.jsonl", lambda question: ["a", "b"])
    assert (len(questions), questions[0].answers) == (42, ("orange and black",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *FILES["wrong"],
        ("q.csv", b"question,segment\ncaf\xe9,b\n", "Save it as UTF-8"),
        ("q.csv", "," * 5_000, "expected at least one question"),
        ("q.csv", f"question,segment,gold\na,b,{'1' * 5000}\n", "1 or 0"),
        ("q.yaml", "[" * 2000 + "]" * 2000, r"q\.yaml: .*nested"),
        ("q.yaml", f"tests:\n- file://{'a' * 5000}.json", r"aaa\.json: cannot be read"),
        *(("q.yaml", FILES["laughs"] + f"  {use}\n", r"alias(.|\n)*line \d") for use in FILES["laughs_in"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place(name, content, message, tmp_path):
    with pytest.raises(InvalidQuestion) as caught:
        read_questions(written(tmp_path, name, content), None)
    assert re.search(message, f"{caught.value} {caught.value.hint}")
    assert len(str(caught.value)) < 5000


def test_a_missing_file_is_said_to_be_missing_and_what_is_long_gives_a_short_message(tmp_path):
    for name in ("gone.jsonl", "gone.csv", "gone"):
        with pytest.raises(InvalidQuestion) as refused:
            read_questions(tmp_path / name, None)
        assert (str(refused.value), refused.value.hint) == (f"no such file: {tmp_path / name}", "")
    value = "l"
    for _ in range(21):
        value = [value] * 10
    records, long = [{"question": "Who?", "segments": ["a"], "gold": value}], f"{'d' * 200}/{'e' * 9000}.csv"
    for source, most, said in (
        (tmp_path, 5000, r"expected a file of \.jsonl"),
        (tmp_path / long, 5000, "."),
        (records, 200, r"expected gold .*, got list \[\["),
    ):
        with pytest.raises(InvalidQuestion, match=said) as refused:
            parse_questions(source)
        assert len(str(refused.value)) < most


# --- right answers ---

SCORED = [line.split("\t") for line in (Path(__file__).parent / "scores.tsv").read_text("utf-8").splitlines()[1:]]
"""Verdict, gold answer and answer: numbers, dates, units, yes and no, refusals, denials, spellings."""


def test_what_only_looks_right_is_wrong_and_what_is_right_is_right_however_it_is_written():
    assert min(Counter(verdict for verdict, _, _ in SCORED).values()) > 100
    assert [row for row in SCORED if is_right(row[2], [row[1]]) is not (row[0] == "right")] == []
    right = [(gold, answer) for verdict, gold, answer in SCORED if verdict == "right"]
    assert all(is_right(answer, ["something else entirely", gold]) for gold, answer in right)
    assert not any(is_right("I do not know.", [gold]) for gold in ("no", "yes", "No.", "TRUE"))


def test_gold_documents_are_found_by_whole_tokens_also_of_long_numbers_and_never_by_yes_or_no():
    assert contains_gold("It was built in the year 12.", ["12"])
    assert not contains_gold("It was built in 1912.", ["12"])
    assert not contains_gold("There is no bridge here.", ["no"])
    said = ("No.", "He was unable to walk.", "There is not enough information in the documents.")
    assert [is_refusal(each) for each in said] == [False, False, True]
    assert normal_tokens("On May 3rd, 1999 U.S. forces") == normal_tokens("on 3 may 1999 us forces")
    assert normal_tokens("one, two; three") == ("1", "2", "3")
    assert normal_tokens("9" * 5000) == (f"n{'9' * 5000}",)  # of more digits than Python turns into a number
    assert is_right("9" * 5000, ["9" * 5000])
