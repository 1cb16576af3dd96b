"""Other models answer on vLLM as here: grouped heads, norms of queries, sliding windows, heads of two workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.family import METHODS


def answers(folder: Path, family: str, **settings: Any) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.family", str(folder), family, json.dumps(settings)]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("ANSWER ")]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"hidden_size": 256}),  # the size of a head follows from the width
    "qwen3": ("qwen3", {}),
    "two workers": ("llama", {"engine": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_family_gives_the_tokens_of_generate(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    found = answers(tmp_path, family, **settings)
    assert [each["method"] for each in found[::2]] == list(METHODS)
    assert all(each["same"] for each in found), found
    assert all((each["cached"] > 0) == (each["method"] != "pine") for each in found[1::2]), found


def test_behind_a_sliding_window_nothing_is_reused_and_methods_that_look_back_are_refused(tmp_path: Path) -> None:
    """Mistral with a window of 48 tokens, and a prompt of 162."""
    for each in answers(tmp_path, "mistral", sliding_window=48):
        if each["method"] in ("set-based", "pine"):
            assert "sliding window of 48" in each["refused"]
        else:
            assert each["same"], each
            assert each["method"] == "sequential" or each["cached"] == 0
