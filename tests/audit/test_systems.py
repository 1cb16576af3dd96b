"""Claims about what is audited: questions, right answers, systems, orders of one prompt; the command and its files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from invariant_rag import RAG, Prompt, errors
from invariant_rag.audit import Endpoint, audit
from invariant_rag.audit.matching import contains_gold, is_refusal, is_right, normal_tokens
from invariant_rag.audit.order_check import check_order
from invariant_rag.audit.questions import Question, as_retrieve_function, parse_questions, read_questions
from invariant_rag.audit.run_folder import open_answers
from invariant_rag.audit.systems import as_reply, as_system
from invariant_rag.errors import AuditFailed, FieldWarning, FileInUse, InvalidQuestion, UnknownName, UnusableFile
from invariant_rag.files import LineFile
from invariant_rag.rag.retrieval import BM25Retriever
from invariant_rag.segments import Segment
from tests.audit.known import Pretended, records
from tests.cli.conftest import run
from tests.fuzz.conftest import full_disk
from tests.server.scripted import Answer, completion, refusal, scripted_api

ROOT = Path(__file__).parents[2]
FILES = tomllib.loads((Path(__file__).parent / "files.toml").read_text("utf-8"))
TEXTS = ["It was Ann.", "Nobody."]
EXPECTED = Question("Who?", tuple(map(Segment, TEXTS)), ("Ann",), (0,), id="0")
SCORE = f'{{"question": "q", "segments": [{{"text": "a", "score": {10**400}}}, "b"]}}'


def written(folder, name, content):
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder / name


def test_files_of_other_tools_are_read_what_a_system_said_is_no_gold_answer_and_what_takes_a_judge_is_said(tmp_path):
    for record in FILES["records"]:
        fields = json.loads(record)
        cells = ['"' + str(each).replace('"', '""') + '"' for each in fields.values()]  # lists as pandas writes them
        table = written(tmp_path, "q.csv", f"{','.join(fields)}\n{','.join(cells)}\n")
        for source in ([fields], written(tmp_path, "q.jsonl", record), *([table] if "target" not in fields else ())):
            assert read_questions(source, None) == [EXPECTED]
    for document in FILES["documents"]:
        assert read_questions(written(tmp_path, "q.yaml", document), None) == [EXPECTED]  # JSON is YAML, too
    (folder := tmp_path / "not here").mkdir()  # a file is looked for beside the file that names it
    written(folder, "more.csv", 'question,context,answer\nWhen?,"[""In May."", ""In June.""]",June\n')
    with pytest.warns(FieldWarning, match=r"not used: 'assert: latency', 'tone'"):
        first, second = read_questions(written(folder, "promptfooconfig.yaml", FILES["promptfoo"]), None)
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
    segments = (Segment("It was Ann.", "Page", score=0.5), Segment("Nobody.", score=0.25))
    full = replace(EXPECTED, segments=segments, answers=("Ann", "Anna"), id="7")
    lines = written(tmp_path, "q.jsonl", json.dumps(full.as_dict()) + "\n\n")
    header = "id,question,segment,title,score,gold,answer"
    rows = f"{header}\n7,Who?,It was Ann.,Page,0.5,1,Ann|Anna\n7,Who?,Nobody.,,0.25,0,\n"
    first = {"text": "It was Ann.", "title": "Page", "score": 0.5, "gold": True}
    mapping = {"id": 7, "question": "Who?", "answers": ["Ann", "Anna"], "segments": [first, full.segments[1]]}
    for source in (lines, written(tmp_path, "q.csv", rows), [mapping]):
        assert read_questions(source, None) == [full]
    assert [each.id for each in read_questions([mapping, mapping], None)] == ["7#0", "7#1"]
    tokens = replace(full, segments=(Segment(token_ids=(1, 2), score=0.5), Segment("b", metadata={"page": 3})))
    assert read_questions([json.loads(json.dumps(tokens.as_dict()))], None) == [tokens]
    odd = "page one\x0cpage\u2028two\x85"  # a cell holds any character but a line break
    (found,) = read_questions(written(tmp_path, "q.csv", f"question,segment\nWho?,{odd}\n"), None)
    assert found.segments[0].text == odd


def test_tables_are_read_in_any_encoding_and_case_of_names_and_so_are_those_of_spreadsheets(tmp_path):
    rows = "QUESTION; Segment ;score;gold;answer;Page\nWho?;It was Ann.;0,5;1;Ann;3\nWho?;Nobody.;0,25;;;\n"
    for encoding, delimiter in (("utf-8", ";"), ("utf-8-sig", "\t"), ("utf-16", ";"), ("utf-32", "\t")):
        table = written(tmp_path, "q.csv", rows.replace(";", delimiter).replace("\n", "\r\n").encode(encoding))
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
    with pytest.raises(errors.UnsupportedCombination):
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
        ("q.jsonl", b'{"question": "caf\xe9"}', r"q\.jsonl: cannot be read"),
        ("q.jsonl", SCORE, "line 1: score: expected a number other than nan, got a number of more than 20 digits"),
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


# --- systems ---

ASKED = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))


def said(system, **options):
    return as_system(system, **options).ask(ASKED, ASKED.segments).text


def test_a_callable_is_called_as_its_signature_says_and_a_function_of_something_else_is_refused():
    def of_texts(question: str, contexts: list[str]) -> str:
        return " ".join([question, *contexts])

    def of_text(question: str, context: str) -> str:
        return question + context

    def of_mapping(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"answer": inputs["question"] + inputs["context"][0], "sources": []}

    class OfSegments:
        def __call__(self, question: str, temperature: float = 0.0, segments: Any = ()) -> str:
            return f"{question} {segments[0].text}"

    for system in (
        *(of_texts, of_text, of_mapping, OfSegments()),
        lambda text: text,
        lambda inputs: inputs["question"] + inputs["context"][0],  # refuses a text
        lambda documents, question: f"{question} {documents[0].text}",
        lambda *, question, documents, **others: f"{question} {documents[0].text}",
    ):
        assert "Who?" in said(system)
        assert "It was Ann." in said(system)
    for system, message in ((lambda one, two, three: "x", r"got one of \['one', 'two', 'three'\]"), (3, "got int")):
        with pytest.raises(errors.UnsupportedCombination, match=message):
            as_system(system)


def test_an_answer_is_found_in_whatever_holds_one_and_what_holds_none_is_refused_by_its_keys():
    message = SimpleNamespace(content="Ann", usage_metadata={"total_tokens": 7})  # what a chat model returns
    blocks = {"content": [{"type": "text", "text": "A"}, {"type": "text", "text": "nn"}]}
    holders = ["Ann", message, {"answer": "Ann"}, {"output": message}, {"result": {"text": "Ann"}}]
    holders += [{"messages": [{"content": "Who?"}, message]}, blocks]
    assert {as_reply(value).text for value in holders} == {"Ann"}
    assert as_reply({"output": message}).tokens == 7
    for value, message in (({"docs": 3}, r"got a mapping with \['docs'\]"), ([], "got list"), (None, "got NoneType")):
        with pytest.raises(AuditFailed, match=message):
            as_reply(value)


def test_a_model_of_ours_is_tried_with_methods_and_a_rag_with_what_its_retriever_finds(model):
    plain = model.with_method("sequential")
    found = audit(plain, records(4, size=3), remedies=["sort", "rotor", "set-based"], generation={"max_new_tokens": 3})
    assert [each.fixes for each in found.comparisons] == [True] * 3
    invariant = audit(plain.with_method("rotor"), records(4, size=3), remedies=(), generation={"max_new_tokens": 3})
    assert not [each for each in invariant.asked if len({answer.text for answer in each.answers[3:]}) > 1]
    assert all(text in as_system(plain).sent(ASKED, ASKED.segments) for text in ("It was Ann.", "Who?"))
    rag = RAG(plain, BM25Retriever([Segment(text) for text in ("a mill", "a ferry", "a bridge")]), k=2)
    found = audit(rag, [{"question": "ferry", "answer": "ferry"}], generation={"max_new_tokens": 2})
    assert [len(each.question.segments) for each in found.asked] == [2]
    stop = (whole := said(plain, generation={"max_new_tokens": 6}))[2:4]
    assert said(plain, generation={"max_new_tokens": 6, "stop_strings": stop}) == whole[: whole.index(stop)]


def test_one_output_for_all_orders_is_a_promise_kept_several_break_it_and_the_plain_model_promises_nothing(model):
    prompt = Prompt("Documents: ", ["salt and copper ", "the river Senn ", "a mill in Brenn ", "noon "], "Where? ")
    steps = []
    told = nullcontext(lambda: steps.append(None))
    check = check_order(model, prompt, 6, progress=lambda label, total: told, max_new_tokens=8)
    assert (check.promised, check.identical, check.broken) == (True, True, False)
    assert [count for _, count in check.answers] == [7]
    assert check.plain_distinct >= len(check.plain_answers) > 1
    assert sum(count for _, count in check.plain_answers) == 7
    assert len(steps) == 14
    with pytest.raises(errors.InvalidPrompt, match="at least 1, got 0"):
        check_order(model, prompt, 0)
    # One token: the order changes its probability long before it changes the token.
    plain = model.with_method("sequential", ordering="given")
    first, again, other = (check_order(plain, prompt, 4, seed=seed, max_new_tokens=1) for seed in (1, 1, 2))
    assert (first.promised, first.identical, first.broken) == (False, False, False)
    assert first.answers == first.plain_answers
    assert first.distinct > len(first.answers)
    assert first == again != other
    two = check_order(plain, Prompt("Documents: ", ["x ", "yy "], "Where? "), 4, max_new_tokens=1)
    assert (two.distinct, two.answers) == (2, (("B", 5),))  # the same token, with another probability
    broken = check_order(model.with_method("rotor", ordering=Pretended()), prompt, 4, max_new_tokens=1)
    assert (broken.promised, broken.broken, broken.identical) == (True, True, False)


# --- the command, and servers ---


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    """A file to write in a folder to work in, with ten questions and with forty."""
    for count in (10, 40):
        (tmp_path / f"{count}.jsonl").write_text("\n".join(map(json.dumps, records(count))))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "answers.jsonl"


def test_a_run_writes_a_folder_is_resumed_and_fails_where_the_order_matters():
    system = ("--system", "tests.audit.known:first")
    part = run("audit", "10.jsonl", "--out", "out", *system, "--json")
    assert part.exit_code == 0, part.output
    assert json.loads(part.stdout)["screen"]["asked"] == 10
    again = run("audit", "10.jsonl", "--out", "out", *system)
    assert (again.exit_code, "--resume out" in again.stderr.replace("\n", "")) == (2, True)
    whole = run("audit", "--resume", "out", *system, "--fail-on", "order-matters")
    outcome = json.loads(Path("out/audit.json").read_text())["screen"]["outcome"]
    assert whole.exit_code == (outcome == "order matters"), whole.output
    assert len(whole.stdout.splitlines()) < 30  # one screen
    files = "answers.csv answers.jsonl answers.jsonl.lock audit.json report.html report.md run.json"
    assert sorted(each.name for each in Path("out").iterdir()) == files.split()
    assert run("audit", "40.jsonl", "--out", "matters", *system, "--fail-on", "order-matters").exit_code == 1
    stopped = run("audit", "10.jsonl", "--out", "stopped", "--system", "tests.audit.known:interrupted")
    assert "continue with --resume stopped" in stopped.stderr


def test_a_model_of_ours_is_audited_and_a_dry_run_says_what_it_costs():
    Path("q.csv").write_text("question,segment,answer\nWho?,Ann did.,Ann\nWho?,Bo did not.,\n")
    options = ("--method", "rotor", "--remedy", "sort", "--max-new-tokens", 2, "--json")
    found = run("audit", "q.csv", "--out", "out", *options)
    assert found.exit_code == 0, found.output
    assert "(rotor, Lexical()" in json.loads(found.stdout)["system"]
    assert json.loads(found.stdout)["toy"]
    for remedies, cost in (
        ((), "at most 5 calls"),
        (("--remedy", "sort"), "at most 5 calls"),
        (("--remedy", "vote", "--remedy", "sort"), "vote, sort, at most 12 calls a question"),
    ):
        assert cost in " ".join(run("audit", "q.csv", "--dry-run", *remedies).stdout.split())


@pytest.fixture
def api(monkeypatch):
    """A server that always says the same."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with scripted_api() as api:
        api.plan(Answer(body=completion("It is right3.")))
        yield api


