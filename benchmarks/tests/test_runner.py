"""Outputs scored by hand, and by the benchmarks; and figures of runs that are known beforehand.

Of a run, every case is asked once, nothing is lost or overwritten, and however often it was interrupted, its records
are the same.
"""

import json
import math
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariant_rag import InvariantModel, Prompt
from invariant_rag.audit.statistics import exact_upper_bound, wilson_interval
from invariant_rag.ensembles import PermutationAverage, RingAverage, SelfConsistency
from invariant_rag.errors import ContextOverflow, InvalidChoice, UnsupportedCombination
from invariant_rag.interventions import HiddenScaling
from invariant_rag.testing.rounding import rounding

from invariant_rag_benchmarks import BENCHMARKS, Case, Selection
from invariant_rag_benchmarks.config import ENSEMBLES, BenchmarkConfig
from invariant_rag_benchmarks.data import DataSource
from invariant_rag_benchmarks.errors import InvalidRun, RunExists
from invariant_rag_benchmarks.report import markdown, summarize
from invariant_rag_benchmarks.runner import Answerer, collisions, open_records, perplexity, run_benchmark
from invariant_rag_benchmarks.scores import best_subspan_em, variations
from invariant_rag_benchmarks.tasks.chunks import TASKS, edit_similarity, rouge_l
from invariant_rag_benchmarks.tasks.judging import SECTIONS

from .conftest import SETTINGS, records


@pytest.mark.parametrize(
    ("name", "gold", "output", "scores"),
    [
        ("lost-in-the-middle", ("Rome",), "I do not know.\nRome", {"best_subspan_em": 0, "exact_match": 0}),
        ("lost-in-the-middle", ("x", "Röntgen"), "\n A Röntgen!", {"best_subspan_em": 1, "exact_match": 1}),
        ("xquad", ("308",), "308 points", {"best_subspan_em": 1, "exact_match": 0}),
        ("key-value", ("ab-CD",), 'The value is "AB-cd".', {"accuracy": 1}),
        ("key-value", ("ab-cd",), "abcd", {"accuracy": 0}),
        ("mintaka", ("Rome",), '{"Answer": "the Rome"}', {"accuracy": 1, "exact_match": 1, "f1": 1}),
        ("mintaka", ("Rome",), '{"Answer": "Rome city"} Rome', {"accuracy": 1, "exact_match": 0, "f1": 2 / 3}),
        ("mintaka", ("Oslo",), "{'Answer': ['Rome', 'Oslo']}", {"accuracy": 1, "exact_match": 0, "f1": 2 / 3}),
        ("mintaka", ("7",), '{"Answer": 7}', {"accuracy": 1, "exact_match": 1, "f1": 1}),
        ("mintaka", ("Rome",), 'The Answer is {"x": 1}', {"accuracy": 0, "exact_match": 0, "f1": 0}),
        ("mintaka", ("Rome",), "Rome\nOslo", {"accuracy": 1, "exact_match": 1, "f1": 1}),
        ("r-gsm", ("1200",), "3 + 4. Answer: 7\nAnswer: 1,200.00", {"accuracy": 1}),
        ("r-gsm", ("7",), "It is 7.", {"accuracy": 0}),
        ("r-gsm", ("-2",), "Answer: $-2.", {"accuracy": 1}),
        ("two-wiki", ("no", "a big town"), "Big city", {"f1": 0.5}),
        *(("timeline", ("II", "I", "III"), output, {"accuracy": 1}) for output in ("II. b\nI. a\nIII. c", "2, 1, 3")),
        *(("timeline", ("II", "I"), output, {"accuracy": 0}) for output in ("I, II", "I think so", "9" * 5000)),
        # The official file has Arabic numerals, and events have dates.
        ("timeline", ("2", "1", "3"), "2. On 11 May 1965.\n1. On 7 May 1966.\n3. In 1976, 3 floors.", {"accuracy": 1}),
        ("timeline", ("3", "5", "1", "4", "2"), "The order is 3, 5, 1, 4, 2.", {"accuracy": 1}),
        ("timeline", ("2", "1"), "Event 2 came before event 1.", {"accuracy": 1}),
        ("timeline", ("(2)", "(1)"), "2, 1", {"accuracy": 1}),
        ("timeline", ("2", "1", "3"), "The correct order is II, I and III.", {"accuracy": 1}),
        ("timeline", ("2", "1", "3"), "1 -> 2 -> 3", {"accuracy": 0}),
        ("reward-bench", ("B",), 'I say "[[A]]" or "[[B]]".\nA is short, [[A]]?\nVerdict: [[B]]', {"accuracy": 1}),
        ("reward-bench", ("A",), "Both are fine. [[A]]", {"accuracy": 1}),
        ("reward-bench", ("B",), "[[A]]", {"accuracy": 0}),
        *(("llmbar", ("A",), output, {"accuracy": 0.5}) for output in ("[[A]] or [[B]]", "Neither.")),
        ("longbench: qasper", ("no", "a big town"), "Big city", {"score": 0.5}),
        ("longbench: triviaqa", ("Rome",), "\nRome\nQuestion: more", {"score": 1}),
        ("longbench: passage_retrieval_en", ("Paragraph 7",), "Paragraph 7, not 3", {"score": 0.5}),
        ("longbench: passage_count", ("12",), "none", {"score": 0}),
        ("longbench: trec", ("Food", "Food", "Fast Food", "Sport"), "Food or Sport\nSport", {"score": 0.5}),
        ("longbench: trec", ("Fast Food", "Food", "Fast Food", "Sport"), "Fast Food", {"score": 1}),
        ("longbench: lcc", ("return x",), "# here\n```python\nreturn x\nreturn y", {"score": 1}),
    ],
)
def test_an_output_gets_the_score_that_was_worked_out_by_hand(name, gold, output, scores):
    name, _, task = name.partition(": ")
    assert BENCHMARKS[name].score(Case("q", gold=gold, group=task), output).scores == pytest.approx(scores)


