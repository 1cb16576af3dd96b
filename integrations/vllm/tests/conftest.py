"""A real vLLM over the embedded model, in this process and as a server, on loopback only."""

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

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.models.embedded import EMBEDDED

from tests.worlds import Pair, Server, engine
from vllm_invariant_rag import VLLMBackend

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Run last what needs other processes, and the restart of the server after everything: starting takes long."""
    late = ("restarts", "server", "families")
    items.sort(key=lambda item: [each in (*getattr(item, "fixturenames", ()), *item.name.split("_")) for each in late])


@pytest.fixture(scope="session")
def lm():
    """The embedded model: what it answers is what vLLM has to answer."""
    return InvariantModel.from_pretrained(ordering="lexical")


@pytest.fixture(scope="session")
def llm():
    """vLLM in this process, with few blocks: a handful of long requests preempt each other."""
    return engine(EMBEDDED["generator"], 1536, max_num_seqs=16, num_gpu_blocks_override=64, enable_prefix_caching=True)


@pytest.fixture(scope="session")
def core(llm):
    """The core of that engine."""
    return llm.llm_engine.engine_core.engine_core


@pytest.fixture(scope="session")
def pair(lm, llm):
    """The embedded model here, and on vLLM in this process."""
    return Pair(lm, VLLMBackend(llm=llm, ordering="lexical"))


@pytest.fixture(scope="session", autouse=True)
def launched(request, tmp_path_factory):
    """Launch what takes long to start, while the tests before those that need it run."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    found = {}
    with ExitStack() as stack:
        if "families" in wanted:
            log = tmp_path_factory.mktemp("families") / "log"
            command = [sys.executable, "-m", "tests.family", str(log.parent)]
            with log.open("wb") as output:
                options = {"cwd": Path(__file__).parents[1], "stdout": output, "stderr": output}
                found["families"] = subprocess.Popen(command, **options), log
            stack.callback(found["families"][0].kill)
        if "server" in wanted:
            found["server"] = stack.enter_context(Server(tmp_path_factory.mktemp("server") / "log"))
        yield found


@pytest.fixture(scope="session")
def families(launched):
    """What `tests.family` tells, by case."""
    process, log = launched["families"]
    process.wait(600)
    said = log.read_text(errors="replace")
    assert "Traceback" not in said, said[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in log.parent.glob("*.json")}


@pytest.fixture(scope="session")
def server(launched):
    """A vLLM server, with blocks of vLLM's own choice."""
    launched["server"].wait()
    return launched["server"]


@pytest.fixture(scope="session")
def on_server(server):
    """The embedded model on the server."""
    return VLLMBackend(url=server.url, ordering="lexical", api_key=server.KEY)
