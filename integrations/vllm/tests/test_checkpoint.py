"""The files of a model tell which model it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.errors import UnsupportedCombination, UnsupportedModel
from invariant_rag.models.embedded import EMBEDDED

from vllm_invariant_rag import PrefillWorker
from vllm_invariant_rag.checkpoint import check_weights, checkpoint_folder, fingerprint

FILES = EMBEDDED["generator"]


def test_copies_have_one_fingerprint_and_other_models_another(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(FILES, tmp_path / "copy"))
    assert fingerprint(copy) == fingerprint(Path(FILES)) != fingerprint(Path(EMBEDDED["native"]))
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert fingerprint(copy) != fingerprint(Path(FILES))


def test_the_configuration_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(FILES, tmp_path / "copy"))
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace("10000000.0", "10000.0"))
    assert fingerprint(copy) != fingerprint(Path(FILES))


def test_names_without_files_here_are_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path), "nobody/has-this-model"):
        with pytest.raises(UnsupportedModel, match="expected"):
            checkpoint_folder(name)


def test_a_worker_refuses_weights_that_are_not_those_of_the_files(tmp_path: Path) -> None:
    lm = InvariantModel.from_pretrained()
    check_weights(lm.model, Path(FILES))
    check_weights(lm.model.to(torch.bfloat16), Path(FILES))
    changed = InvariantModel.from_pretrained()
    worker = PrefillWorker(changed, tmp_path)
    prepared = changed.prepare_to_generate(changed.chat_prompt("q", ["one", "two"]), 4)
    with torch.no_grad():
        changed.model.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    with pytest.raises(UnsupportedModel, match="down_proj"):
        PrefillWorker(changed, tmp_path)
    with pytest.raises(UnsupportedModel, match="down_proj"):
        worker.prefill(changed, prepared)


def test_a_worker_refuses_a_model_with_hooks_which_vllm_does_not_run(tmp_path: Path) -> None:
    lm = InvariantModel.from_pretrained()
    worker = PrefillWorker(lm, tmp_path)
    prepared = lm.prepare_to_generate(lm.chat_prompt("q", ["one", "two"]), 4)
    lm.model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedCombination, match=r"a hook of model\.layers\.0"):
        worker.prefill(lm, prepared)