@pytest.mark.parametrize(
    ("prediction", "gold", "rouge", "edits"),
    [
        ("with a cat it mat a on it the big", "off cat . was .", 0.181818, 0.33),
        ("and ran fish the on", "sat on ran . fish was", 0.4, 0.6),
        ("ran cat it the some sat mat", "with mat and it off was some ran some mat sat fish", 0.352941, 0.42),
        ("and some sat fish and some sat fish", "some . on off off off", 0.285714, 0.39),
        ("cat sat and on mat a big on mat . a was fish fish", "a fish mat and", 0.461538, 0.29),
        ("on mat . on", "mat on", 0.5, 0.71),  # of two subsequences, the one with the earliest words of the prediction
        ("", "a fish", 0, 0),
    ],
)
def test_rouge_and_edit_similarity_are_those_of_the_packages(prediction, gold, rouge, edits):
    """The figures are those of rouge 1.0.1 and fuzzywuzzy 0.18, which LongBench's code calls."""
    assert rouge_l(prediction, gold) == pytest.approx(rouge, abs=1e-6)
    assert edit_similarity(prediction, gold) == edits


def test_groups_of_longbench_weigh_their_tasks_alike_and_sections_of_reward_bench_their_subsets_as_it_does():
    def figures(name, metric, *judged):
        asked = [record for group, scores in judged for record in records(scores, metric, group=group)]
        return BENCHMARKS[name].figures(asked)

    asked = [("qasper", 1.0), ("qasper", 1.0), ("multifieldqa_en", 0.5), ("narrativeqa", 0.0), ("trec", 1.0)]
    found = figures("longbench", "score", *((task, {"initial": [value]}) for task, value in asked))
    assert found == {"qasper": 1, "multifieldqa_en": 0.5, "narrativeqa": 0, "trec": 1, "single-doc": 0.5}
    assert figures("longbench", "score", *((name, {"initial": [0.25]}) for name in TASKS))["mean of groups"] == 0.25
    verdicts = [(name, {"gold first": [first], "gold second": [0]}) for name, first in (("math-prm", 1), ("hep-go", 0))]
    found, share = figures("reward-bench", "accuracy", *verdicts), 984 / (984 + 164)
    for column, expected in {"gold first": share, "gold second": 0, "shuffled": share / 2, "flips": share}.items():
        assert found[f"Reasoning: {column}"] == pytest.approx(expected)
    assert "Full: gold first" not in found
    verdicts = [(next(iter(each)), {"gold first": [1], "gold second": [1]}) for each in SECTIONS.values()]
    assert figures("reward-bench", "accuracy", *verdicts)["Full: gold second"] == 1


