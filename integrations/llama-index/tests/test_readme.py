"""The code of the README runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import TEXTS, WordEmbedding
from llama_index.core import Settings

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
assert len(EXAMPLES) == 2


@pytest.mark.parametrize("example", EXAMPLES, ids=["tutorial", "messages"])
def test_the_examples_run(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for index, text in enumerate(TEXTS):
        (tmp_path / "data" / f"{index}.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Settings.embed_model = WordEmbedding()
    small = re.sub(r"InvariantLLM\(.*?\)", "InvariantLLM(max_tokens=4)", example)  # the embedded model
    assert small != example
    exec(compile(small, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
