"""A server in a process of its own: `make test-clients` runs these tests where neither torch nor invariant-rag is."""

import os
import socket
import subprocess
import time

import httpx
import pytest

COMMAND = os.environ.get("INVARIANT_RAG", "invariant-rag")


@pytest.fixture(scope="session")
def server():
    """Serve the embedded model to whoever has a key, and give the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [COMMAND, "serve", "--port", str(port), "--served-name", "small"]
    environment = {**os.environ, "INVARIANT_RAG_API_KEY": "key-1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not _answers(url):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url):
    try:
        return httpx.get(f"{url}/ready").is_success
    except httpx.TransportError:
        return False
