"""What loaders promise: the cases of one question are the same segments in other places, and nothing is made up."""

import copy
import gzip
import json
import random
import re
import shutil
from itertools import groupby, pairwise, permutations

import pytest
from invariant_rag.errors import InvalidChoice, InvariantRAGError, TokenizerRequired, UnknownName

from invariant_rag_benchmarks import BENCHMARKS, Selection
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import DatasetUnavailable, InvalidDataset
from invariant_rag_benchmarks.published_tables import resolve_table

from .conftest import ORACLE, SAMPLES

LOST = "lost-in-the-middle"
LETTERED = {"mmlu": 0, "reward-bench": 25, "llmbar": 25}  # where the letter of a segment is, which follows the place


def by_question(cases):
    return [[*each] for _, each in groupby(cases, lambda case: case.question)]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_cases_of_a_question_are_the_same_segments_in_other_orders_written_as_they_are(name, load, lm):
    cases, letter = load(name), LETTERED.get(name)
    assert len({case.id for case in cases}) == len(cases) > 0
    for case in cases:
        prompt = case.prompt(lm)
        assert tuple(segment.text for segment in prompt.segments) == case.segments
        text = case.prefix + "".join(case.segments) + case.suffix
        messages = [{"role": each, "content": said} for each, said in (("system", case.system), ("user", text)) if said]
        written = lm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert "".join([prompt.prefix, *case.segments, prompt.suffix]) == (written if case.chat else text)
        assert all(case.gold)
        assert letter is None or "".join(each[letter] for each in case.segments) == "ABCD"[: len(case.segments)]
    for asked in by_question(cases):
        contents = {tuple(sorted(re.sub(r"^.\.|Assistant .", "", each) for each in case.segments)) for case in asked}
        assert len(contents) == 1
        assert letter is not None or len({(case.prefix, case.suffix, case.gold) for case in asked}) == 1


PRINTED, KEPT = {"source": "printed.jsonl", "documents": 3, "slots": "all"}, {"keys": 3, "file_keys": 6}
PINE = "^Write a high-quality one-sentence answer for the given question using only the provided search results (so"
# What is in the first prompt with a variant: bars are around the segments, `^` is its beginning, `$` its end.
WRITTEN = [
    (LOST, {}, "0", "irrelevant).\n|\n[Document Title: Tann] ann is here.|\n[Document Title: D0] noise 0|"),
    (LOST, {"index": True}, "0", "|\nDocument [1](Title: Tann) ann is here.|\nDocument [2](Title: D0) noise 0|\n"),
    (LOST, {"index": True}, "9", "|\nDocument [10](Title: Tann) ann is here.|"),
    (LOST, {"template": "plain"}, "0", "^|Document (Title: Tann): ann is here.\n|Document (Title: D0): noise 0\n|"),
    (LOST, {"template": "one-sentence"}, "0", f"{PINE}me of which might be irrelevant).\n|\nDocument (Title: Tann) "),
    (LOST, {"template": "one-sentence"}, "9", "|\nDocument (Title: Tann) ann is here.|\n\nQuestion: who is ann$"),
    (LOST, PRINTED, "0", "|\n[Document Title: Tann] ann is here.|\n[Document Title: D0] noise (with brackets)|"),
    (LOST, PRINTED, "2", "|\n[Document Title: D1] more noise|\n[Document Title: Tann] ann is here.|\n"),
    ("key-value", {}, "0", '|"key1": "value1",\n |"key0": "value0",\n |"key2": "value2",\n |'),
    ("key-value", {}, "5", '|"key5": "value5",\n |"key1": "value1",\n |}\n\nKey: "key1"\nCorresponding value:$'),
    ("key-value", KEPT, "1", '{|"key0": "value0",\n |"key1": "value1",\n |"key2": "value2",\n |}'),
    ("mmlu", {}, "0123", " about some subject.\n\n\n\nWhat is 0?\n|A. w\n|B. x\n|C. y\n|D. z\n|Answer:$"),
    ("mmlu", {"orders": "23"}, "3210", "|A. z\n|B. y\n|C. x\n|D. w\n|Answer:$"),
    ("mintaka", {}, "initial", "^|(s0, r, 0)\n|(s1, r, 1)\n|"),
    ("mintaka", {}, "initial", "|(s29, r, 29)\n|\n\nQuestion: who?, Answer: $"),
    ("llmbar", {}, "gold second", "|\n[The Start of Assistant B's Answer]\nyes\n[The End of Assistant B's Answer]\n|$"),
    ("two-wiki", {"chunk": 7}, "initial", "|abcdefg|hijabcd|efghija|bcdefgh|ij|"),
    ("two-wiki", {"chunk": 7}, "reversed", "|ij|bcdefgh|efghija|hijabcd|abcdefg|"),
    ("two-wiki", {"chunk": 7}, "centre-flipped", "|efghija|hijabcd|abcdefg|ij|bcdefgh|"),
    ("two-wiki", {"chunk": 7, "limit": 10}, "initial", ".\n|abcdefg|hij|\n"),
    ("r-gsm", {}, "initial", "Ann has 3 pens. |She buys 4. |Bo gives 2. |How many are there?$"),
    ("r-gsm", {}, "reversed", "Ann has 3 pens. |Bo gives 2. |She buys 4. |How many are there?$"),
    ("longbench", {"chunk": 7, "limit": 20}, "initial", "|abcdefg|hij|abcdefg|hij|"),
    ("longbench", {"chunk": 7, "limit": 7}, "initial", "|abc|ghij|"),
    ("longbench", {"tasks": "multifieldqa_en"}, "initial", "Question: Who?\nAnswer:$"),
    ("longbench", {"tasks": "trec"}, "initial", "|abc|\nQ: x$"),
]


