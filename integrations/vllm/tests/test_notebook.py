"""The notebook of the cookbook runs against the server."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.servers import Server

NOTEBOOK = Path(__file__).parents[3] / "cookbook" / "09_serve_with_vllm.ipynb"


@pytest.mark.filterwarnings("default")  # of the kernel's own packages
def test_the_notebook_runs_and_is_kept_without_outputs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_URL", server.url)
    monkeypatch.setenv("VLLM_API_KEY", server.KEY)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "green and black" in printed
    assert "own parameters" in printed
