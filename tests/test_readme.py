"""What the README shows is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from invariant_rag.interventions import INTERVENTIONS
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS
from invariant_rag.testing import MethodContract

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_every_method_intervention_and_ordering_has_its_row() -> None:
    for name in (*METHODS, *INTERVENTIONS, *ORDERINGS):
        assert f"| `{name}` |" in README


@pytest.mark.parametrize("law", [name for name in dir(MethodContract) if name.startswith("test_")])
def test_the_method_of_the_readme_keeps_the_laws(law: str) -> None:
    (block,) = (block for block in BLOCKS if "RowMethod" in block)
    namespace: dict[str, type] = {}
    exec(block, namespace)

    class Contract(MethodContract):
        method = namespace["Pairs"]()

    getattr(Contract(), law)()


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    # files; above; another package; a server: tests/server
    elsewhere = ("RAG.from_documents", "RowMethod", "langchain_invariant_rag", "from openai")
    blocks = [block for block in BLOCKS if not any(word in block for word in elsewhere)]
    assert len(blocks) == len(BLOCKS) - len(elsewhere) == 5
    for block in blocks:
        embedded = re.sub(r'from_pretrained\(".*?"\)', "from_pretrained()", block)
        exec(compile(embedded, "README.md", "exec"), namespace)
    assert namespace["answer"].text == namespace["cold"].text == "red and white"  # type: ignore[attr-defined]
    assert namespace["warm"].text == "80 miles"  # type: ignore[attr-defined]
    assert namespace["verdict"].winner in {0, 1}  # type: ignore[attr-defined]
    assert namespace["warm"].usage.cached_tokens > namespace["cold"].usage.cached_tokens == 0  # type: ignore[attr-defined]


def test_all_code_of_the_readme_compiles() -> None:
    assert BLOCKS
    for block in BLOCKS:
        compile(block, "README.md", "exec")
