"""What loaders promise: the cases of one question are the same segments in other places, and nothing is made up."""

import copy
import gzip
import json
import os
import random
import shutil
from collections import Counter, defaultdict
from itertools import pairwise, permutations

import pytest
from invariant_rag.errors import InvalidChoice, InvariantRAGError, TokenizerRequired, UnknownName

from invariant_rag_benchmarks import BENCHMARKS, Selection
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import DatasetUnavailable, InvalidDataset
from invariant_rag_benchmarks.published_tables import resolve_table

from .conftest import SMALL

# Their segments are lettered or numbered by place.
LETTERED = {"mmlu", "reward-bench", "llmbar"}


def by_question(cases):
    found = defaultdict(list)
    for case in cases:
        found[case.question].append(case)
    return found


def loaded(name, path, selection=None, **settings):
    """Load the cases of a benchmark from a file, without a tokenizer."""
    benchmark = BENCHMARKS[name]
    return benchmark.load(DataSource(path), benchmark.parse_settings(settings), selection or Selection())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_cases_of_a_question_are_the_same_segments_in_other_orders(name, load, lm):
    """Letters and numbers of responses follow the place; contents follow the order."""
    cases = load(name)
    assert len({case.id for case in cases}) == len(cases) > 0
    for case in cases:
        prompt = case.prompt(lm)
        assert tuple(segment.text for segment in prompt.segments) == case.segments
        assert case.suffix.strip() in prompt.suffix
        assert all(case.gold)
    for asked in by_question(cases).values():
        contents = set()
        for case in asked:
            texts = case.segments
            if name in LETTERED:
                letters = "".join(text.strip().partition("Assistant ")[2][:1] or text[0] for text in texts)
                assert letters == "ABCDE"[: len(letters)]
                texts = [text.replace("Assistant A", "").replace("Assistant B", "")[2:] for text in texts]
            contents.add(frozenset(Counter(texts).items()))
        assert len(contents) == 1
        assert name in LETTERED or len({(case.prefix, case.suffix, case.gold) for case in asked}) == 1


# --- each benchmark, by its small file in `conftest.py` ---


@pytest.mark.parametrize("file", ["nq-open-10_total_documents_gold_at_0.jsonl.gz", "nq-open-oracle.jsonl.gz"])
def test_the_gold_document_is_in_its_slot(file, files, load):
    documents = 10 if "10" in file else 4
    cases = load("lost-in-the-middle", path=files / file, documents=documents, slots="all")
    assert len(cases) == 4 * documents
    for case in cases:
        named = case.query.removeprefix("who is ")
        assert [place for place, text in enumerate(case.segments) if f"T{named}]" in text] == [int(case.variant)]


def test_documents_are_shown_as_the_papers_do_and_printed_prompts_are_taken_apart(files, load):
    shown = {each: load("lost-in-the-middle", template=each)[0] for each in ("paper", "one-sentence", "plain")}
    pine = shown["one-sentence"]
    assert (pine.prefix + "".join(pine.segments) + pine.suffix).startswith(
        "Write a high-quality one-sentence answer for the given question using only the provided search results "
        "(some of which might be irrelevant).\n\nDocument (Title: Tann) ann is here.\nDocument (Title: D0) noise 0\n"
    )
    assert pine.suffix == "\n\nQuestion: who is ann"
    assert shown["paper"].segments[0] == "\n[Document Title: Tann] ann is here."
    assert shown["plain"].segments[0] == "Document (Title: Tann): ann is here.\n"
    plain = BENCHMARKS["lost-in-the-middle"].parse_settings({"template": "plain"})
    (untitled,) = plain.cases("q", "Who?", ["a"], {"0": [("", "It is here.")]})
    assert untitled.segments == ("Document: It is here.\n",)
    numbered = load("lost-in-the-middle", index=True)[0].segments
    assert [text.startswith(f"\nDocument [{place}](Title: ") for place, text in enumerate(numbered, 1)] == [True] * 10
    cases = load("lost-in-the-middle", path=files / "printed.jsonl", documents=3, slots="all")
    assert [case.variant for case in cases] == ["0", "1", "2"]
    assert cases[0].gold == ("ann", "ANN"), "answers come from the oracle file"
    noise = ("\n[Document Title: D0] noise (with brackets)", "\n[Document Title: D1] more noise")
    assert cases[1].segments == (noise[0], "\n[Document Title: Tann] ann is here.", noise[1])


