"""What the README, the examples and the notebook of the cookbook tell people can be started, and happens."""

import importlib
import json
import re
from pathlib import Path

import nbformat
import pytest
import yaml
from invariant_rag.methods import METHODS, resolve_method
from nbclient import NotebookClient

from tests.servers import TRANSFER
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
def test_every_launch_line_names_what_exists(name):
    text = TEXTS[name]
    (transfer,) = re.findall(r"--kv-transfer-config\s+'(.*?)'", text, re.DOTALL)
    assert json.loads(transfer) == TRANSFER
    (middleware,) = re.findall(r"--middleware (\S+)", text)
    for named in (middleware, f"{TRANSFER['kv_connector_module_path']}.{TRANSFER['kv_connector']}"):
        path, _, attribute = named.rpartition(".")
        assert hasattr(importlib.import_module(path), attribute)
    assert "--no-enable-chunked-prefill" in text
    assert STACK["vllmConfig"]["enableChunkedPrefill"] is False


def test_the_table_of_methods_tells_what_the_code_does():
    rows = re.findall(r"^\| (`.+?) \| (yes).*?\|", README, re.MULTILINE)
    assert {name for names, _ in rows for name in re.findall(r"`(.+?)`", names)} == set(METHODS)
    for name in METHODS:
        check_method(resolve_method(name))


def outputs(notebook):
    """What each output is and says, with a mark for each number of many digits; and these numbers."""
    found = [each for cell in notebook.cells for each in cell.get("outputs", ()) if each.get("name") != "stderr"]
    kinds = [f"{each.output_type} {sorted(each.get('data', ()))}" for each in found]
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in found]
    texts = [each.replace(f"{ROOT.parents[1]}/", "") for each in texts]
    marked = [NUMBER.sub("#", each) for each in texts]
    return [*zip(kinds, marked, strict=True)], [float(each) for text in texts for each in NUMBER.findall(text)]


@pytest.mark.filterwarnings("default")  # of the kernel's own packages
def test_the_notebook_has_outputs_and_running_it_gives_them_again(server, monkeypatch):
    monkeypatch.setenv("VLLM_URL", server.url)
    monkeypatch.setenv("VLLM_API_KEY", server.KEY)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (kept, numbers), code = outputs(notebook), [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(kept) == len(code) + 1  # with a figure
    private = r"(/tmp|/home|/root|/work|/Users)/|127\.0\.0\.1:(?!8000)"
    assert not re.search(private, str([each.outputs for each in code]))
    NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True).execute()
    again, numbers_again = outputs(notebook)
    assert again == kept
    assert numbers_again == pytest.approx(numbers, abs=2e-3)  # log-probabilities, by the kernels of this machine
    printed = " ".join(said for _, said in kept)
    assert "green and black" in printed
    assert "own parameters" in printed
