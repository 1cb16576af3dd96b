"""Figures that are known beforehand, and published numbers beside them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariant_rag.audit.statistics import wilson_interval

from invariant_rag_benchmarks import BENCHMARKS
from invariant_rag_benchmarks.errors import InvalidRun
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


def test_questions_that_were_asked_in_one_variant_alone_have_no_spread():
    summary = summarize(XQUAD, records([[True], [False]]))
    assert summary["spread"] is summary["deviation"] is None
    apart = [each for number, each in enumerate(records([[True, False]] * 2)) if number in {0, 3}]
    assert summarize(XQUAD, apart)["spread"] is None


def test_a_run_without_records_has_no_figures():
    with pytest.raises(InvalidRun):
        summarize(XQUAD, [])


CONFIG = {"benchmark": "mmlu", "model": "m", "method": "rotor", "ordering": "lexical", "overflow": "error"}


@pytest.mark.parametrize("alpha", [None, 0.2])
def test_a_routed_run_says_how_often_the_invariant_answer_was_kept(alpha: float | None) -> None:
    branches = ("plain", "invariant", "plain", "plain")
    scores = {"scores": {"accuracy": 1.0}, "rejected": {"scores": {"accuracy": 0.0}}}
    asked = [{**each, **scores, "branch": branch} for branch, each in zip(branches, records([[True]] * 4), strict=True)]
    summary = summarize(BENCHMARKS["mmlu"], asked)
    assert summary["figures"] == {"invariant answers kept": 0.25, "oracle of the two branches": 1}
    text = markdown({**CONFIG, "alpha": alpha, "data": {}, "settings": {}}, summary)
    assert ("0.2" in text.splitlines()[0]) == (alpha is not None)
    assert "unknown: no question was asked in all of at least two variants" in text