def test_pairs_are_asked_as_the_published_scripts_do(load, lm):
    cases = load("key-value", slots="0,5")
    asked = [f'"{case.query}": "{case.gold[0]}",\n ' for case in cases]
    assert [case.segments[int(case.variant)] for case in cases] == asked
    assert {case.query for case in cases} == {"key1", "key4"}
    slots = ("0", "34", "69", "104", "139")
    assert tuple(case.variant for case in load("key-value", keys=140, make=1)) == slots
    assert tuple(resolve_table("hidden-scaling-table-1").columns[-1].variants) == slots
    first = load("key-value", keys=3, file_keys=6)  # the first pairs of a longer file, after the asked one moved
    assert [len(case.segments) for case in first] == [3] * len(first)
    assert [text.split('"')[1] for text in first[-1].segments if first[-1].query not in text] == ["key0", "key1"]
    prompt = cases[0].prompt(lm)  # one user message
    whole = prompt.prefix + "".join(segment.text for segment in prompt.segments) + prompt.suffix
    text = whole[whole.index("Extract the value") : whole.index("Corresponding value:") + len("Corresponding value:")]
    user = [{"role": "user", "content": text}]
    assert whole == lm.tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)


def test_options_come_in_all_their_orders_and_the_letter_of_the_right_one_alone_scores(load):
    for case in load("mmlu"):
        scores = [BENCHMARKS["mmlu"].score(case, letter).scores["accuracy"] for letter in case.candidates]
        assert scores == [float(text == f"{text[0]}. {'wxyzwx'[int(case.question)]}\n") for text in case.segments]
    cases = by_question(load("mmlu"))["2"]
    assert [tuple(map(int, case.variant)) for case in cases] == list(permutations(range(4)))
    assert cases[0].segments == ("A. w\n", "B. x\n", "C. y\n", "D. z\n")
    assert cases[-1].segments == ("A. z\n", "B. y\n", "C. x\n", "D. w\n")
    assert [case.variant for case in load("mmlu", orders="0,23", questions=1)] == ["0123", "3210"]


def test_triples_are_cut_and_shuffled_by_seed_conditions_change_places_and_timelines_alone_are_kept(load):
    initial, *shuffles = by_question(load("mintaka"))["0"]
    assert initial.segments == tuple(f"(s{place}, r, {place})\n" for place in range(30))
    assert len({case.segments for case in shuffles}) == 3
    assert by_question(load("mintaka"))["1"][0].segments == ("(No information)",)
    assert load("mintaka", template="swapped")[0].system.startswith("Below are knowledge statements")
    problem, other = load("r-gsm")
    assert (problem.segments, other.segments) == (("She buys 4. ", "Bo gives 2. "), ("Bo gives 2. ", "She buys 4. "))
    assert (problem.prefix[-16:], problem.suffix) == ("Ann has 3 pens. ", "How many are there?")
    assert {case.gold for case in load("timeline")} == {("II", "I", "III"), ("II", "I")}, "both forms of the file"


def test_the_better_response_is_first_and_then_second(load):
    for cases in by_question(load("llmbar", subsets="Natural")).values():
        better = "yes" if "Say yes" in cases[0].prefix else "no"
        assert [(case.variant, case.gold) for case in cases] == [("gold first", ("A",)), ("gold second", ("B",))]
        assert all(f"\n{better}\n" in case.segments[place] for place, case in enumerate(cases))


def test_chunks_joined_are_the_context_or_its_ends_and_need_a_tokenizer(load, data_of):
    initial, backwards, flipped = load("two-wiki", chunk=7)
    assert "".join(initial.segments) == "abcdefghij" * 3
    assert backwards.segments == initial.segments[::-1]
    assert flipped.segments == (*initial.segments[2::-1], *initial.segments[:2:-1])
    assert "".join(load("two-wiki", chunk=7, limit=10)[0].segments) == "abcdefghij"
    (long,) = load("longbench", tasks="qasper", chunk=7, limit=20)
    assert (long.variant, long.segments) == ("initial", ("abcdefg", "hij", "abcdefg", "hij"))
    assert "".join(load("longbench", tasks="qasper", chunk=7, limit=7)[0].segments) == "abc" + "ghij"
    with pytest.raises(TokenizerRequired):
        loaded("two-wiki", data_of("two-wiki"))


def test_few_shot_tasks_are_continued_and_each_task_has_its_longest_output(load):
    cases = {case.group: case for case in load("longbench", tasks="multifieldqa_en,trec,samsum")}
    assert [(case.max_new_tokens, case.chat) for case in cases.values()] == [(64, True), (64, False), (128, False)]
    assert (cases["trec"].gold, cases["trec"].suffix) == (("Food", "Food", "Sport"), "\nQ: x")
    assert cases["multifieldqa_en"].suffix.endswith("Question: Who?\nAnswer:")


