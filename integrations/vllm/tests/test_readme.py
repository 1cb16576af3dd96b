"""What the README and the examples tell people to start can be started."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.methods import METHODS, resolve_method
from vllm_invariant_rag.layout import check_method

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "examples/vllm-invariant-rag.service")
}
TEXTS["examples/compose.yaml"] = yaml.safe_load((ROOT / "examples/compose.yaml").read_text())["services"]["vllm"][
    "command"
][0]


@pytest.mark.parametrize("name", TEXTS)
def test_every_launch_line_names_what_exists(name: str) -> None:
    text = TEXTS[name]
    (transfer,) = re.findall(r"--kv-transfer-config\s+'(.*?)'", text, re.DOTALL)
    options: dict[str, Any] = json.loads(transfer)
    module = importlib.import_module(options["kv_connector_module_path"])
    assert hasattr(module, options["kv_connector"])
    assert options["kv_role"] == "kv_consumer"
    assert set(options["kv_connector_extra_config"]) == {"folder"}
    (middleware,) = re.findall(r"--middleware (\S+)", text)
    path, _, attribute = middleware.rpartition(".")
    assert hasattr(importlib.import_module(path), attribute)


def test_the_table_of_methods_tells_what_the_code_does() -> None:
    rows = re.findall(r"^\| (`.+?) \| (yes|refused).*?\|", README, re.MULTILINE)
    told = {name: answer == "yes" for names, answer in rows for name in re.findall(r"`(.+?)`", names)}
    assert set(told) == set(METHODS)
    for name, supported in told.items():
        method = resolve_method(name)
        try:
            check_method(method)
        except UnsupportedCombination:
            assert not supported, name
        else:
            assert supported == (not method.reads_ahead), name


def test_the_compose_file_shares_the_folder_of_its_launch_line() -> None:
    compose = yaml.safe_load((ROOT / "examples/compose.yaml").read_text())
    for service in ("vllm", "application"):
        assert "entries:/entries" in compose["services"][service]["volumes"]
