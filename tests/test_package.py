"""What importing the package costs, and what its distribution carries."""

import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

import invariant_rag

HEAVY = {"bm25s", "faiss", "pypdf", "sentence_transformers", "sklearn", "torch", "transformers", "typer"}


def test_importing_the_package_and_reading_documents_loads_no_heavy_library():
    modules = ("invariant_rag.rag.documents", "invariant_rag.models.embedders", "invariant_rag.rag.retrieval")
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "invariant_rag.rag.retrieval" in loaded
    assert not HEAVY & set(loaded)


def test_there_is_one_version():
    assert version("invariant-rag") == invariant_rag.__version__


def test_every_public_name_exists():
    assert invariant_rag.__all__
    for name in invariant_rag.__all__:
        assert hasattr(invariant_rag, name)


def test_the_type_marker_is_shipped():
    assert files("invariant_rag").joinpath("py.typed").is_file()
