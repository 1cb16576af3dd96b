"""Engines in this process, and servers, of a vLLM with our plug-in."""

import json
import os
import socket
import subprocess
import sys
import time

import httpx
from invariant_rag.models.embedded import EMBEDDED

_PATIENCE = 300.0  # seconds until a server has to be up; a busy machine takes minutes
TRANSFER = {
    "kv_connector": "InvariantRAGConnector",
    "kv_connector_module_path": "vllm_invariant_rag.connector",
    "kv_role": "kv_both",
}


def engine(model, most, **options):
    """Return an `LLM` that reads so many tokens at once, in blocks of 32 tokens."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    defaults = {
        "dtype": "float32",
        "block_size": 32,
        "enforce_eager": True,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
        "enable_chunked_prefill": False,
        "kv_transfer_config": KVTransferConfig(**TRANSFER),
        "max_model_len": most,
        "max_num_batched_tokens": most,
    }
    return LLM(model=str(model), **{**defaults, **options})


class Server:
    """A vLLM server over the embedded model; a context manager, which can be entered again: at the same port."""

    KEY, OTHER_KEY = "key-of-ada", "key-of-ivo"

    def __init__(self, log):
        self.log = log
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        """Begin to start, which takes longer than most tests: the launch line of the README, for a small machine."""
        options = [
            *("--model", str(EMBEDDED["generator"]), "--served-model-name", "embedded", "--dtype", "float32"),
            *("--max-model-len", "2048", "--max-num-seqs", "32", "--block-size", "32", "--enforce-eager"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--root-path", "/behind"),
            *("--distributed-executor-backend", "uni"),
            *("--no-enable-chunked-prefill", "--enable-prompt-tokens-details"),
            *("--middleware", "vllm_invariant_rag.middleware.Documents"),
            *("--kv-transfer-config", json.dumps(TRANSFER), "--api-key", self.KEY, self.OTHER_KEY),
        ]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)

    def wait(self):
        """Wait until it answers."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise RuntimeError("vLLM did not start:\n" + self.log.read_text(errors="replace")[-4000:])

    def client(self, key=KEY):
        """Return a client with this key."""
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=300)
