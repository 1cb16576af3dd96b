"""What retrievers of LangChain returned, by run, so that a model of the same run finds it in its prompt.

A callback handler is attached to every run (`register_configure_hook` of langchain-core). It notes documents, and says
when a model that is not from this package gets text with segment markers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from itertools import islice
from threading import Lock
from typing import Any
from uuid import UUID

from invariant_rag.prompts import Finding, KnownDocument, RunDocuments, has_marks, report
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.base import BaseCallbackManager, Callbacks
from langchain_core.callbacks.manager import BaseRunManager
from langchain_core.documents import Document
from langchain_core.load import Serializable
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.tracers.context import register_configure_hook
from pydantic import BaseModel

from langchain_invariant_rag.documents import document_list, to_segment

_MOST_VALUES = 5000

RUNS = RunDocuments()
"""What was retrieved in which run."""


class RunTracker(BaseCallbackHandler):
    """Notes which run belongs to which, and what retrievers returned in it."""

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note a run, and documents that it was given: a graph that goes on, for example, has them from before."""
        RUNS.start(run_id, parent_run_id)
        _add_documents(run_id, inputs)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a run, and note documents that it returned: a function may search without a retriever."""
        _add_documents(run_id, outputs)
        RUNS.end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a run."""
        RUNS.end(run_id)

    def on_tool_start(
        self, serialized: Any, input_str: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note a run."""
        RUNS.start(run_id, parent_run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a run, and note documents that it returned."""
        _add_documents(run_id, output.artifact if isinstance(output, ToolMessage) else output)
        RUNS.end(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a run."""
        RUNS.end(run_id)

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note a run."""
        RUNS.start(run_id, parent_run_id, retrieves=True, query=query)

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **kwargs: Any) -> None:
        """Note what a retriever returned."""
        RUNS.add(run_id, map(_known, documents))
        RUNS.end(run_id)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a run."""
        RUNS.end(run_id)

    def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        """Say that marks reach a model that does not know them. Models of this package have parsed them before."""
        _check_marks(text for batch in messages for message in batch for text in _texts(message))

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        """Say that marks reach a model that does not know them."""
        _check_marks(iter(prompts))


_TRACKER = RunTracker()
_tracker: ContextVar[RunTracker | None] = ContextVar("invariant_rag_run_tracker", default=_TRACKER)
_lock = Lock()
_registered = False


def track_runs() -> None:
    """Attach the handler to every run of this process from now on. It is attached once."""
    global _registered  # noqa: PLW0603 - LangChain keeps its hooks in a list of the process, too
    with _lock:
        if not _registered:
            register_configure_hook(_tracker, inheritable=True)
            _registered = True


def run_of(callbacks: Callbacks) -> UUID | None:
    """Return the run that calls with these callbacks; None for a call of its own."""
    return callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None


def current_run(run_manager: BaseRunManager | None) -> UUID | None:
    """Return the run of a model that was called with this manager; None if LangChain passes none."""
    return None if run_manager is None else run_manager.run_id


def runs_of(callbacks: Any, count: int) -> list[UUID | None]:
    """Return the run of each of several prompts: LangChain may give callbacks for all of them, or for each."""
    single = not isinstance(callbacks, list) or any(isinstance(each, BaseCallbackHandler) for each in callbacks)
    return [run_of(callbacks)] * count if single or not callbacks else [run_of(each) for each in callbacks]


def _add_documents(run: UUID, value: Any) -> None:
    """Note every list of documents among the inputs or outputs of a run."""
    RUNS.add(run, *(map(_known, each) for each in document_lists(value)))


def document_lists(value: Any) -> Iterator[list[Document]]:
    """Yield the lists of documents in a value: in mappings, lists, dataclasses and models, in one another.

    At most 5000 of the values in it are looked at, the outer ones first: it may hold more than documents.
    """
    waiting = deque([value])
    for _ in range(_MOST_VALUES):
        if not waiting:
            return
        each = waiting.popleft()
        if found := document_list(each):
            yield found
        else:
            waiting.extend(islice(_members(each), _MOST_VALUES))


def _members(value: Any) -> Iterator[Any]:
    """Yield the values in a container. What LangChain itself has classes for, such as messages, is none."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, BaseModel) and not isinstance(value, Serializable):
        yield from (each for _, each in value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, each.name, None) for each in fields(value))


def _known(document: Document) -> KnownDocument:
    return KnownDocument.of(to_segment(document), str(document))


def _check_marks(texts: Iterator[str]) -> None:
    if any(has_marks(text) for text in texts):
        message = "a model that does not know segments gets text with segment markers."
        report([Finding("marks", message)], fixes={"marks": "Wrap the model: canonical(model)."})


def _texts(message: BaseMessage) -> Iterator[str]:
    for block in [message.content] if isinstance(message.content, str) else message.content:
        if isinstance(block, str):
            yield block
        elif isinstance(block.get("text"), str):
            yield block["text"]
