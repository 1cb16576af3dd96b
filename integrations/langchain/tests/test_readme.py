"""The code in README.md runs as it stands, with the embedded model in place of the large one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .shared import DOCUMENTS, HASHES, Listed

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_code_of_the_readme_runs() -> None:
    assert len(BLOCKS) == 2
    names: dict[str, Any] = {"retriever": Listed(documents=DOCUMENTS), "documents": DOCUMENTS, "BaseModel": BaseModel}
    for block in BLOCKS:
        code = block.replace('model="Qwen/Qwen2.5-7B-Instruct"', "")
        exec(code.replace("chain.invoke", "answer = chain.invoke").replace("chat.with", "parsed = chat.with"), names)
    assert sorted(names["answer"].response_metadata["order"]) == HASHES
    assert isinstance(names["parsed"], names["Departure"])
