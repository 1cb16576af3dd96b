"""What LLMs of this package report of their answers, in the metadata of the response of an engine around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

METADATA_KEY = "invariant_rag"
"""Where the metadata of a response holds the report."""

_LISTED = ("sets", "order", "dropped", "trimmed")
_COUNTED = ("cached_tokens",)


@dataclass(frozen=True)
class Noted:
    """What one LLM reports of one answer.

    Attributes:
        report: The report, with a ledger (see `invariant_rag.generation.ledger`).
        recognized: Whether every node in the prompt is known to be a segment.
    """

    report: Mapping[str, Any]
    recognized: bool

    @property
    def harmless(self) -> bool:
        """Whether no order of nodes could change the answer: they were sets, or there were none."""
        return bool(self.report["invariant"] or (self.recognized and not self.report["sets"]))


class Reports:
    """The reports of all LLMs that were asked below one span of an engine."""

    def __init__(self) -> None:
        self._noted: list[Noted] = []
        self._below: list[Any] = []  # responses of engines below, which report on them
        self._response: Any = None
        self._lock = Lock()

    def note(self, noted: Noted) -> None:
        """Add a report. Of a stream, it comes after the response."""
        with self._lock:
            self._noted.append(noted)
            self._show()

    def show_in(self, response: Any, around: Iterable[Reports] = ()) -> None:
        """Write what is reported, now or later, into the metadata of a response.

        A response that an engine below returned says what was read by the calls that wrote it. But it is invariant only
        if all calls are, such as those of a reranker.

        Args:
            response: The response.
            around: The reports of engines around this one, which may return the same response.
        """
        for each in around:
            each._below.append(response)
        with self._lock:
            self._response = response
            self._show()

    def _show(self) -> None:
        if self._response is None or not self._noted:
            return
        metadata = getattr(self._response, "metadata", None) or {}
        if all(each is not self._response for each in self._below):
            metadata[METADATA_KEY] = _joined([each.report for each in self._noted])
            self._response.metadata = metadata
        if METADATA_KEY in metadata:
            metadata[METADATA_KEY]["invariant"] &= all(each.harmless for each in self._noted)


def _joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several reports as one: all sets, all tokens, invariant if any is; else what the last one says.

    >>> _joined([{"sets": [1], "invariant": True}, {"sets": [], "invariant": False}])
    {'sets': [1], 'invariant': True}
    """
    joined = dict(reports[-1])
    for name, last in reports[-1].items():
        every = [report[name] for report in reports if name in report]
        if name in _LISTED:
            joined[name] = [item for each in every for item in each]
        elif name in _COUNTED:
            joined[name] = sum(every)
        elif name == "usage":
            joined[name] = {count: sum(each[count] for each in every) for count in last}
        elif name == "invariant":
            joined[name] = any(every)
    return joined
