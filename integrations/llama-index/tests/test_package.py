from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import llama_index

NAMESPACES = ("llms", "response_synthesizers", "postprocessor", "evaluation", "chat_engine")
OURS = Path(__file__).parent.parent / "llama_index"


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_each_package_is_where_llama_index_users_look(namespace: str) -> None:
    spec = find_spec(f"llama_index.{namespace}.invariant_rag")
    assert spec is not None
    assert Path(str(spec.origin)) == OURS / namespace / "invariant_rag" / "__init__.py"
    assert (OURS / namespace / "invariant_rag" / "py.typed").exists()


def test_no_namespace_is_taken_from_others() -> None:
    assert llama_index.__spec__.origin is None
    assert not list(OURS.glob("__init__.py")) + list(OURS.glob("*/__init__.py"))


def test_importing_brings_no_other_framework_and_no_optional_package() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['langchain', 'langchain_core', 'xgrammar', 'faiss', 'qdrant_client']))\n"
        + "".join(f"import llama_index.{each}.invariant_rag\n" for each in NAMESPACES)
        + "from llama_index.llms.invariant_rag import InvariantLLM\n"
        "from llama_index.core.prompts import PromptTemplate\n"
        "from invariant_rag.errors import ExtraRequired\n"
        "from pydantic import create_model\n"
        "print(len(InvariantLLM(max_tokens=1).complete('Hello').raw))\n"
        "try:\n"
        "    InvariantLLM(max_tokens=1).structured_predict(create_model('A', a=int), PromptTemplate('x'))\n"
        "except ExtraRequired as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "9",
        'xgrammar is not installed; run `pip install "invariant-rag[structured]"`',
    ]