# --- samples, settings and files ---


def test_a_larger_limit_contains_every_smaller_one(load):
    ids = [{case.id for case in load("mmlu", questions=limit, orders="0,23")} for limit in range(1, 7)]
    assert all(few < more for few, more in pairwise(ids))


CONDITIONS = ["Ann has 3 pens.", "She buys 4.", "Bo gives 2.", "He takes 1."]
DRAWN = {
    "the sample": ("mmlu", 3, {"orders": "0"}),
    "distractors": ("lost-in-the-middle", None, {"documents": 3, "slots": "0"}),
    "pairs": ("key-value", None, {"keys": "3", "make": "3", "slots": "0"}),
    "orders of conditions": ("r-gsm", None, {}),
}


@pytest.mark.parametrize("what", DRAWN)
def test_the_seed_alone_decides_what_is_drawn_and_each_question_draws_for_itself(what, files, tmp_path):
    name, limit, settings = DRAWN[what]
    problem = {"question": f"{' '.join(CONDITIONS)} How many?", "interchangeable": CONDITIONS, "answer": 8}
    (tmp_path / "r_gsm.jsonl").write_text(2 * (json.dumps(problem) + "\n"))
    path = {"mmlu": files, "lost-in-the-middle": files / "nq-open-oracle.jsonl.gz"}.get(name, tmp_path)

    def drawn(seed):
        return loaded(name, path, Selection(limit, seed), **settings)

    first = drawn(0)
    assert any(drawn(seed) != first for seed in range(1, 4))
    random.seed(1)  # the global one has no say
    assert drawn(0) == first
    if name == "r-gsm":
        one, other = ({case.variant: case.segments for case in each} for each in by_question(first).values())
        written = tuple(f"{each} " for each in CONDITIONS)
        assert (one["initial"], one["reversed"]) == (other["initial"], other["reversed"]) == (written, written[::-1])
        assert len({*one.values()}) == 6
        assert one != other
    if name == "lost-in-the-middle":
        gold = sorted(case.segments[0] for case in first)
        places = [
            [[each for each in gold if each != case.segments[0]].index(each) for each in case.segments[1:]]
            for case in first
        ]
        assert len({*map(tuple, places)}) > 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lost-in-the-middle", {"slots": "10"}),
        ("lost-in-the-middle", {"template": "other"}),
        ("lost-in-the-middle", {"documents": 0}),
        *(("lost-in-the-middle", each) for each in ({"documents": "many"}, {"index": "maybe"}, {"documents": True})),
        ("lost-in-the-middle", {"docs": 3}),
        ("key-value", {"file_keys": 3}),
        *(("mmlu", {"orders": each}) for each in ("24", "")),
        ("mmlu", {"split": "train"}),
        ("mintaka", {"template": "other"}),
        ("llmbar", {"subsets": "Natural,Other"}),
        ("longbench", {"tasks": "qasper,vcsum"}),
    ],
)
def test_settings_without_meaning_are_refused_with_their_name_or_those_there_are(name, settings, load):
    with pytest.raises((InvalidChoice, UnknownName), match="|".join([*settings, "single-doc"])):
        load(name, **settings)


