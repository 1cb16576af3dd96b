"""What importing the package costs, and what its distribution carries."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files

import pytest

import invariant_rag
from invariant_rag.errors import InvalidChoice

HEAVY = {"bm25s", "faiss", "pypdf", "sentence_transformers", "sklearn", "torch", "transformers", "typer"}


def test_importing_the_package_and_reading_documents_loads_no_heavy_library():
    modules = ("invariant_rag.rag.documents", "invariant_rag.models.embedders", "invariant_rag.rag.retrieval")
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "invariant_rag.rag.retrieval" in loaded
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("package", ["", ".audit", ".models", ".rag"])
def test_every_public_name_of_a_package_exists(package):
    module = import_module(f"invariant_rag{package}")
    assert module.__all__
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense


def test_audit_is_called_as_a_function_whichever_module_of_it_was_imported_first():
    import_module("invariant_rag.audit.statistics")
    for audit in (invariant_rag.audit, import_module("invariant_rag.audit").audit):
        with pytest.raises(InvalidChoice, match="expected questions"):
            audit(print)


def test_the_type_marker_is_shipped_with_one_version():
    assert files("invariant_rag").joinpath("py.typed").is_file()
    assert version("invariant-rag") == invariant_rag.__version__