def test_a_url_is_sent_the_documents_in_their_order_and_asked_again_when_it_is_busy_and_not_when_it_refuses(api):
    api.plan(Answer(429, refusal("busy"), {"Retry-After": "0.5"}), Answer(body=completion("It is right3.")))
    found = audit(api.url, records(8), remedies=())
    assert (found.system, found.measures["errors"].value) == (f"far at {api.url}", 0.0)
    assert found.as_dict()["tokens"] == 9 * 5 * 8
    assert max(answer.seconds for each in found.asked for answer in each.answers) > 0.5  # as the server wished
    assert len(api.bodies) == found.calls + 1
    assert (api.bodies[0]["model"], api.bodies[0]["temperature"]) == ("far", 0)
    assert api.headers[0]["authorization"] == "Bearer secret"
    sent = [each["messages"][0]["content"] for each in api.bodies]
    listed = [re.findall("Document: (.*)", each) for each in sent]
    for each in found.asked:
        assert [each.question.segments[place].text for place in each.orders[-1]] in listed
    assert dict(found.advice)["First call"] == sent[0]  # as every answer is the same
    api.plan(Answer(401, refusal("wrong key")))
    with pytest.raises(AuditFailed, match="401") as refused:
        audit(Endpoint(api.url, "other", {"temperature": 0, "seed": 3}), records(2))
    assert "the address (up to /v1), the key in OPENAI_API_KEY, and the model (--model)" in refused.value.hint
    assert [(each["model"], each["seed"]) for each in api.bodies] == [("other", 3)]