def test_best_subspan_em_agrees_with_pairs_judged_by_hand():
    lines = (Path(__file__).parent / "subspan_pairs.tsv").read_text("utf-8").splitlines()
    pairs = [line.split("\t") for line in lines[1:]]
    assert len(pairs) >= 200
    assert [each for each in pairs if best_subspan_em(each[0], each[1].split("|")) != float(each[2])] == []


@pytest.mark.parametrize("questions", [20, 100])
def test_variations_of_chance_are_called_so_and_their_intervals_hold_the_true_ones(questions):
    source, alike, unlike = np.random.default_rng(0), [], []
    for seed in range(25):
        hard = source.random((questions, 1))
        alike.append(variations((source.random((questions, 5)) < hard).astype(float), seed))
        slots = 0.2 + 0.6 * hard + np.array([0.1, 0.0, 0.0, 0.0, -0.1])
        unlike.append(variations((source.random((questions, 5)) < slots).astype(float), seed)["spread"])
    # Of a test at 5%, more than 5 alarms come once in 800.
    assert sum(each["spread"]["value"] > each["spread"]["chance"] for each in alike) <= 5
    assert sum(each["spread"]["low"] == each["deviation"]["low"] == 0 for each in alike) >= 20
    assert sum(each["low"] <= 0.2 <= each["high"] for each in unlike) >= 20


