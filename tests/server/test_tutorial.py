"""The tutorial's code, against a real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "server.md"


def test_the_tutorial_s_code_gets_an_answer_with_citations(base_url: str) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = code.replace("http://localhost:8000", base_url).replace("Qwen/Qwen2.5-7B-Instruct", "small")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert "red and white" in namespace["reply"].choices[0].message.content
    assert len(namespace["reply"].invariant["order"]) == 2
