"""The tables of the papers: checked against each other, and measured again."""

import json
import runpy
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from invariant_rag.interventions import HiddenScaling
from scipy.stats import t as student
from scipy.stats import ttest_rel

from invariant_rag_benchmarks import BENCHMARKS, Case
from invariant_rag_benchmarks.config import BenchmarkConfig
from invariant_rag_benchmarks.published_tables import (
    PublishedColumn,
    configs_to_run,
    published_tables,
    reproduce,
    resolve_table,
    rows_to_measure,
)
from invariant_rag_benchmarks.tasks.judging import SECTIONS

from .conftest import records

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def row_of(table, model, name):
    """A row of a table, and its cells by the names of columns."""
    (row,) = [each for each in resolve_table(table).rows_of(model) if each.name == name]
    return row, dict(zip((each.label for each in resolve_table(table).columns), row.values, strict=True))


@pytest.mark.parametrize("name", published_tables())
def test_every_column_and_row_is_measured_with_what_we_have_or_the_note_says_why_not(name):
    table = resolve_table(name)
    says_why = "not measured" in table.note.lower()
    assert table.columns
    for column in table.columns:
        if not column.metric:
            assert says_why
            continue
        benchmark = BENCHMARKS[column.benchmark]
        assert benchmark.parse_settings(column.settings)
        case = Case("q", "0123", "", (), "", ("0",), candidates=(" A", " B", " C", " D"), group="qasper")
        metrics = benchmark.score(case, " A").scores.keys() | {"routed", "perplexity", "collisions"}
        assert column.metric.startswith("figure: ") or column.metric.removeprefix("deviation: ") in metrics
    for row in table.rows:
        assert any(each is not None for each in row.values)
        if row.setup is None:
            assert says_why
            continue
        BenchmarkConfig("mmlu", **asdict(row.setup))  # which refuses what has no such name
        assert row.setup.intervention != "hidden-scaling" or HiddenScaling.published(row.model)


def test_the_t_tests_of_rotor_follow_from_its_table_of_scores():
    """But for a factor: the paper divides the variance of nine differences by nine, a t-test by eight."""
    scores, published = resolve_table("rotor-table-7"), resolve_table("rotor-table-8")
    for name, row in zip(("Original Model", "RoToR-lexical"), published.rows, strict=True):
        values = [row.values for row in scores.rows if row.name.removesuffix(" + S.R.") == name]
        pairs = [pair for each in values for pair in zip(each[::2], each[1::2], strict=True) if None not in pair]
        before, after = zip(*pairs, strict=True)
        test = ttest_rel(before, after)
        freedom, difference, t, critical = row.values
        assert (test.df, len(pairs)) == (freedom, 9)
        assert sum(before) / 9 - sum(after) / 9 == pytest.approx(difference, abs=0.005)
        assert student.ppf(0.975, test.df) == pytest.approx(critical, abs=0.0005)
        assert test.statistic * (9 / 8) ** 0.5 == pytest.approx(t, abs=0.005)
        assert (test.pvalue < 0.05) == (t > critical) == (name == "Original Model")


def test_the_scores_of_rotor_before_and_after_shuffling_and_its_margin_are_those_of_its_main_tables():
    names = {"Original Model": "Original", "RoToR-lexical": "RoToR"}
    for row in resolve_table("rotor-table-7").rows:
        if row.name in names:
            _, main = row_of("rotor-table-2", row.model, names[row.name])
            labels = [f"{count} triples, {order}, F1" for count in (30, 50) for order in ("initial", "shuffled")]
            assert list(row.values[:4]) == [main[label] for label in labels]
        if row.values[4] is not None:
            name = "Orig." if row.name == "Original Model" else "RoToR + S.R."
            mean, _ = row_of("rotor-table-3", row.model, name)
            assert row.values[4:] == (mean.values[0], mean.values[2])
    margin = next(row for row in resolve_table("rotor-table-6").rows if row.name == "ours-lexical, 0.2")
    routed, _ = row_of("rotor-table-3", margin.model, "RoToR + S.R.")
    assert (margin.setup, margin.values[1]) == (routed.setup, routed.values[0])


