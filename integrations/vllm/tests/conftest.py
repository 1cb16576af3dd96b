"""A real vLLM over the embedded model, in this process and as a server, on loopback only."""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.models.embedded import EMBEDDED

from tests.servers import TRANSFER, Server
from vllm_invariant_rag import VLLMBackend

_SERVER = pytest.StashKey[Server]()
BLOCKS = 64  # of 32 tokens: few enough that a handful of long requests preempt each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run last what needs the server, and the restart of the server after everything: starting takes long."""
    items.sort(key=lambda item: ("server" in getattr(item, "fixturenames", ()), "restarts" in item.name))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def lm() -> InvariantModel:
    """The embedded model: what it answers is what vLLM has to answer."""
    return InvariantModel.from_pretrained(ordering="lexical")


@pytest.fixture(scope="session")
def llm() -> Any:
    """vLLM in this process, with blocks of 32 tokens, and few of them."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model=str(EMBEDDED["generator"]),
        dtype="float32",
        max_model_len=1536,
        max_num_batched_tokens=1536,
        enable_chunked_prefill=False,
        max_num_seqs=16,
        block_size=32,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        kv_transfer_config=KVTransferConfig(**TRANSFER),
    )


@pytest.fixture(scope="session")
def on_vllm(llm: Any) -> VLLMBackend:
    """The embedded model on vLLM in this process."""
    return VLLMBackend(llm=llm, ordering="lexical")


@pytest.fixture(scope="session", autouse=True)
def _launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launch what takes long to start, while the tests before those that need it run."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ExitStack() as stack:
        if "server" in wanted:
            log: Path = tmp_path_factory.mktemp("server") / "log"
            request.config.stash[_SERVER] = stack.enter_context(Server(log))
        yield


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Server:
    """A vLLM server, with blocks of vLLM's own choice."""
    running = request.config.stash[_SERVER]
    running.wait()
    return running


@pytest.fixture(scope="session")
def on_server(server: Server) -> VLLMBackend:
    """The embedded model on the server."""
    return VLLMBackend(url=server.url, ordering="lexical", api_key=server.KEY)
