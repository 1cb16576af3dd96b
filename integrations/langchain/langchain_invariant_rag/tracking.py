"""What retrievers returned, and the values of prompts, stored with the run, so that a model of that run knows it.

A callback handler is attached to every run when this module is imported, with the package. It keeps nothing of a run
that ended. A retriever that is called on its own is a run of its own: what it returned is a reason to warn in this
context, and no set; see `invariant_rag.prompts.outside_retrievals`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any, Self, cast
from uuid import UUID

from invariant_rag.prompts import Finding, Retrieval, RunRetrievals, begin_outside, has_marks, report
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.base import BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from langchain_invariant_rag.documents import document_list, to_segment

RUNS = RunRetrievals()


def retrieval_of(documents: Iterable[Document], *, is_set: bool = True) -> Retrieval:
    """Return documents that were retrieved together, with what a template may write beside each of them."""
    listed = list(documents)
    fields = [{"metadata": str(each.metadata), "score": str(each.metadata.get("score", ""))} for each in listed]
    return Retrieval(tuple(map(to_segment, listed)), fields=tuple(fields), is_set=is_set)


KEPT = "invariant_rag_documents"
"""Key of a tool message's `additional_kwargs`: what its tool retrieved, for later turns."""


class RunTracker(BaseCallbackHandler):
    """Notes which run belongs to which, what retrievers returned in it, and what its prompts were filled in with."""

    def __init__(self) -> None:
        self._artifacts: dict[Any, list[list[Document]]] = {}  # by run within a tool: one list for all of them

    def _begin(self, run_id: UUID, run: Mapping[str, Any]) -> None:
        parent = run.get("parent_run_id")
        RUNS.start(run_id, parent)
        if parent in self._artifacts:
            self._artifacts[run_id] = self._artifacts[parent]

    def _end(self, run_id: UUID, *, failed: bool = False) -> None:
        RUNS.end(run_id, failed=failed)
        self._artifacts.pop(run_id, None)

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: UUID, **run: Any) -> None:
        """Note a run, and the variables of a prompt."""
        self._begin(run_id, run)
        values = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
        _note_lists(run_id, values)
        if run.get("run_type") == "prompt" or run.get("name") == "LLMChain":
            RUNS.add_slots(run_id, *(each for each in values if isinstance(each, str)))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **run: Any) -> None:
        """Forget a run."""
        _note_lists(run_id, outputs.values() if isinstance(outputs, Mapping) else [outputs])
        self._end(run_id)

    def on_tool_start(self, serialized: Any, input_str: str, *, run_id: UUID, **run: Any) -> None:
        """Note a run."""
        self._begin(run_id, run)
        self._artifacts[run_id] = []

    def on_tool_end(self, output: Any, *, run_id: UUID, **run: Any) -> None:
        """Forget a run. What a tool retrieved stays with its message."""
        artifacts = self._artifacts.get(run_id)
        if artifacts and isinstance(output, ToolMessage) and output.artifact is None:
            output.additional_kwargs[KEPT] = artifacts
        self._end(run_id)

    def on_retriever_start(self, serialized: Any, query: str, *, run_id: UUID, **run: Any) -> None:
        """Note a run."""
        RUNS.start(run_id, run.get("parent_run_id"), query=query)

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **run: Any) -> None:
        """Note what a retriever returned."""
        RUNS.add(run_id, retrieval_of(documents))
        if (artifacts := self._artifacts.get(run.get("parent_run_id"))) is not None:
            artifacts.append(list(documents))
        RUNS.end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **run: Any) -> None:
        """Forget a run."""
        self._end(run_id, failed=True)

    on_tool_error = on_retriever_error = on_chain_error

    def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        """Say that marks reach a model that does not know them. Models of this package have parsed them before."""
        _check_marks([each.content for each in chain(*messages)])

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        """Say that marks reach a model that does not know them."""
        _check_marks(prompts)

    def get(self) -> Self:
        """Return this handler to its caller, once this context can store what is retrieved."""
        begin_outside()
        return self


def _check_marks(texts: list[Any]) -> None:
    if has_marks(repr(texts)):
        _warn("a model that knows no segments gets text with segment markers.", "Wrap the model: canonical(model).")


def _warn(message: str, fix: str) -> None:
    report([Finding("tracking", message)], fixes={"tracking": fix})


def _note_lists(run: UUID, values: Iterable[Any]) -> None:
    """Note lists of documents that no retriever returned: they are no sets, but a reason to warn."""
    for documents in filter(None, map(document_list, values)):
        RUNS.add(run, retrieval_of(documents, is_set=False))


register_configure_hook(cast("ContextVar[Any]", RunTracker()), inheritable=True)
if var_child_runnable_config.get():  # a function of a chain has imported the package
    late = "langchain_invariant_rag is imported within a run: what was retrieved before in this run is not known."
    _warn(late, "Import it where the program begins.")


def run_of(callbacks: Any) -> UUID | None:
    """Return the run that calls with these callbacks; None for a call of its own."""
    return callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None


def runs_of(callbacks: Any, count: int) -> list[UUID | None]:
    """Return the run of each of several prompts: LangChain may give callbacks for all of them, or for each."""
    single = not isinstance(callbacks, list) or any(isinstance(each, BaseCallbackHandler) for each in callbacks)
    return [run_of(callbacks)] * count if single or not callbacks else [run_of(each) for each in callbacks]
