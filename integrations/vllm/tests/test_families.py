"""Models with grouped heads and a sliding window answer on vLLM as they do here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.grouped_windowed import METHODS


def test_grouped_heads_and_a_sliding_window_give_the_tokens_of_generate(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.grouped_windowed", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert [each["method"] for each in answers[:-1]] == METHODS
    assert all(each["same"] and each["distance"] < 1e-3 for each in answers[:-1]), answers
    assert answers[-1] == {"refused": "UnsupportedCombination"}
