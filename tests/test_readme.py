"""What the README shows is true, and what it no longer lists is in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from invariant_rag.evaluation.benchmarks.published_tables import resolve_table
from invariant_rag.interventions import INTERVENTIONS
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLES = (ROOT / "docs" / "reference" / "methods.md").read_text(encoding="utf-8")


def test_every_method_intervention_and_ordering_has_its_row() -> None:
    for name in (*METHODS, *INTERVENTIONS, *ORDERINGS):
        assert f"| `{name}` |" in TABLES


def test_every_method_that_the_readme_recommends_exists() -> None:
    section = README.split("## Which method when")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z-]+)`", section)) - {"canonical", "vote"}
    assert {"rotor", "pine", "sequential"} <= named <= set(METHODS)
    assert len(METHODS) == 14, "the README says fourteen"


@pytest.mark.parametrize("model", ["Llama-3.1-8B-Instruct", "Qwen1.5-7B-Chat", "Qwen1.5-4B-Chat"])
def test_the_published_figures_of_the_readme_are_those_of_the_paper(model: str) -> None:
    table = resolve_table("rotor-table-1")
    chosen = [index for index, column in enumerate(table.columns) if column.settings["documents"] == 30]
    rows = {row.name: row.values for row in table.rows if row.model.endswith(f"/{model}")}
    told = []
    for name in ("Original", "PINE", "RoToR-lexical" if "RoToR-lexical" in rows else "RoToR"):
        values = [value for index in chosen if (value := rows[name][index]) is not None]
        told.append(f"{sum(values) / len(values):.1f}, {min(values):.1f}")
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {model} |"))
    assert line.replace("*", "").split(" | ")[1:] == [*told[:2], f"{told[2]} |"]


def test_the_readme_fits_one_screen_before_its_depth() -> None:
    assert README.index("## What it does") < 2600
    assert len(README.splitlines()) < 200
