"""What stops a first-time user gives the next command to type. The hub is a real server on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
import typer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from invariant_rag import InvariantModel, Prompt
from invariant_rag.cli.console import handle_errors
from invariant_rag.errors import ContextOverflow, InvalidPrompt, OutOfMemory, UnsupportedModel
from invariant_rag.testing import toy_tokenizer
from tests.cli.conftest import refused, run


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does: one model is gated, all others are missing."""

    def do_HEAD(self) -> None:
        gated = "/gated/" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "Access is restricted." if gated else "Repository not found")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815 - the name that the base class calls

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


PROGRAM = """
import sys
from typer.testing import CliRunner
from invariant_rag.cli import app
for name in sys.argv[1:]:
    result = CliRunner().invoke(app, ["ask", "--model", name])
    print(result.exit_code, " ".join(result.stderr.split()))
"""


def test_a_wrong_name_and_a_gated_model_are_told_apart(hub: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", PROGRAM, "Qwen/Qwen99-7B", "gated/model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wrong, gated = done.stdout.splitlines()
    assert wrong.startswith("2 ")
    assert "https://huggingface.co/models" in wrong
    assert gated.startswith("2 ")
    assert "https://huggingface.co/gated/model, then run `hf auth login`" in gated


def test_what_is_no_model_names_the_next_command(tmp_path: Path) -> None:
    assert "hf download Qwen/Qwen99-7B --local-dir" in refused("ask", "--model", "Qwen/Qwen99-7B")  # without a network
    for folder in (tmp_path, tmp_path / "nothing"):
        assert "`ls " in refused("ask", "--model", folder)
    with pytest.raises(UnsupportedModel) as caught:
        InvariantModel(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)))
    assert "`invariant-rag models`" in caught.value.hint


def test_memory_of_a_device_that_does_not_suffice_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, handle_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    assert caught.value.exit_code == 2
    printed = capsys.readouterr().err
    assert "20.00 GiB" in printed
    for option in ("--dtype", "--device-map", "--k"):
        assert option in printed
        assert option in run("ask", "--help").stdout
    assert OutOfMemory("too much").hint in printed
    with pytest.raises(RuntimeError, match="another"), handle_errors():
        raise RuntimeError("another")


def test_a_prompt_that_is_too_long_names_the_options(docs: Path, tiny_folder: Path) -> None:
    asked = ("--docs", docs, "--model", tiny_folder, "--retriever", "bm25", "--max-new-tokens", 4096)
    error = refused("ask", "Who?", *asked)
    for told in ("--k 5", "--overflow drop_last", "max_new_tokens", ContextOverflow.hint):
        assert told in error


def test_without_a_chat_template_one_question_is_asked_and_a_conversation_names_the_ways(
    chat_llama: PreTrainedModel,
) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    lm = InvariantModel(chat_llama, tokenizer)
    assert isinstance(lm.chat_prompt("Who?", ["a"]), Prompt)
    with pytest.raises(InvalidPrompt, match="no chat template") as caught:
        lm.chat_prompt(messages=[{"role": role, "content": "x"} for role in ("user", "assistant", "user")])
    assert "instruct version" in caught.value.hint
