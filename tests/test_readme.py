"""What the README shows is true, and what it no longer lists is in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from invariant_rag.interventions import INTERVENTIONS
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLES = (ROOT / "docs" / "reference" / "methods.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")


def test_every_method_intervention_and_ordering_has_its_row() -> None:
    for name in (*METHODS, *INTERVENTIONS, *ORDERINGS):
        assert f"| `{name}` |" in TABLES


CHOICE = (ROOT / "docs" / "how-to" / "choose-a-method.md").read_text(encoding="utf-8")


def test_every_method_that_is_recommended_exists() -> None:
    chosen = [row.split(" | ")[1] for row in re.findall(r"^\|.*\|$", CHOICE, re.MULTILINE)]
    named = set(re.findall(r"`([a-z-]+)`", " ".join(chosen))) - {"canonical", "vote", "lexical"}
    assert {"rotor", "pine", "sequential"} <= named <= set(METHODS)


def test_the_readme_is_one_screen() -> None:
    prose = re.sub(r"```.*?```|<img[^>]*>", "", README, flags=re.DOTALL)
    assert len(re.sub(r"\]\([^)]*\)", "]", prose).split()) <= 600
    before = README.split("```python")[0]
    assert "pip install invariant-rag" in before
    assert "whl/cpu" in before


def test_every_figure_of_the_readme_has_its_conditions() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", README.split("## Four figures")[1].split("\n## ")[0], re.MULTILINE)[1:]
    assert len(rows) == 4
    for figure, conditions in rows:
        assert re.search(r"\d\.\d", figure)
        assert re.search(r"\]\(.+\)", conditions), figure


def gigabytes(size: float) -> float:
    return round(size / 1e9, 2)


@pytest.mark.parametrize("row", re.findall(r"^\| (\S+?-Instruct \| [\d.]+ \| .*) \|$", INSTALL, re.MULTILINE))
def test_the_gpu_memory_that_is_named_is_the_arithmetic_that_is_named(row: str) -> None:
    _, billions, shape, width, weights, token, prompt, work = row.replace(",", "").split(" | ")
    layers, heads, size = map(int, shape.split(" × "))
    a_token = 2 * layers * heads * size * 2
    assert weights == f"{float(billions) * 2:.1f} GB"
    assert token == f"{a_token} bytes"
    assert prompt == f"{gigabytes(5000 * a_token):.2f} GB"
    assert work == f"{gigabytes(5000 * 3 * int(width) * 2):.2f} GB"