@pytest.mark.parametrize("row", resolve_table("pine-tables-7-15").rows, ids=lambda row: f"{row.model}, {row.name}")
def test_the_subsets_of_reward_bench_average_to_the_published_sections(row):
    """With RewardBench's weights; every cell is rounded to 0.1. The paper has another run in one of its columns."""
    tolerance = 0.65 if (row.model, row.name) == ("meta-llama/Meta-Llama-3-8B-Instruct", "PINE") else 0.11
    _, published = row_of("pine-table-5", row.model, row.name)
    _, cells = row_of("pine-tables-7-15", row.model, row.name)
    for name, weights in SECTIONS.items():
        mean = sum(cells[subset] * weight for subset, weight in weights.items()) / sum(weights.values())
        expected = published[f"{name}, shuffled"]
        assert expected is None or mean == pytest.approx(expected, abs=tolerance), name


def test_the_flips_of_a_model_average_to_its_last_column():
    rows = resolve_table("pine-table-4").rows
    for row in rows:
        *sections, full = row.values
        known = [each for each in sections if each is not None]
        if len(known) == 4:
            assert sum(known) / 4 == pytest.approx(full, abs=0.1)
    cells = next(row.values for row in rows if row.model == "Qwen/Qwen1.5-72B-Chat")
    assert cells == (None, None, 9.6, 24.7, 17.0)


def test_cells_are_read_from_the_records_of_a_run():
    def column(metric, **more):
        return PublishedColumn("", "mmlu", metric, {}, **more)

    asked = records({"0123": [1, 1], "a": [1, 1], "b": [1, 0], "c": [0, 0]})
    found = column("deviation: accuracy", exclude_variants=("0123",)).read(asked)
    assert found.value == pytest.approx(((0.5**2 + 0 + 0.5**2) / 3) ** 0.5)
    assert column("accuracy", variants=("z",)).read(asked) is None
    assert column("perplexity").read(asked) is None
    assert column("perplexity").read(records({"a": [1]}, perplexity=3.5)).value == 3.5
    routed = [
        *records({"a": [0, 0]}, branch="plain", rejected={"scores": {"accuracy": 1.0}}),
        *records({"b": [1, 0]}, branch="invariant", rejected={"scores": {"accuracy": 0.0}}),
    ]
    assert column("accuracy").read(routed).value == 0.25
    assert column("accuracy").read(routed, oracle=True).value == 0.75  # the better of two branches
    assert column("routed").read(routed).value == 0.5
    mean = resolve_table("rotor-table-3").columns[2]  # the others of MMLU are all orders but the first
    chosen = mean.select({"variant": variant, "group": ""} for variant in ("0123", "0132", "3210"))
    assert [record["variant"] for record in chosen] == ["0132", "3210"]


HIDDEN = [("sequential", None, None), ("sequential", None, "hidden-scaling")]
PLANS = {
    "the oracle shares the run of the routed row": (
        *("rotor-table-3", "Qwen/Qwen1.5-4B-Chat", ["RoToR", "RoToR + S.R.", "RoToR + S.R. (Oracle)"]),
        [("mmlu", "rotor", None, None), ("mmlu", "rotor", 0.2, None)],
    ),
    "MPT has its published scaling": (
        *("hidden-scaling-table-1", "mosaicml/mpt-30b-chat", []),
        [(name, *each) for each in HIDDEN for name in ("lost-in-the-middle", "key-value")],
    ),
    "one run for each method and number of documents": (
        *("rotor-table-1", "meta-llama/Llama-3.1-70B-Instruct", []),
        [("lost-in-the-middle", each, None, None) for each in ("sequential", "pine", "rotor", "rotor") for _ in "12"],
    ),
}


@pytest.mark.parametrize(("table", "model", "names", "expected"), PLANS.values(), ids=PLANS)
def test_a_table_takes_one_run_per_setup_and_setting(table, model, names, expected):
    chosen = resolve_table(table)
    rows = rows_to_measure(chosen, model, names)
    wanted = list(configs_to_run(rows, chosen.columns, BenchmarkConfig("mmlu")).values())
    assert [(each.benchmark, each.method, each.alpha, each.intervention) for each in wanted] == expected
    assert len({(each.benchmark, each.method, each.ordering, each.alpha, str(each.settings)) for each in wanted}) >= 2


