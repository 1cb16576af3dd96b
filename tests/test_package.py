"""What importing the package costs, what its distribution carries, and what never changes."""

import copy
import pickle
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files

import pytest

import invariant_rag
from invariant_rag.errors import ImmutableObject, InvalidChoice
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS

HEAVY = {"bm25s", "faiss", "pypdf", "sentence_transformers", "sklearn", "torch", "transformers", "typer"}
HEAVY |= {"jinja2", "langchain_core", "llama_index", "pandas", "scipy"}


def test_importing_the_package_and_reading_documents_loads_no_heavy_library():
    modules = ("invariant_rag.rag.documents", "invariant_rag.models.embedders", "invariant_rag.rag.retrieval")
    modules += ("invariant_rag.audit.systems", "invariant_rag.audit.report", "invariant_rag.audit.questions")
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "invariant_rag.rag.retrieval" in loaded
    assert not HEAVY & set(loaded)


def test_every_public_name_of_a_package_exists_and_types_are_shipped_with_one_version():
    for package in ("", ".audit", ".models", ".rag"):
        module = import_module(f"invariant_rag{package}")
        assert module.__all__
        assert all(hasattr(module, name) for name in module.__all__)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = module.nonsense
    import_module("invariant_rag.audit.statistics")  # whichever module of it was imported first
    for audit in (invariant_rag.audit, import_module("invariant_rag.audit").audit):
        with pytest.raises(InvalidChoice, match="expected questions"):
            audit(print)
    assert files("invariant_rag").joinpath("py.typed").is_file()
    assert version("invariant-rag") == invariant_rag.__version__


# --- orderings and methods never change once they are built ---


@pytest.mark.parametrize("kind", [*ORDERINGS.values(), *METHODS.values()])
def test_an_attribute_is_neither_assigned_nor_deleted(kind):
    for built in (kind(), copy.deepcopy(kind()), pickle.loads(pickle.dumps(kind()))):
        before = dict(vars(built))
        for name in ("name", "invariant", "new", *(each for each in before if not each.startswith("_"))):
            with pytest.raises(AttributeError):  # of a dataclass, or ours
                setattr(built, name, "other")
        with pytest.raises(AttributeError):
            del built.name
        assert {**vars(built), "_lock": 0} == {**before, "_lock": 0}


def test_a_subclass_may_set_what_it_likes_while_it_is_built_and_errors_say_what_never_changes():
    class Mine(ORDERINGS["lexical"]):
        def __init__(self):
            self.name = self.weight = "mine"

    assert Mine().weight == "mine"
    with pytest.raises(ImmutableObject, match="expected 'weight' of Mine to be neither assigned nor deleted"):
        Mine().weight = "other"
