"""Figures that are known beforehand, and published numbers beside them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariant_rag.audit.statistics import wilson_interval

from invariant_rag_benchmarks import BENCHMARKS, Selection
from invariant_rag_benchmarks.data import DataSource
from invariant_rag_benchmarks.errors import InvalidRun
from invariant_rag_benchmarks.published_tables import comparisons
from invariant_rag_benchmarks.report import markdown, summarize

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
    summary = summarize(XQUAD, records([[True, False, False, False]] * 50))
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
    summary = summarize(XQUAD, records([[True] * 3] * 6 + [[False] * 3] * 4))
    assert [summary[name]["value"] for name in ("mean", "worst", "spread", "flips")] == [0.6, 0.6, 0, 0]
    share = wilson_interval(6, 10).as_dict()
    assert (
        summary["mean"] == summary["scores"]["best_subspan_em"] == summary["variants"]["0"]["best_subspan_em"] == share
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
def test_figures_agree_with_each_other(right):
    summary = summarize(XQUAD, records(right))
    assert summary["worst"]["value"] <= summary["mean"]["value"] <= summary["best"]["value"]
    assert summary["best"]["value"] - summary["worst"]["value"] == pytest.approx(summary["flips"]["value"], abs=1e-5)
    for name in ("mean", "worst", "best", "flips", "spread", "deviation"):
        assert 0 <= summary[name]["low"] <= summary[name]["value"] <= summary[name]["high"] <= 1


def test_flips_are_the_share_of_questions_without_one_answer_in_every_order():
    """Over all orders of five documents: questions with sensitivity to permutations (Stable-RAG)."""
    asked = [
        {**each, "answer": answer}
        for each, answer in zip(records([[True] * 120] * 4), ["a"] * 360 + ["a"] * 119 + ["b"], strict=True)
    ]
    summary = summarize(XQUAD, asked)
    assert summary["flips"] == wilson_interval(1, 4).as_dict()


def test_an_order_blind_solver_of_problems_of_many_sizes_has_no_spread(tmp_path):
    """Problems with more conditions are harder: their orders would be compared with those of easy problems."""
    problems = []
    for size in (2, 3, 4, 5) * 10:
        conditions = [f"Ann finds {number} pens." for number in range(size)]
        asked = f"{' '.join(conditions)} How many pens has she?"
        problems.append({"question": asked, "interchangeable": conditions, "answer": str(sum(range(size)))})
    file = tmp_path / "r_gsm.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in problems))
    benchmark = BENCHMARKS["r-gsm"]
    asked = []
    for case in benchmark.load(DataSource(file), benchmark.parse_settings({}), Selection()):
        said = f"Answer: {case.gold[0] if len(case.segments) < 4 else 'none'}"
        scored = benchmark.score(case, said)
        scores = {"answer": scored.answer, "scores": dict(scored.scores), "dropped": 0, "trimmed": 0}
        asked.append({"id": case.id, "question": case.question, "variant": case.variant, "group": "", **scores})
    assert {each["variant"] for each in asked} == {"initial", "reversed", *(f"random {k}" for k in (1, 2, 3, 4))}
    summary = summarize(benchmark, asked)
    assert (summary["mean"]["value"], summary["spread"]["value"], summary["flips"]["value"]) == (0.5, 0, 0)


def test_questions_that_were_asked_in_one_variant_alone_have_no_spread():
    summary = summarize(XQUAD, records([[True], [False]]))
    assert summary["spread"] is summary["deviation"] is None
    apart = [each for number, each in enumerate(records([[True, False]] * 2)) if number in {0, 3}]
    assert summarize(XQUAD, apart)["spread"] is None


def test_a_run_without_records_has_no_figures():
    with pytest.raises(InvalidRun):
        summarize(XQUAD, [])


# --- published numbers ----------------------------------------------------------------------------------------------


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
    assert (first.published, first.ours, first.cells[-1]) == (61.4, 100.0, "+38.6")
    assert found["10 documents, gold at 9"].cells[-2:] == ["not measured", ""]
    others = ({"settings": {**config["settings"], "template": "plain"}}, {"method": "ape"}, {"model": "gpt2"})
    for other in (*others, {"data": {"nq-open-oracle.jsonl.gz": "its distractors are easier"}}):
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
    text = markdown(config, summarize(BENCHMARKS["lost-in-the-middle"], asked), asked)
    assert "unknown: no question was asked in all of at least two variants" in text
    assert "| Original | 20 documents, gold at 0 | 59.5 | 50.0 (9.5 to 90.5) | -9.5 |" in text


@pytest.mark.parametrize(
    ("alpha", "published"),
    [
        (None, {"RoToR": 63.2, "ours-lexical, no routing": 63.2}),
        (
            0.2,
            {"RoToR + S.R.": 68.5, "RoToR + S.R. (Oracle)": 75.0, "ours-lexical, 0.2": 68.5, "Lexical": 7.0},
        ),
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
        {
            **each,
            "variant": "0123",
            "branch": branch,
            "scores": {"accuracy": 1.0},
            "rejected": {"scores": {"accuracy": 0.0}},
        }
        for branch, each in zip(("plain", "invariant", "plain", "plain"), records([[True]] * 4), strict=True)
    ]
    found = [
        each
        for orders in ("all", "0")
        for each in comparisons({**config, "settings": {"split": "test", "orders": orders}}, asked)
    ]
    initial = {each.row: each.published for each in found if each.column in {"initial order", "test"}}
    assert initial == published
    summary = summarize(BENCHMARKS["mmlu"], asked)
    assert summary["figures"] == {"invariant answers kept": 0.25, "oracle of the two branches": 1}
    title = markdown({**config, "settings": {"split": "test"}}, summary, asked).splitlines()[0]
    assert ("0.2" in title) == (alpha is not None)
