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


def test_every_method_that_the_readme_recommends_exists() -> None:
    section = README.split("## Which method when")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z-]+)`", section)) - {"canonical", "vote"}
    assert {"rotor", "pine", "sequential"} <= named <= set(METHODS)
    assert len(METHODS) == 10, "the README says ten"


def test_the_readme_fits_one_screen_before_its_depth() -> None:
    assert README.index("## In one minute") < 1600
    assert README.index("## What it does") < 3800
    assert len(README.splitlines()) < 200


def test_the_first_screen_answers_what_everybody_asks() -> None:
    minute = README.split("## In one minute")[1].split("\n## ")[0]
    asked = {
        "need it",
        "exact",
        "model",
        "GPU",
        "LangChain, LlamaIndex",
        "vLLM",
        "OpenAI client",
        "API",
        "method",
        "cost",
        "not do",
    }
    for words in (*asked, "Licence"):
        assert re.search(rf"^\| [^|]*{words}[^|]*\? \| .+ \|$", minute, re.MULTILINE), words
    before = README.split("## In one minute")[0]
    assert "pip install invariant-rag" in before


def gigabytes(size: float) -> float:
    return round(size / 1e9, 2)


@pytest.mark.parametrize("row", re.findall(r"^\| (\S+?-Instruct \| [\d.]+ \| .*) \|$", INSTALL, re.MULTILINE))
def test_the_gpu_memory_that_is_named_is_the_arithmetic_that_is_named(row: str) -> None:
    model, billions, shape, width, weights, token, prompt, work = row.replace(",", "").split(" | ")
    layers, heads, size = map(int, shape.split(" × "))
    a_token = 2 * layers * heads * size * 2
    assert weights == f"{float(billions) * 2:.1f} GB"
    assert token == f"{a_token} bytes"
    assert prompt == f"{gigabytes(5000 * a_token):.2f} GB"
    assert work == f"{gigabytes(5000 * 3 * int(width) * 2):.2f} GB"
    if model == "Qwen2.5-7B-Instruct":
        sums = (
            f"{billions} billion × 2 = {weights}",
            f"2 × {shape} × 2 × 5000 = {prompt}",
            f"3 × {width} × 2 × 5000 = {work}",
        )
        assert all(each in README.replace(",", "") for each in sums)
