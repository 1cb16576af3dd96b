"""What the README and the examples tell people to start can be started."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from invariant_rag.methods import METHODS, resolve_method

from tests.servers import TRANSFER
from vllm_invariant_rag.reading import check_method

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "examples/vllm-invariant-rag.service")
}
TEXTS["examples/compose.yaml"] = yaml.safe_load((ROOT / "examples/compose.yaml").read_text())["services"]["vllm"][
    "command"
][0]


STACK = yaml.safe_load((ROOT / "examples/production-stack.yaml").read_text())["servingEngineSpec"]["modelSpec"][0]
TEXTS["examples/production-stack.yaml"] = "--no-enable-chunked-prefill " + " ".join(
    each if each.startswith("-") or "{" not in each else f"'{each}'" for each in STACK["vllmConfig"]["extraArgs"]
)


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
