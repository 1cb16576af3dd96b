"""The code of the README runs as it stands, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
assert len(EXAMPLES) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of workflows
@pytest.mark.parametrize("example", EXAMPLES, ids=["tutorial", "messages", "agent", "citations"])
def test_the_examples_run(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = re.findall(r"^print\(.*\)  # (.*)", example, flags=re.MULTILINE)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip() == said