def test_a_table_is_measured_cell_by_cell(files, lm, tmp_path):
    unknown = rows_to_measure(resolve_table("pine-table-2"), None)  # every method, and no published number
    assert [row.name for row in unknown] == ["NIA", "PCW", "SP", "PINE", "permutation"]
    assert all(value is None for row in unknown for value in row.values)
    base = BenchmarkConfig("reward-bench", data=files, max_new_tokens=3)
    found = reproduce(resolve_table("pine-table-2"), base, tmp_path, names=["PCW", "PINE", "permutation"], model=lm)
    cells = [(each.row, each.column) for each in found]
    assert cells[:2] == [("PCW", "Full, gold first"), ("PCW", "Full, gold second")]
    assert all(each.ours == 50 and each.published is None for each in found)  # it gives no verdict
    assert len(list(tmp_path.iterdir())) == 3


def test_the_rows_of_an_intervention_are_measured_with_parameters_of_a_file(files, lm, tmp_path):
    parameters = tmp_path / "found.json"
    HiddenScaling(3, -1.0, [1]).save(parameters)
    table = resolve_table("hidden-scaling-table-4")
    base = BenchmarkConfig("mmlu", data=files, limit=1, overflow="trim_segments", intervention=str(parameters))
    rows = tuple(replace(row, values=row.values[:1]) for row in table.rows)
    found = reproduce(replace(table, columns=table.columns[:1], rows=rows), base, tmp_path / "runs", model=lm)
    assert [each.row for each in found] == ["w/ Ours"]
    assert found[0].ours is not None
    (config,) = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/config.json")]
    assert config["intervention"].items() >= {"dimensions": [3], "factor": -1.0, "layers": [1]}.items()


@pytest.mark.parametrize(
    ("model", "rotor", "said"),
    [
        ("Llama-3.1-8B-Instruct", "RoToR-lexical", "accuracy {} plain, {} PINE, **{}** RoToR"),
        ("Qwen1.5-4B-Chat", "RoToR", "Qwen1.5-4B-Chat loses: {}, {}, {}"),
    ],
)
def test_the_published_figures_of_the_readme_are_those_of_the_paper(model, rotor, said):
    rows = [row_of("rotor-table-1", model, name)[1] for name in ("Original", "PINE", rotor)]
    chosen = [[value for label, value in cells.items() if label.startswith("30 documents")] for cells in rows]
    assert said.format(*(f"{sum(values) / len(values):.1f}" for values in chosen)) in README


def test_the_page_of_the_effect_and_the_line_of_the_demo_are_written_from_the_figures_stored_beside_them():
    """They say what was measured, and when, and nothing else."""
    folder = ROOT / "cookbook" / "effect"
    measured, page = json.loads((folder / "effect.json").read_text("utf-8")), runpy.run_path(str(folder / "page.py"))
    published = page["published_slots"](measured["documents"])
    assert page["describe"](measured, published) == (folder / "README.md").read_text("utf-8")
    assert published["Qwen1.5-7B-Chat"]["plain"] == [73.1, 58.6, 55.8, 53.3, 53.2, 52.5, 57.5]
    line = [sys.executable, str(folder / "page.py"), "--line"]
    said = subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout
    assert f"{measured['questions']} questions" in said
    assert f"measured on {measured['date']}, not just now" in said
    plain, rotor = (measured["readers"][name] for name in ("plain model", "RoToR"))
    flips = plain["flips"]
    assert f"plain model {100 * flips['value']:.1f} ({100 * flips['low']:.1f} to" in said
    assert f"**{100 * flips['value']:.1f}%** plain, **{100 * rotor['flips']['value']:.0f}** RoToR" in README
    assert f"accuracy {100 * plain['mean']['value']:.1f} and {100 * rotor['mean']['value']:.1f}%" in README
