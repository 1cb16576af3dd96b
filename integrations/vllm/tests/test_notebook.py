"""The notebook of the cookbook has outputs, and running it against the server gives them again."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.servers import Server

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "cookbook" / "09_serve_with_vllm.ipynb"
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def outputs(notebook: nbformat.NotebookNode) -> tuple[list[tuple[str, str]], list[float]]:
    """What each output is and says, with a mark for each number of many digits; and these numbers."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                continue
            said = output.get("text") or output.get("data", {}).get("text/plain", "")
            found.append((f"{output.output_type} {sorted(output.get('data', ()))}", said.replace(f"{ROOT}/", "")))
    texts = [(kind, NUMBER.sub("#", said)) for kind, said in found]
    return texts, [float(each) for _, said in found for each in NUMBER.findall(said)]


@pytest.mark.filterwarnings("default")  # of the kernel's own packages
def test_the_notebook_has_outputs_and_running_it_gives_them_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_URL", server.url)
    monkeypatch.setenv("VLLM_API_KEY", server.KEY)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept, numbers = outputs(notebook)
    assert len(kept) == len([cell for cell in notebook.cells if cell.cell_type == "code"]) + 1  # with a figure
    assert not re.search(
        r"(/tmp|/home|/root|/work|/Users)/|127\.0\.0\.1:(?!8000)", str([c.get("outputs") for c in notebook.cells])
    )
    NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True).execute()
    again, numbers_again = outputs(notebook)
    assert again == kept
    assert numbers_again == pytest.approx(numbers, abs=2e-3)  # log-probabilities, by the kernels of this machine
    printed = " ".join(said for _, said in kept)
    assert "green and black" in printed
    assert "own parameters" in printed
