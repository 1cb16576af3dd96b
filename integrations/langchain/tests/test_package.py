"""What the package brings and what it leaves out."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires

import langchain_invariant_rag

CODE = """
import sys, warnings
for name in ("xgrammar", "langchain", "langchain_classic", "llama_index", "langgraph"):
    sys.modules[name] = None  # an import of it fails
import langchain_invariant_rag as ours
from invariant_rag.errors import ExtraRequired, ToyModelWarning
warnings.simplefilter("ignore", ToyModelWarning)
assert "torch" not in sys.modules
missing = {"InvariantRAGMiddleware": "agents"}
for name in ours.__all__:
    if name not in missing:
        getattr(ours, name)
for name, extra in missing.items():
    try:
        getattr(ours, name)
    except ExtraRequired as error:
        assert f'pip install "langchain-invariant-rag[{extra}]"' in str(error), error
    else:
        raise AssertionError(name)
chat = ours.ChatInvariant(max_tokens=2)
try:
    chat.with_structured_output({"title": "A", "type": "object", "properties": {}}).invoke("hello")
except ExtraRequired as error:
    assert 'pip install "invariant-rag[structured]"' in str(error)
else:
    raise AssertionError("structured output without xgrammar")
assert chat.lm.model is ours.InvariantLLM(method="pine").lm.model
"""


def test_extras_are_optional_and_say_what_to_install() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", CODE], check=True)


def test_it_requires_langchain_core_and_nothing_of_other_frameworks() -> None:
    always = [line for line in requires("langchain-invariant-rag") or [] if "extra ==" not in line]
    assert sorted(re.split("[<>=]", line)[0] for line in always) == ["invariant-rag", "langchain-core"]


def test_every_public_name_is_there() -> None:
    assert {*langchain_invariant_rag.__all__} == {*dir(langchain_invariant_rag), "__version__"}
    assert all(hasattr(langchain_invariant_rag, name) for name in langchain_invariant_rag.__all__)
