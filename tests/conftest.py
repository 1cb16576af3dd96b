"""One thread, unless told: the models are tiny, and threads that wait for each other only make them slow."""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.testing
from hypothesis import settings
from transformers import AutoModelForCausalLM

from invariant_rag import InvariantModel
from invariant_rag.testing import tiny_model, toy_tokenizer

settings.register_profile("without a clock", deadline=None)  # a slow machine is no fault
settings.load_profile("without a clock")
GOLDEN = Path(__file__).parent / "golden"

DOCUMENTS = {
    "ferry": "The ferry to Ostra leaves the harbour at noon. In winter it does not sail.",
    "mill": "The mill of Brenn grinds barley. It was built by Ada Kolm.",
    "lighthouse": "The lighthouse keeper of Ostra is called Ivo Marn.",
    "bridge": "A copper bridge crosses the river Senn near the old town.",
    "salt": "Salt from Brenn is traded for copper in the northern hills.",
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session", autouse=True)
def _commands_built_once():
    """Let typer's runner build the commands once, not for every call: that takes longer than most calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session")
def llama():
    """A tiny random Llama in float32 that never ends by itself."""
    return tiny_model("llama", num_hidden_layers=2, eos_token_id=None)


@pytest.fixture(scope="session")
def chat_llama():
    """A tiny random Llama with room for the toy tokenizer's vocabulary and long prompts."""
    return tiny_model("llama", num_hidden_layers=2, vocab_size=261, max_position_embeddings=4096, eos_token_id=None)


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte."""
    return toy_tokenizer()


@pytest.fixture(scope="session")
def golden_model():
    """The random Llama on which the published implementations were run."""
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "gqa", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def golden_manifest():
    """Cases and entries of the published runs."""
    return json.loads((GOLDEN / "manifest.json").read_text())


@pytest.fixture(scope="session")
def golden_arrays():
    """Logits and greedy continuations of the published runs."""
    with np.load(GOLDEN / "golden.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, chat_llama, tokenizer):
    """Save the tiny model and its tokenizer, and return their folder."""
    folder = tmp_path_factory.mktemp("tiny")
    chat_llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(chat_llama, tokenizer):
    return InvariantModel(chat_llama, tokenizer)


@pytest.fixture(scope="session")
def docs(tmp_path_factory):
    """Write the documents and return their folder."""
    folder = tmp_path_factory.mktemp("docs")
    for name, text in DOCUMENTS.items():
        (folder / f"{name}.md").write_text(f"# {name.title()}\n\n{text}\n", encoding="utf-8")
    return folder
