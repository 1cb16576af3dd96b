"""Real servers on loopback, and clients of them."""

import json
import socket
import subprocess
import time
from contextlib import contextmanager, suppress

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import MonoT5
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.serving import in_thread, server_of

CHAT = "/v1/chat/completions"
QUESTION = "What colour is the flag of Ostra?"
FLAGS = [
    "The flag of Ostra is white.",
    "The flag of Brenn is green.",
    "The mill of Ostra grinds barley.",
    "The ferry to Ostra leaves at noon.",
]


@contextmanager
def serving(engine, settings=None, reranker=None):
    """Serve an engine with uvicorn in a thread, and give its address."""
    settings = settings or Settings()
    with in_thread(server_of(create_app(engine, settings, reranker), settings, "127.0.0.1", 0)) as url:
        yield url


@contextmanager
def client_of(engine, settings=None, reranker=None):
    """Serve an engine, and give a client of it."""
    with serving(engine, settings, reranker) as url, httpx.Client(base_url=url, timeout=90) as http:
        yield http


@pytest.fixture(scope="session")
def embedded():
    return InvariantModel.from_pretrained()


@pytest.fixture(scope="session")
def monot5():
    return MonoT5(EMBEDDED["monot5"], batch_size=4)


@pytest.fixture(scope="session")
def base_url(embedded, monot5):
    """A server of the embedded model with a cache and the default settings."""
    with serving(InProcess(embedded, "small", caches={"": KeyValueCache()}), None, monot5) as url:
        yield url


@pytest.fixture(scope="session")
def client(base_url):
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def http(base_url):
    with httpx.Client(base_url=base_url, timeout=60) as each:
        yield each


def body(**more):
    """Return a chat over documents."""
    return {"messages": [{"role": "user", "content": QUESTION}], "documents": FLAGS, **more}


def form(schema, **more):
    """Return a `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


def required(**parts):
    """Return the schema of an object with these properties and no others."""
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


def ask(client, documents, question=QUESTION, **options):
    """Ask a question over documents."""
    sent = {"messages": [{"role": "user", "content": question}], **options}
    return client.chat.completions.create(model="small", extra_body={"documents": documents}, **sent)


def stable(reply):
    """Return a reply, a chunk or an error without what differs from request to request."""
    found = {**(reply if isinstance(reply, dict) else reply.model_dump()), "id": None, "created": None}
    return {**found, "usage": {**(found.get("usage") or {}), "prompt_tokens_details": None}}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def metric(http, name, **labels):
    """Return what the operator sees of a metric, by its name without the prefix."""
    families = text_string_to_metric_families(http.get("/metrics", headers=bearer("key-of-operator")).text)
    samples = [each for family in families for each in family.samples if each.name == f"invariant_rag_{name}"]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def wait_until(is_so, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def leaving(http, path, content, key="", *, beside=0):
    """Send a request over a connection that is closed when the block ends, which begins when it runs beside others."""
    text = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
    wait_until(lambda: metric(http, "active_requests") == beside, 20)
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as connection:
        connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        wait_until(lambda: metric(http, "active_requests") > beside)
        yield


def exchanged(http, sent):
    """Send bytes, and return what comes until the server closes the connection."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as raw:
        raw.settimeout(10)
        raw.sendall(sent)
        return b"".join(iter(lambda: raw.recv(65536), b""))


@contextmanager
def served(command, log, url=None, **options):
    """Run a command that serves, at a free port unless told, until the block ends; give its address and process."""
    if url is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        command, url = [*command, "--port", port], f"http://127.0.0.1:{port}"

    def is_up():
        assert process.poll() is None, "it ended"
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready").is_success

    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, **options) as process:
        try:
            wait_until(is_up, 120)
            yield url, process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
