"""Runs: every case once, nothing lost, nothing overwritten, and the same records however often it was interrupted."""

import json
import shutil
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invariant_rag.errors import ContextOverflow

from invariant_rag_benchmarks import BENCHMARKS
from invariant_rag_benchmarks.config import BenchmarkConfig
from invariant_rag_benchmarks.errors import InvalidRun, RunExists
from invariant_rag_benchmarks.runner import Answerer, open_records, run_benchmark

from .conftest import SMALL, calling


@pytest.fixture(scope="session")
def planned(data_of):
    def config(name="mmlu", **more):
        fixed = {"data": data_of(name), "max_new_tokens": 3, "overflow": "trim_segments"}
        return BenchmarkConfig(name, **{"settings": SMALL.get(name, {}), **fixed, **more})

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
        *((0, {"method": name}) for name in ("rotor", "pine")),
        (1, {"method": "sequential"}),
        (0, {"ensemble": "context-experts"}),
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


def test_a_case_is_answered_up_to_its_own_longest_output_and_never_beyond_that_of_the_run(load, lm):
    (asked,) = load("longbench", tasks="qasper")
    cases = [replace(asked, variant=str(limit), max_new_tokens=limit) for limit in (2, 9, None)]
    records = Answerer(BenchmarkConfig("longbench", max_new_tokens=5), lm)(cases)
    for case, record, limit in zip(cases, records, [2, 5, 5], strict=True):
        assert record["output"] == lm.generate(case.prompt(lm), max_new_tokens=limit).text
        assert record["variant"] == case.variant


def test_a_run_is_never_overwritten(finished, choices, lm):
    before = {path.name: path.read_bytes() for path in finished.folder.iterdir()}
    with pytest.raises(RunExists, match=finished.folder.name):
        run_benchmark(choices, finished.folder.parent, model=lm)
    assert before == {path.name: path.read_bytes() for path in finished.folder.iterdir()}


@pytest.mark.parametrize(("limit", "count"), [(3, 0), (4, 2)])
def test_a_run_is_resumed_with_what_is_new_alone(limit, count, finished, choices, lm, tmp_path):
    copied(finished, tmp_path)
    asked = []
    more = replace(choices, limit=limit)
    again = run_benchmark(more, tmp_path, model=lm, resume=True, progress=calling(lambda: asked.append(1)))
    assert (again.folder.name, len(asked)) == (finished.folder.name, count)
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


def test_a_prompt_that_is_too_long_stops_the_run_and_says_so(planned, lm, tmp_path):
    with pytest.raises(ContextOverflow):
        run_benchmark(planned("mintaka", overflow="error", max_new_tokens=5000), tmp_path, model=lm)


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


@pytest.mark.parametrize(("alpha", "branch"), [(-2.0, "invariant"), (2.0, "plain")])
@pytest.mark.parametrize("name", ["mmlu", "timeline"])
def test_a_routed_run_has_the_answers_of_the_branch_that_its_margin_takes(name, alpha, branch, planned, lm, tmp_path):
    setups = {"invariant": {"method": "rotor"}, "plain": {"method": "sequential", "ordering": "given"}}
    routed = run_benchmark(planned(name, alpha=alpha, limit=1), tmp_path / "routed", model=lm)
    alone = {
        each: run_benchmark(planned(name, limit=1, **setup), tmp_path / each, model=lm)
        for each, setup in setups.items()
    }
    assert {record["branch"] for record in routed.records} == {branch}
    rejected = alone["plain" if branch == "invariant" else "invariant"].records
    for record, kept, other in zip(routed.records, alone[branch].records, rejected, strict=True):
        assert record["output"] == kept["output"]
        assert record["rejected"] == {key: other[key] for key in ("output", "answer", "scores")}
    assert routed.folder.name not in {each.folder.name for each in alone.values()}
