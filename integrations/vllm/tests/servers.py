"""Start and stop vLLM servers over the embedded model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx
from invariant_rag.models.embedded import EMBEDDED

_PATIENCE = 300.0  # seconds until a server has to be up; a busy machine takes minutes


TRANSFER = {
    "kv_connector": "InvariantRAGConnector",
    "kv_connector_module_path": "vllm_invariant_rag.connector",
    "kv_role": "kv_both",
}


def launch_arguments(port: int, *keys: str) -> list[str]:
    """The launch line of the README, with what a small machine needs."""
    return [
        *("--model", str(EMBEDDED["generator"]), "--served-model-name", "embedded", "--dtype", "float32"),
        *("--max-model-len", "2048", "--max-num-seqs", "32", "--block-size", "32", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", str(port), "--distributed-executor-backend", "uni"),
        *("--no-enable-chunked-prefill", "--enable-prompt-tokens-details"),
        *("--middleware", "vllm_invariant_rag.middleware.Documents"),
        *("--kv-transfer-config", json.dumps(TRANSFER), "--api-key", *keys),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A vLLM server; a context manager. `stop` and `start` restart it at the same port."""

    KEY, OTHER_KEY = "key-of-ada", "key-of-ivo"

    def __init__(self, log: Path) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Begin to start, which takes longer than most tests."""
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *launch_arguments(self.port, self.KEY, self.OTHER_KEY),
        ]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            try:
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        self.stop()
        raise RuntimeError("vLLM did not start:\n" + self.log.read_text(errors="replace")[-4000:])

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(30)
            self._process = None

    def post(self, body: dict[str, Any], path: str = "/v1/completions", key: str = KEY) -> httpx.Response:
        """Send a request of our own making."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json={"model": "embedded", **body}, headers=headers, timeout=300)
