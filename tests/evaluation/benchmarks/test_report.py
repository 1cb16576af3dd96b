"""Figures that are known beforehand, and published numbers beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag.errors import InvalidChoice, InvalidRun, UnknownName
from invariant_rag.evaluation.benchmarks import BENCHMARKS, Case
from invariant_rag.evaluation.benchmarks.config import BenchmarkConfig
from invariant_rag.evaluation.benchmarks.published_tables import (
    comparisons,
    is_same_model,
    published_tables,
    resolve_table,
)
from invariant_rag.evaluation.benchmarks.report import markdown, summarise
from invariant_rag.evaluation.benchmarks.reproduction import configs_to_run, reproduce, rows_to_measure
from invariant_rag.evaluation.statistics import wilson_interval
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS

XQUAD = BENCHMARKS["xquad"]


def records(right: list[list[bool]]) -> list[dict]:
    """One row per question, one column per slot."""
    return [
        {
            "id": f"{question}/{slot}",
            "question": str(question),
            "variant": str(slot),
            "group": "",
            "answer": "right" if good else "wrong",
            "scores": {"best_subspan_em": float(good), "exact_match": 0.0},
            "dropped": 0,
            "trimmed": 0,
        }
        for question, row in enumerate(right)
        for slot, good in enumerate(row)
    ]


def test_a_reader_of_the_first_slot_only_has_the_figures_of_one():
    summary = summarise(XQUAD, records([[True, False, False, False]] * 50))
    values = {name: summary[name]["value"] for name in ("mean", "worst", "best", "spread", "deviation", "flips")}
    assert values == {
        "mean": 0.25,
        "worst": 0,
        "best": 1,
        "spread": 1,
        "deviation": pytest.approx(0.1875**0.5, abs=1e-6),
        "flips": 1,
    }
    assert summary["variants"]["0"]["best_subspan_em"]["value"] == 1


def test_a_reader_who_is_fair_has_no_spread_and_no_flips():
    summary = summarise(XQUAD, records([[True] * 3] * 6 + [[False] * 3] * 4))
    assert [summary[name]["value"] for name in ("mean", "worst", "spread", "flips")] == [0.6, 0.6, 0, 0]
    assert summary["mean"] == wilson_interval(6, 10).as_dict()


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
def test_figures_agree_with_each_other(right):
    summary = summarise(XQUAD, records(right))
    assert summary["worst"]["value"] <= summary["mean"]["value"] <= summary["best"]["value"]
    assert summary["best"]["value"] - summary["worst"]["value"] == pytest.approx(summary["flips"]["value"], abs=1e-5)
    for name in ("mean", "worst", "best", "flips", "spread", "deviation"):
        assert summary[name]["low"] - 1e-6 <= summary[name]["high"] <= 1


def test_a_run_without_records_has_no_figures():
    with pytest.raises(InvalidRun):
        summarise(XQUAD, [])


# --- published numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", published_tables())
def test_every_column_can_be_measured(name):
    columns = resolve_table(name).columns
    assert columns
    for column in columns:
        benchmark = BENCHMARKS[column.benchmark]
        assert benchmark.parse_settings(column.settings)
        candidates = (" A", " B", " C", " D")
        case = Case("q", "0123", "", (), "", ("0",), candidates=candidates)
        metrics = benchmark.score(case, " A").scores
        if not column.metric.startswith("figure: "):
            assert column.metric in metrics


@pytest.mark.parametrize("name", published_tables())
def test_every_method_and_ordering_is_one_of_ours(name):
    rows = resolve_table(name).rows
    assert {row.method for row in rows} - {""} <= set(METHODS)
    assert {row.ordering for row in rows} - {""} <= set(ORDERINGS)
    for row in rows:
        assert all(value is None or 0 <= value <= 100 for value in row.values)
        assert any(value is not None for value in row.values)


def test_a_known_setting_is_set_beside_its_published_number():
    config = {
        "benchmark": "lost-in-the-middle",
        "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "method": "rotor",
        "ordering": "lexical",
        "alpha": None,
        "settings": {"documents": 10, "slots": "", "index": False, "template": "paper"},
    }
    asked = records([[True, False]] * 3 + [[True, True]])
    found = {each.column: each for each in comparisons(config, asked)}
    assert [*found] == ["10 documents, gold at 0", "10 documents, gold at 4", "10 documents, gold at 9"]
    first = found["10 documents, gold at 0"]
    assert (first.published, first.ours, first.difference_shown) == (61.4, 100.0, "+38.6")
    assert found["10 documents, gold at 9"].ours_shown == "not measured"
    for other in ({"settings": {**config["settings"], "template": "plain"}}, {"method": "ape"}, {"model": "gpt2"}):
        assert comparisons({**config, **other}, asked) == []


def test_a_report_prints_the_published_column_and_the_difference():
    config = {
        "benchmark": "lost-in-the-middle",
        "model": "Qwen/Qwen1.5-4B-Chat",
        "method": "sequential",
        "ordering": "given",
        "alpha": None,
        "settings": {"documents": 20, "slots": "", "index": False, "template": "paper"},
        "data": {"file": "digest"},
        "overflow": "error",
    }
    asked = records([[True], [False]])
    text = markdown(config, summarise(BENCHMARKS["lost-in-the-middle"], asked), asked)
    assert "| Original | 20 documents, gold at 0 | 59.5 | 50.0 (9.5 to 90.5) | -9.5 |" in text


@pytest.mark.parametrize(
    ("alpha", "published"),
    [
        (None, {"RoToR": 63.2, "ours-lexical, no routing": 63.2}),
        (0.2, {"RoToR + S.R.": 68.5, "ours-lexical, 0.2": 68.5}),
    ],
)
def test_a_routed_run_is_set_beside_the_routed_rows_alone(alpha, published):
    config = {
        "benchmark": "mmlu",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "method": "rotor",
        "ordering": "lexical",
        "alpha": alpha,
        "overflow": "error",
        "data": {},
    }
    asked = [
        {**each, "variant": "0123", "branch": branch, "scores": {"accuracy": 1.0}}
        for branch, each in zip(("plain", "invariant", "plain", "plain"), records([[True]] * 4), strict=True)
    ]
    found = [
        each
        for orders in ("all", "0")
        for each in comparisons({**config, "settings": {"split": "test", "orders": orders}}, asked)
    ]
    initial = {each.row: each.published for each in found if each.column in {"initial order", "test"}}
    assert initial == published
    summary = summarise(BENCHMARKS["mmlu"], asked)
    assert summary["figures"] == {"invariant answers kept": 0.25}
    title = markdown({**config, "settings": {"split": "test"}}, summary, asked).splitlines()[0]
    assert ("0.2" in title) == (alpha is not None)


def test_routed_rows_are_planned_with_their_margin():
    table = resolve_table("rotor-table-3")
    rows = rows_to_measure(table, "Qwen/Qwen1.5-4B-Chat", ["RoToR", "RoToR + S.R.", "RoToR + S.R. (Oracle)"])
    wanted = configs_to_run(rows, table.columns, BenchmarkConfig("mmlu")).values()
    assert [(config.method, config.ordering, config.alpha) for config in wanted] == [
        ("rotor", "lexical", None),
        ("rotor", "lexical", 0.2),
    ]


def test_the_others_of_mmlu_are_all_orders_but_the_first():
    column = resolve_table("rotor-table-3").columns[-1]
    variants = ["0123", "0132", "3210"]
    chosen = column.select({"variant": variant, "group": ""} for variant in variants)
    assert [record["variant"] for record in chosen] == ["0132", "3210"]


def test_names_of_one_model_are_told_from_those_of_others():
    assert is_same_model("Qwen/Qwen1.5-7B-Chat", "/data/qwen1.5-7b-chat")
    assert not is_same_model("Qwen/Qwen1.5-7B-Chat", "Qwen/Qwen1.5-7B")


def test_a_table_takes_one_run_per_method_and_setting():
    table = resolve_table("rotor-table-1")
    rows = rows_to_measure(table, "meta-llama/Llama-3.1-70B-Instruct")
    assert [row.name for row in rows] == ["Original", "PINE", "RoToR", "RoToR-MonoT5"]
    wanted = configs_to_run(rows, table.columns, BenchmarkConfig("lost-in-the-middle")).values()
    assert {(config.method, config.settings["documents"]) for config in wanted} == {
        (method, documents) for method in ("sequential", "pine", "rotor") for documents in (10, 20)
    }
    assert len(wanted) == 8


def test_an_unknown_model_gets_every_method_and_no_published_number():
    rows = rows_to_measure(resolve_table("pine-table-2"), None)
    assert [row.name for row in rows] == ["NIA", "PCW", "SP", "PINE"]
    assert all(value is None for row in rows for value in row.values)


def test_rows_and_tables_that_are_not_there_are_refused_with_those_that_are():
    with pytest.raises(InvalidChoice, match="PCW"):
        rows_to_measure(resolve_table("pine-table-2"), None, ["RoToR"])
    with pytest.raises(UnknownName, match="rotor-table-1"):
        resolve_table("rotor-table-11")


def test_a_table_is_measured_cell_by_cell(data_of, lm, tmp_path):
    base = BenchmarkConfig("reward-bench", data=data_of("reward-bench"), max_new_tokens=3)
    found = reproduce(resolve_table("pine-table-2"), base, tmp_path, names=["PCW", "PINE"], model=lm)
    assert [(each.row, each.column) for each in found][:2] == [
        ("PCW", "Full, gold first"),
        ("PCW", "Full, gold second"),
    ]
    assert all(each.ours == 50 and each.published is None for each in found)  # it gives no verdict
    assert len(list(tmp_path.iterdir())) == 2
