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
    exec(compile(example, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    assert capsys.readouterr().out.strip() == said


def test_the_tutorial_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "tutorials" / "llamaindex.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "tutorial"}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(code, "llamaindex.md", "exec", dont_inherit=True), namespace)
        said = re.findall(r"^ *print\(.*\)  # (.*)", code, flags=re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == said


def test_the_code_for_llamaindex_in_the_readme_of_the_project_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "llama_index" in each)
    exec(code.replace('model="Qwen/Qwen2.5-7B-Instruct", ', ""), {"__name__": "readme"})
    assert capsys.readouterr().out.endswith(" True\n")
