"""A real vLLM over the embedded model, in this process and as a server, on loopback only, and documents for it."""

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
import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch
from invariant_rag import InvariantModel, Segment
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.testing.rounding import rounding

from vllm_invariant_rag import VLLMBackend

torch.set_num_threads(1)

LENGTH = {"max_new_tokens": 16, "min_new_tokens": 16}
MOVED = 1e-4
"""How far log-probabilities may lie apart, whatever the answer's length. Rounding moves 160 tokens by up to 3.4e-5."""

_SYLLABLES = "bel tar mor quel ost gan lu ren va dri no sel ka tho mi".split()
_COLOURS = "red green blue orange black white yellow purple".split()
_TRADES = "rope sails bread glass wool paper bells salt".split()
_TEMPLATES = (
    "The flag of {0} is {1} and {2}. It was founded in {4}.",
    "The guild of {0} makes {3}. Its hall stands by the river.",
    "The {0} is {5} miles long. It rises in the hills and flows into the bay.",
)


def documents(count, seed):
    """Return so many different documents, in random order."""
    rng, found = random.Random(seed), []
    names = sorted({"".join(rng.choices(_SYLLABLES, k=3)).title() for _ in range(4 * count + 8)})
    rng.shuffle(names)
    for name in names[:count]:
        template, colours, trade = rng.choice(_TEMPLATES), rng.sample(_COLOURS, 2), rng.choice(_TRADES)
        text = template.format(name, *colours, trade, rng.randint(1200, 1900), rng.randint(20, 300))
        found.append(Segment(text, title=name))
    return found


def question(segments):
    """Return a question about one of the documents."""
    return f"What colour is the flag of {min((each.title for each in segments), default='Ostra')}?"


def ask(lm, segments, asked=None):
    return lm.chat_prompt(asked or question(segments), list(segments))


def body_of(segments, **more):
    """Return a request to /v1/chat/completions."""
    listed = [{"title": each.title, "text": each.text} for each in segments]
    asked = [{"role": "user", "content": question(segments)}]
    return {"messages": asked, "documents": listed, "max_tokens": 16, **more}


def moved(ours, theirs):
    """How far log-probabilities are apart, where all else is the same. Another method moves them by 0.1 and more."""
    assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
    assert (ours.finish_reason, ours.order) == (theirs.finish_reason, theirs.order)
    return max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))


@dataclass(frozen=True)
class Pair:
    """The embedded model, with documents by `lexical`, here and on vLLM."""

    here: InvariantModel
    there: VLLMBackend

    def using(self, method, ordering="lexical"):
        here, there = (each.with_method(method, ordering=ordering) for each in (self.here, self.there))
        return replace(self, here=here, there=there)

    def prompt(self, seed, count=6):
        return ask(self.here, documents(count, seed))

    def request(self, prompt, most=16, **fields):
        """Return the request for a prompt, and at most so many tokens."""
        prepared = self.there.prepare_to_generate(prompt, most)
        return self.there._request(prepared, {"max_tokens": most, "n": 1, "logprobs": 0, **fields})

    def most_moved(self, prompt, **options):
        """`MOVED`, but for APE, whose temperature multiplies rounding: its answers here are 1.4e-4 from float64's."""
        return rounding(self.here.generate, prompt, **options) if self.here.method.name == "ape" else MOVED

    def alike(self, *prompts, **options):
        """All prompts at once on vLLM, and one by one here, give the same; 16 tokens, if nothing else is told."""
        options = {**LENGTH, **options}
        answers = self.there.generate(prompts, **options)
        for prompt, answer in zip(prompts, answers, strict=True):
            far = moved(answer, self.here.generate(prompt, **options))
            assert far < MOVED or far < self.most_moved(prompt, **options)
        return answers


TRANSFER = {
    "kv_connector": "InvariantRAGConnector",
    "kv_connector_module_path": "vllm_invariant_rag.connector",
    "kv_role": "kv_both",
}


def engine(model, most, **options):
    """Return an `LLM` that reads so many tokens at once, in blocks of 32 tokens."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    sizes = {"block_size": 32, "max_model_len": most, "max_num_batched_tokens": most}
    ours = {"enable_chunked_prefill": False, "kv_transfer_config": KVTransferConfig(**TRANSFER)}
    plain = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": True}
    options = {**sizes, **ours, **plain, "distributed_executor_backend": "uni", **options}
    return LLM(model=str(model), **options)


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
        words = (
            "--served-model-name embedded --dtype float32 --max-model-len 2048 --max-num-seqs 32 --block-size 32 "
            f"--host 127.0.0.1 --port {self.port} --root-path /behind --api-key {self.KEY} {self.OTHER_KEY} "
            "--enforce-eager --distributed-executor-backend uni --no-enable-chunked-prefill "
            "--enable-prompt-tokens-details --middleware vllm_invariant_rag.middleware.Documents"
        )
        options = ["--model", str(EMBEDDED["generator"]), "--kv-transfer-config", json.dumps(TRANSFER), *words.split()]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self

    def __exit__(self, *_):
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()  # if it has not ended
        self._process.wait(30)

    def wait(self):
        """Wait until it answers."""
        deadline = time.monotonic() + 300  # a busy machine takes minutes
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise RuntimeError("vLLM did not start:\n" + self.log.read_text(errors="replace")[-4000:])


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
            command = [sys.executable, "-m", "tests.test_start", str(log.parent)]
            with log.open("wb") as output:
                options = {"cwd": Path(__file__).parents[1], "stdout": output, "stderr": output}
                found["families"] = subprocess.Popen(command, **options), log
            stack.callback(found["families"][0].kill)
        if "server" in wanted:
            found["server"] = stack.enter_context(Server(tmp_path_factory.mktemp("server") / "log"))
        yield found


@pytest.fixture(scope="session")
def families(launched):
    """What `tests.test_start` tells, by case."""
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