@pytest.mark.parametrize(("name", "settings", "variant", "expected"), WRITTEN)
def test_a_prompt_is_written_as_its_source_writes_it(name, settings, variant, expected, load):
    case = next(case for case in load(name, **settings) if case.variant == variant)
    assert expected in f"^{'|'.join([case.prefix, *case.segments, case.suffix])}$"


def test_a_question_has_the_variants_of_the_papers(load):
    assert {name: ", ".join(case.variant for case in by_question(load(name))[0]) for name in BENCHMARKS} == {
        "lost-in-the-middle": "0, 4, 9",
        "key-value": "0, 1, 2, 3, 5",
        "mmlu": ", ".join(map("".join, permutations("0123"))),
        "mintaka": "initial, shuffle 0, shuffle 1, shuffle 2",
        **dict.fromkeys(("reward-bench", "llmbar"), "gold first, gold second"),
        "two-wiki": "initial, reversed, centre-flipped",
        "xquad": "0, 1, 2, 3, 4",
        **dict.fromkeys(("r-gsm", "timeline"), "initial, reversed"),
        "longbench": "initial",
    }
    slots = ("0", "34", "69", "104", "139")
    assert tuple(case.variant for case in load("key-value", keys=140, make=1)) == slots
    assert tuple(resolve_table("hidden-scaling-table-1").columns[-1].variants) == slots


def test_what_else_is_in_a_case(load):
    """Gold answers and documents, system messages, longest outputs, and segments where there are none, or no titles."""
    assert {case.gold for case in load(LOST, source="printed.jsonl", documents=3)} == {("ann", "ANN")}, "of the oracle"
    for file, documents in (("nq-open-10_total_documents_gold_at_0.jsonl.gz", 10), ("nq-open-oracle.jsonl.gz", 4)):
        cases = load(LOST, source=file, documents=documents, slots="all")
        assert len(cases) == 4 * documents
        for case in cases:
            gold = f"T{case.query.removeprefix('who is ')}]"
            assert [place for place, text in enumerate(case.segments) if gold in text] == [int(case.variant)]
    plain = BENCHMARKS[LOST].parse_settings({"template": "plain"})
    assert next(plain.cases("q", "Who?", ["a"], {"0": [("", "Here.")]})).segments == ("Document: Here.\n",)
    assert {case.query for case in load("key-value")} == {"key1", "key4"}
    for case in load("key-value"):
        assert case.segments[int(case.variant)] == f'"{case.query}": "{case.gold[0]}",\n '
    assert BENCHMARKS["longbench"].parse_settings({}).tasks == "single-doc"
    for case in load("mmlu"):  # an option counts whatever its letter
        scored = [BENCHMARKS["mmlu"].score(case, letter) for letter in case.candidates]
        options = [re.fullmatch(r"[A-D]\. (.)\n", each)[1] for each in case.segments]
        right = [float(option == "wxyzwx"[int(case.question)]) for option in options]
        assert [each.scores for each in scored] == [{"accuracy": each} for each in right]
        assert [each.answer for each in scored] == [str("wxyz".index(option)) for option in options]
    (_, *shuffles), (nothing, *_) = by_question(load("mintaka"))
    assert len({case.segments for case in shuffles}) == 3
    assert nothing.segments == ("(No information)",)
    assert load("mintaka", template="swapped")[0].system.startswith("Below are knowledge statements")
    assert {case.gold for case in load("timeline")} == {("II", "I", "III"), ("II", "I")}, "both forms of the file"
    for first, second in by_question(load("llmbar", subsets="Natural")):
        better = "yes" if "Say yes" in first.prefix else "no"
        assert (first.gold, second.gold) == (("A",), ("B",))
        assert f"\n{better}\n" in first.segments[0]
        assert f"\n{better}\n" in second.segments[1]
    tasks = {case.group: case for case in load("longbench", tasks="multifieldqa_en,trec,samsum")}
    assert [(case.max_new_tokens, case.chat) for case in tasks.values()] == [(64, True), (64, False), (128, False)]
    assert tasks["trec"].gold == ("Food", "Food", "Sport")
    single = {case.group for case in load("longbench", tasks="single-doc")}
    assert single == {"qasper", "multifieldqa_en", "narrativeqa"}


