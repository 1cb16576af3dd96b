"""What LLMs of this package report of their answers, in the metadata of the response of an engine around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

METADATA_KEY = "invariant_rag"
"""Where the metadata of a response holds the report."""

_LISTED = ("sets", "order", "dropped", "trimmed")


class Reports:
    """The reports of all LLMs that were asked below one engine."""

    def __init__(self) -> None:
        self._noted: list[Mapping[str, Any]] = []
        self._response: Any = None
        self._below: list[Any] = []  # responses of engines below, which report on them
        self._lock = Lock()

    def note(self, report: Mapping[str, Any]) -> None:
        """Add a report. Of a stream, it comes after the response."""
        with self._lock:
            self._noted.append(report)
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
            metadata[METADATA_KEY] = joined(self._noted)
            self._response.metadata = metadata
        if METADATA_KEY in metadata:
            report = metadata[METADATA_KEY]
            report["invariant"] = verdict([report["invariant"], *(each["invariant"] for each in self._noted)])


def verdict(of_calls: Iterable[bool | None]) -> bool | None:
    """Return whether an answer is invariant: if all calls that read documents are; None if none read any.

    >>> verdict([True, None]), verdict([True, False]), verdict([None])
    (True, False, None)
    """
    known = [each for each in of_calls if each is not None]
    return all(known) if known else None


def joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several reports as one: all sets, all tokens, one verdict; else what the last one says.

    >>> joined([{"sets": [1], "invariant": True}, {"sets": [], "invariant": None}])
    {'sets': [1], 'invariant': True}
    """
    found = dict(reports[-1])
    for name, last in reports[-1].items():
        every = [report[name] for report in reports if name in report]
        if name in _LISTED:
            found[name] = [item for each in every for item in each]
        elif name == "cached_tokens":
            found[name] = sum(every)
        elif name == "usage":
            found[name] = {count: sum(each[count] for each in every) for count in last}
        elif name == "invariant":
            found[name] = verdict(every)
    return found
