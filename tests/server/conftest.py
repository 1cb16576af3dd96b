"""Real servers on loopback, clients of them, and a browser that shows their page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.orderings import Relevance
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.engines.base import Engine
from invariant_rag.server.serving import in_thread, server_of
from tests.browsers import CHROMIUM
from tests.server.lab import NAMES, Lab

Opener = Callable[..., Lab]

QUESTION = "What colour is the flag of Ostra?"
FLAGS = [
    "The flag of Ostra is white.",
    "The flag of Brenn is green.",
    "The mill of Ostra grinds barley.",
    "The ferry to Ostra leaves at noon.",
]


@contextmanager
def serving(engine: Engine, settings: Settings | None = None, reranker: Relevance | None = None) -> Iterator[str]:
    """Serve an engine with uvicorn in a thread, and give its address."""
    settings = settings or Settings()
    with in_thread(server_of(create_app(engine, settings, reranker), settings, "127.0.0.1", 0)) as url:
        yield url


@pytest.fixture(scope="session")
def embedded() -> InvariantModel:
    return InvariantModel.from_pretrained()


@pytest.fixture(scope="session")
def base_url(embedded: InvariantModel) -> Iterator[str]:
    """A server of the embedded model with a cache and the default settings."""
    with serving(InProcess(embedded, "small", caches={"": KeyValueCache()})) as url:
        yield url


@pytest.fixture(scope="session")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=60) as each:
        yield each


def ask(client: openai.OpenAI, documents: list[Any], question: str = QUESTION, **options: Any) -> Any:
    """Ask a question over documents."""
    body = {"documents": documents, **options.pop("extra_body", {})}
    messages = options.pop("messages", [{"role": "user", "content": question}])
    return client.chat.completions.create(model="small", messages=messages, extra_body=body, **options)


def content_of(reply: Any) -> dict[str, Any]:
    """Return a reply without what differs from request to request."""
    body = reply.model_dump()
    del body["id"], body["created"], body["usage"]["prompt_tokens_details"]
    return body


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--host-resolver-rules=MAP lab.test 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def open_lab(browser: Browser) -> Iterator[Opener]:
    """Open the page of a server. When the test ends, it has asked no other host, and complained of nothing."""
    opened: list[Lab] = []

    def at(url: str, **options: Any) -> Lab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(20_000)
        lab = Lab(context.new_page(), url)
        opened.append(lab)
        lab.page.goto(url)
        expect(lab.page.locator("#documents > li")).to_have_count(len(NAMES))
        return lab

    yield at
    assert opened
    for lab in opened:
        lab.page.context.close()
        assert not [each for each in lab.requests if not each.startswith(lab.url)]
        # Chromium itself writes a line for every status from 400 on.
        assert not [each for each in lab.complaints if not each.startswith("Failed to load resource")]


@pytest.fixture
def lab(open_lab: Opener, base_url: str) -> Lab:
    """The page of the server that most tests share."""
    found = open_lab(base_url)
    expect(found.page.locator("#model")).to_have_text("Model: small")
    return found