def test_settings_are_read_from_words_a_limit_contains_every_smaller_one_and_chunks_need_a_tokenizer(load, files):
    benchmark, chunked = BENCHMARKS[LOST], BENCHMARKS["two-wiki"]
    assert benchmark.parse_settings({"documents": "30", "index": "yes"}) == benchmark.settings(documents=30, index=True)
    ids = [{case.id for case in load("mmlu", questions=limit, orders="0,23")} for limit in range(1, 7)]
    assert all(few < more for few, more in pairwise(ids))
    with pytest.raises(TokenizerRequired):
        chunked.load(DataSource(files), chunked.settings(), Selection())


CONDITIONS = ["Ann has 3 pens.", "She buys 4.", "Bo gives 2.", "He takes 1."]
PROBLEM = {"question": f"{' '.join(CONDITIONS)} How many?", "interchangeable": CONDITIONS, "answer": 8}
DRAWN = {  # what is drawn, and the records of which each is asked twice
    "the sample": ("mmlu", {"questions": 3, "orders": "0"}, ()),
    "distractors": (LOST, {"documents": 3, "slots": "0"}, ORACLE),
    "pairs": ("key-value", {"keys": "3", "make": "3", "slots": "0"}, ()),
    "orders of conditions": ("r-gsm", {}, [PROBLEM]),
}


@pytest.mark.parametrize(("name", "settings", "records"), DRAWN.values(), ids=DRAWN)
def test_the_seed_alone_decides_what_is_drawn_and_each_question_draws_alone(name, settings, records, load, tmp_path):
    if records:
        settings = {**settings, "source": tmp_path / "data.jsonl"}
        settings["source"].write_text(json.dumps([*records, *records]))
    first = load(name, **settings)
    assert any(load(name, seed=seed, **settings) != first for seed in range(1, 4))
    random.seed(1)  # the global one has no say
    assert load(name, **settings) == first
    drawn = [{case.variant: case.segments for case in each} for each in by_question(first)]
    assert not records or drawn[: len(records)] != drawn[len(records) :]
    if name == "r-gsm":
        assert [len({*each.values()}) for each in drawn] == [6, 6]
        written = tuple(f"{each} " for each in CONDITIONS)
        assert all((each["initial"], each["reversed"]) == (written, written[::-1]) for each in drawn)


MEANINGLESS = [
    *((LOST, each) for each in ({"slots": "10"}, {"template": "other"}, {"documents": 0}, {"documents": "many"})),
    *((LOST, each) for each in ({"documents": True}, {"index": "maybe"}, {"docs": 3})),
    ("key-value", {"file_keys": 3}),
    *(("mmlu", each) for each in ({"orders": "24"}, {"orders": ""}, {"split": "train"})),
    ("mintaka", {"template": "other"}),
    ("llmbar", {"subsets": "Natural,Other"}),
    ("longbench", {"tasks": "qasper,vcsum"}),
]


