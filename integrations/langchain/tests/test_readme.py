"""The code in README.md runs, and prints what it says; the embedded model takes the place of a large one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 4
    names: dict[str, Any] = {}
    for block in BLOCKS:
        code = block.replace('\nchat = ChatInvariant(model="Qwen/Qwen2.5-7B-Instruct")', "\nchat = ChatInvariant()")
        exec(code.replace("chat.with", "parsed = chat.with"), names)
        said = re.findall(r"^print\(.*\)  # (.*)", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == said
    assert isinstance(names["parsed"], names["Flag"])


def test_the_code_for_langchain_in_the_readme_of_the_project_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (README.parent.parent.parent / "README.md").read_text(encoding="utf-8")
    ours = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "langchain_invariant_rag" in code]
    assert ours
    for code in ours:
        exec(code.replace('model="Qwen/Qwen2.5-7B-Instruct", ', ""), {})
    assert capsys.readouterr().out.endswith(" True\n")


def test_the_tutorial_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (README.parents[2] / "docs" / "tutorials" / "langchain.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
        said = re.findall(r"^print\(.*\)  # (.*)", code, re.MULTILINE)
        assert capsys.readouterr().out.splitlines()[: len(said)] == said
