"""Runs: every case once, nothing lost, nothing overwritten, and the same records however often it was interrupted."""

import json
import math
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invariant_rag import InvariantModel, Prompt
from invariant_rag.ensembles import PermutationAverage, RingAverage, SelfConsistency
from invariant_rag.errors import ContextOverflow, InvalidChoice, UnsupportedCombination
from invariant_rag.interventions import HiddenScaling
from invariant_rag.testing.rounding import rounding

from invariant_rag_benchmarks import BENCHMARKS, Selection
from invariant_rag_benchmarks.config import ENSEMBLES, BenchmarkConfig
from invariant_rag_benchmarks.data import DataSource
from invariant_rag_benchmarks.errors import InvalidRun, RunExists
from invariant_rag_benchmarks.runner import Answerer, collisions, open_records, perplexity, run_benchmark

from .conftest import SETTINGS

PLAIN = {"method": "sequential", "ordering": "given"}


@pytest.fixture(scope="session")
def planned(data_of):
    def config(name="mmlu", **more):
        fixed = {"data": data_of(name), "max_new_tokens": 3, "overflow": "trim_segments"}
        return BenchmarkConfig(name, **{"settings": SETTINGS.get(name, {}), **fixed, **more})

    return config


@pytest.fixture(scope="session")
def choices(planned):
    return planned(settings={"orders": "0,23"}, limit=3, batch_size=2)


@pytest.fixture(scope="session")
def finished(choices, lm, tmp_path_factory):
    """An undisturbed run."""
    return run_benchmark(choices, tmp_path_factory.mktemp("undisturbed"), model=lm)


def copied(finished, out):
    return shutil.copytree(finished.folder, out / finished.folder.name) / "records.jsonl"


# --- what is asked: the model, with an intervention, routed, or an ensemble over it; and its record ---


@pytest.fixture
def answer(lm, load):
    """Return the first case of a benchmark, its record, and the model that was asked."""

    def answered(name, **options):
        config = BenchmarkConfig(name, max_new_tokens=3, **options)
        configured, case = config.configure(lm), load(name)[0]
        return case, Answerer(config, configured)([case])[0], configured

    return answered


def test_every_ensemble_answers_where_it_can(answer, lm):
    for name in [each for each in ENSEMBLES if each != "self-consistency"]:  # which votes over texts
        case, record, _ = answer("mmlu", ensemble=name)
        assert record["output"] in case.candidates, name
    case, record, configured = answer("mmlu", ensemble="ring-average")
    assert record["logprobs"] == RingAverage(configured).score(case.prompt(lm), case.candidates)
    for ensemble, name, options in (
        (SelfConsistency, "xquad", {"ensemble": "self-consistency"}),
        (PermutationAverage, "reward-bench", {**PLAIN, "ensemble": "permutation-average"}),  # PINE's baseline
    ):
        case, record, configured = answer(name, **options)
        assert record["output"] == ensemble(configured).generate(case.prompt(lm), max_new_tokens=3).text


def test_what_cannot_be_asked_is_refused_before_or_at_the_first_case(answer, planned, lm, tmp_path):
    with pytest.raises(UnsupportedCombination, match="ContextualCalibration, which generates no text"):
        answer("xquad", ensemble="contextual-calibration")
    with pytest.raises(UnsupportedCombination, match="first_layer"):  # by its name, ms-poe skips two layers
        answer("mmlu", method="sequential", intervention="ms-poe")
    with pytest.raises(ContextOverflow):
        run_benchmark(planned("mintaka", overflow="error", max_new_tokens=5000), tmp_path, model=lm)


def test_an_intervention_is_a_name_or_a_file_of_parameters(answer, lm, tmp_path):
    scaling, path = HiddenScaling(5, -1.0, [0, 1]), tmp_path / "scaling.json"
    scaling.save(path)
    case, record, configured = answer("xquad", **PLAIN, intervention=str(path))
    assert configured.intervention == scaling
    scaled = lm.with_method(**PLAIN, intervention=scaling)
    assert record["output"] == scaled.generate(case.prompt(lm), max_new_tokens=3).text
    path.write_text("{}")
    with pytest.raises(InvalidChoice, match="dimensions, factor and layers"):
        BenchmarkConfig("mmlu", method="sequential", intervention=str(path))