@pytest.mark.parametrize(("name", "settings"), MEANINGLESS)
def test_settings_without_meaning_are_refused_with_their_name_or_those_there_are(name, settings, load):
    with pytest.raises((InvalidChoice, UnknownName), match="|".join([*settings, "single-doc"])):
        load(name, **settings)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_record_without_its_fields_is_named_and_what_is_not_there_is_asked_for(name, load, tmp_path, monkeypatch):
    broken = tmp_path / "Natural.jsonl"
    broken.write_text('{"nothing": 1}\n')
    with pytest.raises(InvalidDataset, match=r"example 0|Natural 0|the file: "):
        load(name, source=broken)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("INVARIANT_RAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("INVARIANT_RAG_DATA", raising=False)
    with pytest.raises(DatasetUnavailable) as caught:
        load(name, source=None)
    assert "--data" in str(caught.value) + caught.value.hint


def test_files_are_found_where_the_environment_says_and_in_trees_and_archives(load, files, tmp_path, monkeypatch):
    monkeypatch.setenv("INVARIANT_RAG_DATA", str(files))
    source, benchmark = DataSource(), BENCHMARKS["xquad"]
    assert benchmark.load(source, benchmark.parse_settings({}), Selection())
    assert [*source.digests] == ["xquad.en.json"]
    name, folder = "nq-open-10_total_documents_gold_at_0.jsonl.gz", tmp_path / "qa_data" / "10_total_documents"
    folder.mkdir(parents=True)
    shutil.copy(files / name, folder)
    one, *others = [load(LOST, source=each) for each in (tmp_path / "qa_data", tmp_path, files / name)]
    assert others == [one, one]
    for zipped in ("two-wiki", "timeline", "longbench"):
        assert load(zipped, source="data.zip") == load(zipped)


def test_lists_named_lines_and_lines_named_lists_are_read_and_a_broken_line_is_named_by_its_number(tmp_path):
    """RoToR's `mmlu_validation_cache.jsonl` is a list over many lines."""
    records = [{"a": 1}, {"b": [2]}]
    (tmp_path / "list.jsonl").write_text(json.dumps(records, indent=4))
    (tmp_path / "lines.json").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "one.json").write_text(json.dumps(records[1], indent=4))
    found = [read_examples(tmp_path / name) for name in ("list.jsonl", "lines.json", "one.json")]
    assert found == [records, records, [records[1]]]
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n\n{"a": \n{"a": 2}\n')
    with pytest.raises(InvalidDataset, match="line 3: ") as caught:
        read_examples(tmp_path / "data.jsonl")
    assert "line 1" not in str(caught.value)


VALUES = [None, 5, -1, True, "", "x", [], {}, [None], [[]], {"a": 1}, float("nan"), 10**400, "\ud800"]


def places(document):
    """Yield where each value in a document is: in what, and at which key or index."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield document, key
            yield from places(value)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_value_of_another_type_or_none_is_refused_by_name(name, load, tmp_path):
    source, refused, file = random.Random(name), 0, tmp_path / "Natural.json"
    for _ in range(60):
        changed = copy.deepcopy(SAMPLES[name])
        holder, key = source.choice([*places(changed)])
        holder[key] = source.choice(VALUES)
        if source.random() < 0.2:
            del holder[key]
        file.write_text(json.dumps(changed))
        try:
            load(name, source=file)
        except InvalidDataset as error:
            refused += "Natural.json" in str(error)
        except InvariantRAGError:
            pass
    assert refused > 5


WORDS = {"question": "A. B. How many?", "interchangeable": ["A.", "B."], "answer": "seven"}
COUNTED = {"input": "Which?", "context": "text", "answers": ["none of them"]}
BROKEN = [
    # Of other settings.
    ("mmlu", {"split": "test"}, "mmlu_validation.json", b"[]"),
    ("mmlu", {"split": "validation"}, "my_test.json", b"[]"),
    ("mintaka", {"triples": 50}, "mintaka_noshuffle_top30.json", b"[]"),
    ("llmbar", {"subsets": "Neighbor"}, "Natural.json", b"[]"),
    ("longbench", {"tasks": "narrativeqa"}, "qasper.jsonl", b"[]"),
    *(("longbench", {"tasks": "single-doc"}, file, b"[]") for file in ("qasper.jsonl", "mine.jsonl")),
    # Torn, or none.
    ("mmlu", {}, "torn.json.gz", gzip.compress(json.dumps({"a": "b" * 1000}).encode())[:-9]),
    ("mmlu", {}, "flipped.json.gz", gzip.compress(b"b" * 1000)[:20] + b"\xff\xff"),
    ("mmlu", {}, "none.zip", b"PK nothing"),
    ("mmlu", {}, "deep.jsonl", b"[" * 100_000),
    ("mmlu", {}, "digits.json", b"9" * 5000),
    ("mmlu", {}, "latin.json", b'"caf\xe9"'),
    ("mmlu", {}, "none.parquet", b"PAR1"),
    # With a gold answer that nothing can be compared with, found before the model is asked.
    ("r-gsm", {}, "words.jsonl", json.dumps(WORDS).encode()),
    ("longbench", {"tasks": "passage_count"}, "counted.jsonl", json.dumps(COUNTED).encode()),
    ("longbench", {"tasks": "passage_count"}, "counted.jsonl", json.dumps({**COUNTED, "answers": []}).encode()),
]


@pytest.mark.parametrize(("name", "settings", "file", "content"), BROKEN, ids=lambda each: str(each)[:40])
def test_an_unusable_file_is_refused_by_name_and_not_in_words_of_python(name, settings, file, content, load, tmp_path):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InvalidDataset, match=file) as caught:
        load(name, source=tmp_path / file, **settings)
    assert "Error(" not in str(caught.value)
    assert ("none that" in str(caught.value)) == (b"How many" in content or b"Which" in content)
