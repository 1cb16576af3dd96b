"""A tiny random model. Nothing here needs a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import llama_index.core
import pytest
from framework_cases import base_url, lm, spoken  # noqa: F401 - fixtures
from invariant_rag.prompts import begin_outside
from llama_index.core import Settings
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler

from llama_index.llms.invariant_rag import InvariantLLM


@pytest.fixture(autouse=True)
def _no_settings():
    """Begin without a global LLM, embedding, tokenizer or callbacks, and with nothing that was retrieved for no LLM."""
    begin_outside().retrievals = []
    llama_index.core.global_tokenizer = None
    Settings._callback_manager = Settings._embed_model = Settings._llm = None


@pytest.fixture
def llm(lm):  # noqa: F811 - the fixture above
    return InvariantLLM(lm, max_tokens=8)


class Events(BaseEventHandler):
    """Remembers every event, and the names of them, those of progress once."""

    events: list = []  # noqa: RUF012 - a pydantic field: every handler has its own

    def handle(self, event, **kwargs):
        self.events.append(event)

    @property
    def names(self):
        return list(dict.fromkeys(event.class_name().removesuffix("Event") for event in self.events))


@pytest.fixture
def told(monkeypatch):
    handler, root = Events(), get_dispatcher("root")
    monkeypatch.setattr(root, "event_handlers", [*root.event_handlers, handler])
    return handler