def test_settings_are_read_from_words():
    benchmark = BENCHMARKS["lost-in-the-middle"]
    assert benchmark.parse_settings({"documents": "30", "index": "yes"}) == benchmark.settings(documents=30, index=True)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_record_without_its_fields_is_named_and_what_is_not_there_is_asked_for(name, tmp_path, monkeypatch, lm):
    selection, broken = Selection(load_tokenizer=lambda: lm.tokenizer), tmp_path / "Natural.jsonl"
    broken.write_text('{"nothing": 1}\n')
    with pytest.raises(InvalidDataset, match=r"example 0|Natural 0|the file"):
        loaded(name, broken, selection)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("INVARIANT_RAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("INVARIANT_RAG_DATA", raising=False)
    with pytest.raises(DatasetUnavailable) as caught:
        loaded(name, None, selection)
    assert "--data" in str(caught.value) + caught.value.hint


def test_files_are_found_where_the_environment_says_and_in_the_tree_of_their_repository(files, tmp_path, monkeypatch):
    monkeypatch.setenv("INVARIANT_RAG_DATA", str(files))
    source, benchmark = DataSource(), BENCHMARKS["xquad"]
    assert benchmark.load(source, benchmark.parse_settings({}), Selection())
    assert [*source.digests] == ["xquad.en.json"]
    name, folder = "nq-open-10_total_documents_gold_at_0.jsonl.gz", tmp_path / "qa_data" / "10_total_documents"
    folder.mkdir(parents=True)
    shutil.copy(files / name, folder)
    places = (tmp_path / "qa_data", tmp_path, files / name)
    one, *others = [loaded("lost-in-the-middle", path, documents=10) for path in places]
    assert others == [one, one]


@pytest.mark.parametrize(
    ("name", "file", "settings"),
    [
        ("mmlu", "mmlu_validation.json", {"split": "test"}),
        ("mmlu", "my_test.json", {"split": "validation"}),
        ("mintaka", "mintaka_noshuffle_top30.json", {"triples": 50}),
        ("llmbar", "Natural.json", {"subsets": "Neighbor"}),
        ("longbench", "qasper.jsonl", {"tasks": "narrativeqa"}),
        *(("longbench", file, {"tasks": "single-doc"}) for file in ("qasper.jsonl", "mine.jsonl")),
    ],
)
def test_a_file_serves_its_own_settings_alone(name, file, settings, tmp_path):
    (tmp_path / file).write_text("[]")
    with pytest.raises(InvalidDataset, match=file):
        loaded(name, tmp_path / file, **settings)


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


# --- files with wrong values: every one is a typed error that names the file, or is read ---

VALUES = [None, 5, -1, True, "", "x", [], {}, [None], [[]], {"a": 1}, float("nan"), 10**400, "\ud800"]


def mutated(document, source):
    """The same document with one value replaced by another, or taken away."""
    changed = copy.deepcopy(document)
    places = []
    remaining = [changed]
    while remaining:
        each = remaining.pop()
        if isinstance(each, dict | list):
            places += [(each, key) for key in (each if isinstance(each, dict) else range(len(each)))]
            remaining += each.values() if isinstance(each, dict) else each
    if places:
        holder, key = source.choice(places)
        if source.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(source.choice(VALUES))
    return changed


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_value_of_another_type_is_refused_by_name(name, data_of, lm, tmp_path):
    benchmark, source = BENCHMARKS[name], random.Random(name)
    settings, selection = benchmark.parse_settings(SMALL.get(name, {})), Selection(None, 0, lambda: lm.tokenizer)
    original = DataSource(data_of(name))
    benchmark.load(original, settings, selection)
    file = original.path
    if file.is_dir():
        file = next(each for each in sorted(file.rglob("*")) if each.name in map(os.path.basename, original.digests))
    member = {"two-wiki": "2wikimqa_e.jsonl", "timeline": "longdep_qa.jsonl"}.get(name, "")
    examples, refused = read_examples(file, member), 0
    target = tmp_path / "data.json"
    if name == "llmbar":  # which has several files
        shutil.copytree(file.parent, tmp_path / name)
        target = tmp_path / name / file.name
    for _ in range(60):
        target.write_text(json.dumps(mutated(examples, source)))
        try:
            benchmark.load(DataSource(target.parent if name == "llmbar" else target), settings, selection)
        except InvariantRAGError as error:
            refused += isinstance(error, InvalidDataset)
    assert refused > 5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("torn.json.gz", gzip.compress(json.dumps({"a": "b" * 1000}).encode())[:-9]),
        ("flipped.json.gz", gzip.compress(b"b" * 1000)[:20] + b"\xff\xff"),
        ("none.zip", b"PK nothing"),
        ("deep.jsonl", b"[" * 100_000),
        ("digits.json", b"9" * 5000),
        ("latin.json", b'"caf\xe9"'),
        ("none.parquet", b"PAR1"),
    ],
)
def test_a_file_that_is_torn_or_none_is_refused_by_name_and_without_an_object_of_python(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidDataset, match=name) as caught:
        read_examples(tmp_path / name)
    assert "Error(" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "record", "settings"),
    [
        ("r-gsm", {"question": "A. B. How many?", "interchangeable": ["A.", "B."], "answer": "seven"}, {}),
        *(
            ("longbench", {"input": "Which?", "context": "text", "answers": answers}, {"tasks": "passage_count"})
            for answers in (["none of them"], [])
        ),
    ],
)
def test_a_gold_answer_that_cannot_be_compared_with_is_found_before_the_model_is_asked(
    name, record, settings, lm, tmp_path
):
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    with pytest.raises(InvalidDataset, match="none that"):
        loaded(name, tmp_path / "data.jsonl", Selection(load_tokenizer=lambda: lm.tokenizer), **settings)
