"""Run `grouped_windowed.py`, which needs a vLLM of its own, in another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self


class Family:
    """The run; a context manager, which launches it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.grouped_windowed", str(self._folder)],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=(self._folder / "log").open("wb"),
            text=True,
            start_new_session=True,  # it has a child, which ends with it
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def answers(self) -> list[dict[str, Any]]:
        """Return the lines that it printed."""
        printed, _ = self._process.communicate()
        assert self._process.returncode == 0, (self._folder / "log").read_text(errors="replace")[-3000:]
        return [json.loads(line[7:]) for line in printed.splitlines() if line.startswith("ANSWER ")]
