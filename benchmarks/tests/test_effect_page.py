"""Claims about the page of the effect: it says what was measured, and when, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "cookbook" / "effect"
MEASURED = json.loads((FOLDER / "effect.json").read_text(encoding="utf-8"))


def test_the_page_is_written_from_the_figures_that_are_stored_beside_it() -> None:
    spec = importlib.util.spec_from_file_location("effect_page", FOLDER / "page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    published = page.published_slots(MEASURED["documents"])
    assert page.describe(MEASURED, published) == (FOLDER / "README.md").read_text(encoding="utf-8")
    assert published["Qwen1.5-7B-Chat"]["plain"] == [73.1, 58.6, 55.8, 53.3, 53.2, 52.5, 57.5]


def test_the_demo_ends_with_many_questions_and_says_when_they_were_asked() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "page.py"), "--line"], check=True, capture_output=True, text=True, timeout=60
    )
    assert f"{MEASURED['questions']} questions" in done.stdout
    assert f"measured on {MEASURED['date']}, not just now" in done.stdout
    flips = MEASURED["readers"]["plain model"]["flips"]
    assert f"plain model {100 * flips['value']:.1f} ({100 * flips['low']:.1f} to" in done.stdout