def test_variations_that_are_known_beforehand_or_cannot_be_known():
    unseen = variations(np.ones((100, 4)))["spread"]  # nothing was seen, which does not say that there is none
    assert unseen == {"value": 0.0, "low": 0.0, "high": round(exact_upper_bound(0, 100), 6), "chance": 0.0}
    nothing = {"spread": None, "deviation": None}
    assert variations(np.ones((3, 1))) == variations(np.array([[1.0, np.nan], [np.nan, 1.0]])) == nothing
    found = variations(np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    assert found["spread"]["value"] == 1.0
    assert found["deviation"]["value"] == pytest.approx(math.sqrt(1 / 6), abs=1e-6)
    # Two questions that are right in one of two slots: both in the same slot in half of the shuffles.
    assert variations(np.array([[1.0, 0.0], [0.0, 1.0]]))["spread"]["chance"] == 1.0
    assert variations(np.array([[0.25, 1.0]]))["spread"]["chance"] == 0.75  # one question has one spread
    alike = (np.random.default_rng(1).random((200, 5)) < 0.5).astype(float)
    favouring = np.hstack([np.ones((200, 1)), alike[:, 1:]])
    spreads = [variations(each)["spread"] for each in (alike, favouring, np.ones((9, 4)))]
    assert [each["value"] > each["chance"] for each in spreads] == [False, True, False]


XQUAD = BENCHMARKS["xquad"]
FIGURES = ("mean", "worst", "best", "spread", "deviation", "flips")


def run_of(right, answers=()):
    """One row per question, one column per slot."""
    slots = {str(slot): each for slot, each in enumerate(zip(*right, strict=True))}
    return records(slots, "best_subspan_em", answers)


def values(summary):
    return tuple(summary[name]["value"] for name in FIGURES)


def test_readers_of_the_first_slot_and_fair_ones_have_the_figures_of_one_and_no_record_has_none():
    first = summarize(XQUAD, run_of([[True, False, False, False]] * 50))
    assert values(first) == (0.25, 0, 1, 1, pytest.approx(0.1875**0.5, abs=1e-6), 1)
    assert first["variants"]["0"]["best_subspan_em"]["value"] == 1
    fair = summarize(XQUAD, run_of([[True] * 3] * 6 + [[False] * 3] * 4))
    assert (values(fair), fair["groups"]) == ((0.6, 0.6, 0.6, 0, 0, 0), {})
    means = (fair["mean"], fair["scores"]["best_subspan_em"], fair["variants"]["0"]["best_subspan_em"])
    assert set(map(str, means)) == {str(wilson_interval(6, 10).as_dict())}
    # Questions with sensitivity to permutations (Stable-RAG), over all orders of five documents.
    one_flips = summarize(XQUAD, run_of([[True] * 120] * 4, ["a"] * 479 + ["b"]))
    assert one_flips["flips"] == wilson_interval(1, 4).as_dict()
    each_in_one_variant = [record for number, record in enumerate(run_of([[True, False]] * 2)) if number in {0, 3}]
    assert summarize(XQUAD, each_in_one_variant)["spread"] is None
    with pytest.raises(InvalidRun):
        summarize(XQUAD, [])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
def test_figures_agree_with_each_other(right):
    summary = summarize(XQUAD, run_of(right))
    mean, worst, best, _, _, flips = values(summary)
    assert worst <= mean <= best
    assert best - worst == pytest.approx(flips, abs=1e-5)
    assert all(0 <= each["low"] <= each["value"] <= each["high"] <= 1 for each in map(summary.get, FIGURES))


def test_an_order_blind_solver_of_problems_of_many_sizes_has_no_spread(load, tmp_path):
    """Problems with more conditions are harder: their orders would be compared with those of easy problems."""
    given = [[f"Ann finds {number} pens." for number in range(size)] for size in (2, 3, 4, 5) * 10]
    problems = [{"question": f"{' '.join(each)} How many?", "interchangeable": each, "answer": "3"} for each in given]
    (tmp_path / "r_gsm.jsonl").write_text(json.dumps(problems))
    asked, benchmark = [], BENCHMARKS["r-gsm"]
    for case in load("r-gsm", source=tmp_path):
        scored = benchmark.score(case, f"Answer: {case.gold[0] if len(case.segments) < 4 else 'none'}")
        scores = {"answer": scored.answer, "scores": dict(scored.scores), "dropped": 0, "trimmed": 0}
        asked.append({"question": case.question, "variant": case.variant, "group": "", **scores})
    assert {each["variant"] for each in asked} == {"initial", "reversed", *(f"random {k}" for k in (1, 2, 3, 4))}
    summary = summarize(benchmark, asked)
    assert (summary["mean"]["value"], summary["spread"]["value"], summary["flips"]["value"]) == (0.5, 0, 0)


@pytest.mark.parametrize("alpha", [None, 0.2])
def test_a_routed_run_says_how_often_the_invariant_answer_was_kept(alpha):
    branches = ("plain", "invariant", "plain", "plain")
    scores = {"scores": {"accuracy": 1.0}, "rejected": {"scores": {"accuracy": 0.0}}}
    asked = [{**each, **scores, "branch": branch} for branch, each in zip(branches, run_of([[True]] * 4), strict=True)]
    summary = summarize(BENCHMARKS["mmlu"], asked)
    assert summary["figures"] == {"invariant answers kept": 0.25, "oracle of the two branches": 1}
    config = dict.fromkeys(("benchmark", "model", "method", "ordering", "overflow"), "name")
    text = markdown({**config, "alpha": alpha, "data": {}, "settings": {}}, summary)
    assert ("0.2" in text.splitlines()[0]) == (alpha is not None)
    assert "unknown: no question was asked in all of at least two variants" in text


PLAIN = {"method": "sequential", "ordering": "given"}
CHOICES = {"settings": {"orders": "0,23"}, "limit": 3, "batch_size": 2}


@pytest.fixture(scope="session")
def run(files, lm):
    """Run a benchmark on its small file, below a folder, with keywords of `run_benchmark` that are not its defaults."""

    def done(out, name="mmlu", *, how=(), **more):
        fixed = {"data": files, "max_new_tokens": 3, "overflow": "trim_segments", "settings": SETTINGS.get(name, {})}
        config = BenchmarkConfig(name, **{**fixed, **more})
        return run_benchmark(config, out, model=lm, **dict(how))

    return done


@pytest.fixture(scope="session")
def finished(run, tmp_path_factory):
    """An undisturbed run."""
    return run(tmp_path_factory.mktemp("undisturbed"), **CHOICES)


def answer(lm, load, name, **options):
    """Return the first case of a benchmark, its record, and the model that was asked."""
    config = BenchmarkConfig(name, max_new_tokens=3, **options)
    configured, case = config.configure(lm), load(name)[0]
    return case, Answerer(config, configured)([case])[0], configured


def test_every_ensemble_answers_where_it_can(lm, load):
    for name in [each for each in ENSEMBLES if each != "self-consistency"]:  # which votes over texts
        case, record, configured = answer(lm, load, "mmlu", ensemble=name)
        assert record["output"] in case.candidates, name
        if name == "ring-average":
            assert record["logprobs"] == RingAverage(configured).score(case.prompt(lm), case.candidates)
    for ensemble, name, options in (
        (SelfConsistency, "xquad", {"ensemble": "self-consistency"}),
        (PermutationAverage, "reward-bench", {**PLAIN, "ensemble": "permutation-average"}),  # PINE's baseline
    ):
        case, record, configured = answer(lm, load, name, **options)
        assert record["output"] == ensemble(configured).generate(case.prompt(lm), max_new_tokens=3).text


def test_what_cannot_be_asked_is_refused_before_or_at_the_first_case(lm, load, run, tmp_path):
    with pytest.raises(UnsupportedCombination, match="ContextualCalibration, which generates no text"):
        answer(lm, load, "xquad", ensemble="contextual-calibration")
    with pytest.raises(UnsupportedCombination, match="first_layer"):  # by its name, ms-poe skips two layers
        answer(lm, load, "mmlu", method="sequential", intervention="ms-poe")
    with pytest.raises(ContextOverflow):
        run(tmp_path, "mintaka", overflow="error", max_new_tokens=5000)


def test_an_intervention_is_a_name_or_a_file_of_parameters(lm, load, tmp_path):
    scaling, path = HiddenScaling(5, -1.0, [0, 1]), tmp_path / "scaling.json"
    scaling.save(path)
    case, record, configured = answer(lm, load, "xquad", **PLAIN, intervention=str(path))
    assert configured.intervention == scaling
    scaled = lm.with_method(**PLAIN, intervention=scaling)
    assert record["output"] == scaled.generate(case.prompt(lm), max_new_tokens=3).text
    path.write_text("{}")
    with pytest.raises(InvalidChoice, match="dimensions, factor and layers"):
        BenchmarkConfig("mmlu", method="sequential", intervention=str(path))


def test_a_record_has_the_perplexity_of_its_tokens_and_how_many_segments_collide_where_they_are_placed(lm, load):
    assert perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4)
    assert perplexity([]) == 1
    for segments, ordering, expected in (
        (["one", "two", "six"], "lexical", 0),
        (["one", "two", "one", "one"], "lexical", 0.5),
        (["ab", "cd", "xyz"], "frequency", 1 / 3),
        ([], "lexical", 0),
    ):
        assert collisions(lm.with_method(ordering=ordering), Prompt("", segments, "?")) == pytest.approx(expected)
    case, record, configured = answer(lm, load, "xquad")
    assert record["perplexity"] == perplexity(configured.generate(case.prompt(lm), max_new_tokens=3).logprobs)
    assert record["collisions"] == 0
    others = [answer(lm, load, "xquad", **each)[1] for each in ({"method": "pine"}, PLAIN)]
    assert not any("collisions" in each for each in others)