def test_a_record_has_the_perplexity_of_its_tokens_and_how_many_segments_collide_where_they_are_placed(answer, lm):
    assert perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4)
    assert perplexity([]) == 1
    for segments, ordering, expected in (
        (["one", "two", "six"], "lexical", 0),
        (["one", "two", "one", "one"], "lexical", 0.5),
        (["ab", "cd", "xyz"], "frequency", 1 / 3),
        ([], "lexical", 0),
    ):
        assert collisions(lm.with_method(ordering=ordering), Prompt("", segments, "?")) == pytest.approx(expected)
    case, record, configured = answer("xquad")
    assert record["perplexity"] == perplexity(configured.generate(case.prompt(lm), max_new_tokens=3).logprobs)
    assert record["collisions"] == 0
    assert "collisions" not in answer("xquad", method="pine")[1].keys() | answer("xquad", **PLAIN)[1].keys()


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


# --- whole runs ---


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_runs_end_to_end(name, planned, lm, tmp_path):
    done = run_benchmark(planned(name, limit=2), tmp_path, model=lm)
    lines = (done.folder / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [record["id"] for record in done.records]
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["records"] == len(lines)
    assert 0 <= summary["worst"]["value"] <= summary["mean"]["value"] <= summary["best"]["value"] <= 1
    assert f"## {name}: " in done.markdown()


@pytest.mark.parametrize(
    ("flips", "asked"),
    [
        *((0, each) for each in ({"method": "rotor"}, {"method": "pine"}, {"ensemble": "context-experts"})),
        (1, {"method": "sequential"}),
    ],
)
def test_an_invariant_method_flips_nothing_where_nothing_shows_the_order(flips, asked, planned, lm, tmp_path):
    done = run_benchmark(planned("xquad", **asked, limit=2, max_new_tokens=8), tmp_path, model=lm)
    assert done.summary["flips"]["value"] == flips


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


def test_a_run_is_never_overwritten_but_resumed_with_what_is_new_alone(finished, choices, lm, tmp_path):
    before = {path.name: path.read_bytes() for path in finished.folder.iterdir()}
    with pytest.raises(RunExists, match=finished.folder.name):
        run_benchmark(choices, finished.folder.parent, model=lm)
    assert before == {path.name: path.read_bytes() for path in finished.folder.iterdir()}
    copied(finished, tmp_path)
    steps = []
    progress = nullcontext(lambda: steps.append(1))
    for limit, count in ((3, 0), (4, 2)):
        again = run_benchmark(
            replace(choices, limit=limit), tmp_path, model=lm, resume=True, progress=lambda *_: progress
        )
        assert (again.folder.name, len(steps)) == (finished.folder.name, count)
        assert {record["id"] for record in finished.records} <= {record["id"] for record in again.records}
        assert count or (again.records, again.summary) == (finished.records, finished.summary)


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_cut_off_at_any_byte_ends_as_if_undisturbed(data, finished, choices, lm, tmp_path_factory):
    out = tmp_path_factory.mktemp("cut")
    file = copied(finished, out)
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole)), label="bytes")])
    again = run_benchmark(choices, out, model=lm, resume=True)
    assert (again.records, again.summary) == (finished.records, finished.summary)
    assert sorted(file.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_other_settings_are_another_run(choices, lm, tmp_path):
    others = [
        {},
        *({"method": "pine"}, {"ordering": "frequency"}, {"seed": 1}, {"settings": {"orders": "0"}}),
        *({"batch_size": 3}, {"backend": "reference"}, {"alpha": 0.1}, {"ensemble": "permutation-average"}),
    ]
    for other in others:
        run_benchmark(replace(choices, limit=1, **other), tmp_path, model=lm)
    assert len(list(tmp_path.iterdir())) == len(others)


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


@pytest.mark.parametrize("name", ["mmlu", "timeline"])
def test_a_routed_run_has_the_answers_of_the_branch_that_its_margin_takes(name, planned, lm, tmp_path):
    def run(**setup):
        return run_benchmark(planned(name, limit=1, **setup), tmp_path, model=lm)

    alone = {"invariant": run(method="rotor"), "plain": run(**PLAIN)}
    for alpha, branch, another in ((-2.0, "invariant", "plain"), (2.0, "plain", "invariant")):
        routed = run(alpha=alpha)
        assert {record["branch"] for record in routed.records} == {branch}
        for record, kept, other in zip(routed.records, alone[branch].records, alone[another].records, strict=True):
            assert record["output"] == kept["output"]
            assert record["rejected"] == {key: other[key] for key in ("output", "answer", "scores")}
    assert len(list(tmp_path.iterdir())) == 4