def test_the_command_takes_a_url_with_the_name_of_its_model_and_says_that_a_toy_answers(api):
    api.card = {"id": "mine", "toy": True}
    options = ("--remedy", "sort", "--system", api.url, "--model", "mine", "--workers", 4)
    found = run("audit", "10.jsonl", "--out", "out", *options)
    assert found.exit_code == 0, found.output
    assert {each["model"] for each in api.bodies} == {"mine"}
    assert "at most 50 calls" in found.stderr
    assert found.stderr.count("answered by the embedded toy model") == 1
    for report in (found.stdout, Path("out/report.md").read_text(), Path("out/report.html").read_text()):
        assert report.count("This audit was answered by the embedded toy model") == 1
    with pytest.warns(errors.ToyModelWarning, match="answered by the embedded toy model"):
        audit(api.url, records(2), remedies=())
    assert (Endpoint(api.url).toy, Endpoint(api.url, "other").toy) == (True, False)


# --- files of lines that are continued: one writer, whole lines, and nothing lost when the disk is full ---

ANSWER = {"key": "k", "text": "t", "tokens": None, "seconds": 0.5, "errors": []}
ODD = {"é \ud800": "\u2028\r\n"}
CHILD = """
import os, signal, sys
from pathlib import Path
from invariant_rag.audit.run_folder import open_answers
open_answers(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def lines(path):
    return LineFile(path, lambda line, _: line, errors.InvalidQuestion)


def test_a_second_process_is_refused_and_a_writer_that_was_killed_holds_no_lock(path):
    child = [sys.executable, "-c", CHILD, str(path.parent)]
    with lines(path) as file:
        file.append([ANSWER])
        assert b".FileInUse: " in subprocess.run(child, check=False, stderr=subprocess.PIPE).stderr
        with pytest.raises(FileInUse, match="is being written by another process"):
            lines(path)
    assert subprocess.run(child, check=False).returncode == -signal.SIGKILL
    with lines(path) as file:
        assert file.lines == [ANSWER]


def test_a_full_disk_and_a_torn_line_lose_nothing_and_tear_no_line(path):
    with lines(path) as file:
        file.append([ODD])
        with full_disk(path.stat().st_size + 10), pytest.raises(UnusableFile, match="cannot be written"):
            file.append(["x" * 100])
        file.append(["later"])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"torn')
    with lines(path) as file:
        assert file.lines == [ODD, "later"]
    assert path.read_bytes() == whole
    assert whole.decode().count("\n") == 2


@pytest.mark.parametrize("name", ANSWER)
def test_what_is_no_file_and_an_answer_with_a_value_of_another_type_are_refused(name, path):
    for kind, make in (("folder", Path.mkdir), ("named pipe", os.mkfifo)):
        make(other := path.with_name(kind))
        with pytest.raises(UnusableFile, match=f"expected a file, got a {kind}"):
            lines(other)
    allowed = {"tokens": [None, 5], "seconds": [5, 0.5], "errors": [[]]}.get(name, ["x", "\ud800"])
    odd = [None, 5, 0.5, True, "x", [], {}, [1], {"a": "b"}, "\ud800"]
    for each in odd:
        path.write_text(json.dumps({**ANSWER, name: each}) + "\n")
        fits = type(each) is not bool and each in allowed
        with nullcontext() if fits else pytest.raises(AuditFailed, match="line 1"):
            open_answers(path.parent).close()
    path.write_text(json.dumps({key: each for key, each in ANSWER.items() if key != name}) + "\n")
    with pytest.raises(AuditFailed, match="line 1"):
        open_answers(path.parent)