def test_a_case_is_answered_up_to_its_own_longest_output_and_never_beyond_that_of_the_run(load, lm):
    (asked,) = load("longbench")
    cases = [replace(asked, variant=str(limit), max_new_tokens=limit) for limit in (2, 9, None)]
    records = Answerer(BenchmarkConfig("longbench", max_new_tokens=5), lm)(cases)
    for case, record, limit in zip(cases, records, [2, 5, 5], strict=True):
        assert record["output"] == lm.generate(case.prompt(lm), max_new_tokens=limit).text
        assert record["variant"] == case.variant


MMLU = Path(os.environ.get("INVARIANT_RAG_DATA", "")) / "mmlu_validation.json"


@pytest.mark.skipif(not MMLU.is_file(), reason="INVARIANT_RAG_DATA has no mmlu_validation.json")
def test_the_embedded_model_still_gives_the_stored_scores_of_mmlu():
    """The scores that the core's tests of routing start from."""
    stored = json.loads((Path(__file__).parents[2] / "tests" / "mmlu_scores.json").read_text())
    lm, mmlu = InvariantModel.from_pretrained(), BENCHMARKS["mmlu"]
    cases = mmlu.load(DataSource(MMLU), mmlu.parse_settings({"orders": "0"}), Selection(171, 0))
    for case, each in list(zip(cases, stored, strict=False))[:8]:
        prompt, routing = case.prompt(lm), lm.with_routing(-2)
        routed = routing.score(prompt, case.candidates)
        bound = rounding(routing.score, prompt, case.candidates) + 0.00005  # four decimals are stored
        assert routed.rejected == pytest.approx(each["plain"], abs=bound)
        assert [*routed] == pytest.approx(each["invariant"], abs=bound)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_runs_end_to_end(name, run, tmp_path):
    done = run(tmp_path, name, limit=2)
    lines = (done.folder / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [record["id"] for record in done.records]
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["records"] == len(lines)
    assert 0 <= summary["worst"]["value"] <= summary["mean"]["value"] <= summary["best"]["value"] <= 1
    assert f"## {name}: " in done.markdown()


def test_an_invariant_method_flips_nothing_where_nothing_shows_the_order(run, tmp_path):
    asked = [{"method": "sequential"}, {"method": "rotor"}, {"method": "pine"}, {"ensemble": "context-experts"}]
    runs = [run(tmp_path, "xquad", **each, limit=2, max_new_tokens=8) for each in asked]
    assert [done.summary["flips"]["value"] for done in runs] == [1, 0, 0, 0]


def test_config_says_what_decides_the_records_which_hold_what_the_model_said(finished, lm, load):
    config = json.loads((finished.folder / "config.json").read_text())
    assert config.pop("versions").keys() >= {"torch", "transformers", "invariant-rag", "python"}
    assert config.pop("attention") == "sdpa"
    assert config == finished.config
    assert config["data"].keys() == {"mmlu_validation.json"}
    assert config["settings"] == {"split": "validation", "orders": "0,23"}
    assert finished.folder.name.endswith(config["key"])
    cases = {case.id: case for case in load("mmlu", orders="0,23")}
    for record in finished.records:
        case = cases[record["id"]]
        assert (record["run"], record["gold"]) == (config["key"], list(case.gold))
        texts = {name: getattr(case, name) for name in ("system", "prefix", "suffix")}
        assert record["prompt"] == {**texts, "segments": list(case.segments)}
        assert record["logprobs"] == lm.score(case.prompt(lm), case.candidates)
        assert record["output"] == case.candidates[record["logprobs"].index(max(record["logprobs"]))]
        assert record["scores"] == BENCHMARKS["mmlu"].score(case, record["output"]).scores


def test_a_run_is_never_overwritten_but_resumed_with_what_is_new_alone(finished, run, tmp_path):
    before = {path.name: path.read_bytes() for path in finished.folder.iterdir()}
    with pytest.raises(RunExists, match=finished.folder.name):
        run(finished.folder.parent, **CHOICES)
    assert before == {path.name: path.read_bytes() for path in finished.folder.iterdir()}
    shutil.copytree(finished.folder, tmp_path / finished.folder.name)
    steps = []
    for limit, count in ((3, 0), (4, 2)):
        how = {"resume": True, "progress": lambda *_: nullcontext(lambda: steps.append(1))}
        again = run(tmp_path, how=how, **{**CHOICES, "limit": limit})
        assert (again.folder.name, len(steps)) == (finished.folder.name, count)
        assert {record["id"] for record in finished.records} <= {record["id"] for record in again.records}
        assert count or (again.records, again.summary) == (finished.records, finished.summary)


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_run_cut_off_at_any_byte_ends_as_if_undisturbed(data, finished, run, tmp_path_factory):
    out = tmp_path_factory.mktemp("cut")
    file = shutil.copytree(finished.folder, out / finished.folder.name) / "records.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole)), label="bytes")])
    again = run(out, how={"resume": True}, **CHOICES)
    assert (again.records, again.summary) == (finished.records, finished.summary)
    assert sorted(file.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_other_settings_are_another_run(run, tmp_path):
    others = [
        {},
        *({"method": "pine"}, {"ordering": "frequency"}, {"seed": 1}, {"settings": {"orders": "0"}}),
        *({"batch_size": 3}, {"backend": "reference"}, {"alpha": 0.1}, {"ensemble": "permutation-average"}),
    ]
    folders = {run(tmp_path, **{**CHOICES, "limit": 1, **other}).folder for other in others}
    assert len(folders) == len(others)


def test_records_that_no_run_with_these_settings_wrote_are_refused_by_their_line(tmp_path):
    texts, path = dict.fromkeys(("id", "question", "variant", "group", "answer"), ""), tmp_path / "records.jsonl"
    record = {**texts, "scores": {"em": 1.0}, "dropped": 0, "trimmed": 0, "run": "k"}
    line = json.dumps(record)
    wrong = [json.dumps({**record, name: each}) for name in record for each in (None, [1], {"a": "b"})]
    torn, other = f"{line}\n{line[:9]}\n{line}", json.dumps({**record, "run": "other"})
    for text, said in (*((each, "line 1") for each in wrong), (torn, "line 2"), (other, "other")):
        path.write_text(f"{text}\n")
        with pytest.raises(InvalidRun, match=said):
            open_records(path, "k")


@pytest.mark.parametrize(("name", "settings"), [("reward-bench", {"explain": False}), ("xquad", {})])
def test_a_routed_run_has_the_answers_of_the_branch_that_its_margin_takes(name, settings, run, tmp_path):
    chosen = {"name": name, "settings": settings, "limit": 5, "max_new_tokens": 8}
    alone = {"invariant": run(tmp_path, **chosen).records, "plain": run(tmp_path, **chosen, **PLAIN).records}
    assert [each["output"] for each in alone["invariant"]] != [each["output"] for each in alone["plain"]]
    for alpha, branch, another in ((-2.0, "invariant", "plain"), (2.0, "plain", "invariant")):
        routed = run(tmp_path, **chosen, alpha=alpha)
        assert {record["branch"] for record in routed.records} == {branch}
        for record, kept, other in zip(routed.records, alone[branch], alone[another], strict=True):
            assert record["output"] == kept["output"]
            assert record["rejected"] == {key: other[key] for key in ("output", "answer", "scores")}
    assert len(list(tmp_path.iterdir())) == 4
