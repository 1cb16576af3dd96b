"""What LLMs of this package report of their answers, in the responses of the engines around them; marks for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.llms.structured_llm import StructuredLLM

from invariant_rag.prompts import Finding, has_marks, report

METADATA_KEY = "invariant_rag"
"""Where the metadata of a response holds the report."""
_NOTHING_READ: Mapping[str, Any] = {"sets": [], "order": [], "dropped": [], "trimmed": [], "invariant": None}


def knows_segments(llm: object) -> bool:
    """Return whether an LLM is one of this package, or around one."""
    return hasattr(llm.llm if isinstance(llm, StructuredLLM) else llm, "require_segments")


def check_marks(llm: LLM, arguments: Mapping[str, Any]) -> None:
    """Warn if an LLM of another package is asked with marks of nodes, which it does not know."""
    passed = (*arguments.get("args", ()), *arguments.get("kwargs", {}).values(), *arguments.values())
    listed = [each for given in passed for each in (given if isinstance(given, list | tuple) else [given])]
    texts = [each.content if isinstance(each, ChatMessage) else each for each in listed]
    if any(isinstance(text, str) and has_marks(text) for text in texts):
        message = f"{type(llm).__name__} does not know segments, and gets text with segment markers."
        report([Finding("marks", message)], fixes={"marks": "Wrap it: canonical(llm)."})


class Reports:
    """What all LLMs below one engine report, in the metadata of its response.

    A response that an engine below returned says what the calls read that wrote it. But it is invariant only if all
    calls are, such as those of a reranker.
    """

    def __init__(self) -> None:
        self._noted: list[Mapping[str, Any]] = []
        self._response: Any = None
        self._is_own = True
        self._lock = Lock()

    def note(self, report: Mapping[str, Any]) -> None:
        """Add a report. Of a stream, it comes after the response."""
        with self._lock:
            self._noted.append(report)
            self._show()

    def show_in(self, response: Any, *, is_read: bool) -> None:
        """Write what is reported, now or later, into a response; `is_read` if an LLM of this package writes it."""
        with self._lock:
            response.metadata = getattr(response, "metadata", None) or {}
            self._is_own = METADATA_KEY not in response.metadata
            if self._is_own and is_read:
                response.metadata[METADATA_KEY] = dict(_NOTHING_READ)
            self._response = response
            self._show()

    def _show(self) -> None:
        if self._response is None or not self._noted:
            return
        metadata = self._response.metadata
        if self._is_own:
            metadata[METADATA_KEY] = _joined(self._noted)
        report = metadata[METADATA_KEY]
        report["invariant"] = _verdict([report["invariant"], *(each["invariant"] for each in self._noted)])


def _verdict(of_calls: Iterable[bool | None]) -> bool | None:
    """Return whether an answer is invariant: if all calls that read documents are; None if none read any."""
    known = [each for each in of_calls if each is not None]
    return all(known) if known else None


def _joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several reports as one: all sets, all tokens; else what the last one says."""
    found = dict(reports[-1])
    for name in ("sets", "order", "dropped", "trimmed"):
        found[name] = [item for each in reports for item in each[name]]
    found["cached_tokens"] = sum(each["cached_tokens"] for each in reports)
    if usages := [each["usage"] for each in reports if "usage" in each]:
        found["usage"] = {count: sum(each[count] for each in usages) for count in usages[-1]}
    found["invariant"] = _verdict(each["invariant"] for each in reports)
    return found
