"""What the README, the examples and the notebook of the cookbook tell people can be started, and happens."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from invariant_rag.methods import METHODS, resolve_method
from nbclient import NotebookClient

from tests.servers import TRANSFER, Server
from vllm_invariant_rag.arranged_prompt import check_method

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT.parents[1] / "cookbook" / "09_serve_with_vllm.ipynb"
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
README = (ROOT / "README.md").read_text(encoding="utf-8")
STACK = yaml.safe_load((ROOT / "examples/production-stack.yaml").read_text())["servingEngineSpec"]["modelSpec"][0]
TEXTS = {
    "README.md": README,
    "service": (ROOT / "examples/vllm-invariant-rag.service").read_text(encoding="utf-8"),
    "compose.yaml": yaml.safe_load((ROOT / "examples/compose.yaml").read_text())["services"]["vllm"]["command"][0],
    "production-stack.yaml": "--no-enable-chunked-prefill "
    + " ".join(f"'{each}'" if each.startswith("{") else each for each in STACK["vllmConfig"]["extraArgs"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_launch_line_names_what_exists(name: str) -> None:
    text = TEXTS[name]
    (transfer,) = re.findall(r"--kv-transfer-config\s+'(.*?)'", text, re.DOTALL)
    options: dict[str, Any] = json.loads(transfer)
    assert options == TRANSFER
    assert hasattr(importlib.import_module(options["kv_connector_module_path"]), options["kv_connector"])
    (middleware,) = re.findall(r"--middleware (\S+)", text)
    path, _, attribute = middleware.rpartition(".")
    assert hasattr(importlib.import_module(path), attribute)
    assert "--no-enable-chunked-prefill" in text
    assert STACK["vllmConfig"]["enableChunkedPrefill"] is False


def test_the_table_of_methods_tells_what_the_code_does() -> None:
    rows = re.findall(r"^\| (`.+?) \| (yes).*?\|", README, re.MULTILINE)
    assert {name for names, _ in rows for name in re.findall(r"`(.+?)`", names)} == set(METHODS)
    for name in METHODS:
        check_method(resolve_method(name))


def outputs(notebook: nbformat.NotebookNode) -> tuple[list[tuple[str, str]], list[float]]:
    """What each output is and says, with a mark for each number of many digits; and these numbers."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                continue
            said = output.get("text") or output.get("data", {}).get("text/plain", "")
            found.append(
                (f"{output.output_type} {sorted(output.get('data', ()))}", said.replace(f"{ROOT.parents[1]}/", ""))
            )
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
