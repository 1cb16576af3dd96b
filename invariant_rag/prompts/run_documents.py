"""What was retrieved in which run, so that a model of the same run can find it in its prompt."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from threading import Lock

from invariant_rag.prompts.known_documents import KnownDocument, Retrieval

_MOST_RUNS = 10_000
_MOST_RETRIEVALS = 64


@dataclass
class _Run:
    parent: Hashable | None
    retrieved: dict[Hashable, tuple[list[Hashable], Retrieval]] = field(default_factory=dict)
    """In a root: by run below it, with its path, which is not known any more when the run has ended."""


class RunDocuments:
    """Documents by run. A run is a tree of calls, as frameworks trace them: a chain, its retriever, its model.

    Documents are known within one root run only, and forgotten when it ends. The last ones of other runs are kept for
    one purpose: to warn of a prompt that holds them. Safe for threads.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, _Run] = OrderedDict()
        self._elsewhere: deque[tuple[Hashable, Retrieval]] = deque(maxlen=_MOST_RETRIEVALS)
        self._lock = Lock()

    def start(self, run: Hashable, parent: Hashable | None) -> None:
        """Note that a run began. It is a root run if nothing is known of its parent."""
        with self._lock:
            self._runs[run] = _Run(parent)
            while len(self._runs) > _MOST_RUNS:  # runs that never ended, such as abandoned generators
                self._runs.popitem(last=False)

    def end(self, run: Hashable) -> None:
        """Note that a run ended."""
        with self._lock:
            self._runs.pop(run, None)

    def add(self, run: Hashable, documents: Iterable[KnownDocument]) -> None:
        """Note what a run retrieved. It replaces what runs below it retrieved: they found what it chose from."""
        retrieval = Retrieval(tuple(documents))
        if not retrieval.documents:
            return
        with self._lock:
            path = self._path(run)
            root = path[-1]
            self._elsewhere.append((root, retrieval))
            if root in self._runs:
                retrieved = self._runs[root].retrieved
                for other in [other for other, (path, _) in retrieved.items() if run in path]:
                    del retrieved[other]
                retrieved[run] = path, retrieval

    def of(self, run: Hashable | None) -> tuple[Retrieval, ...]:
        """Return what was retrieved in the root run of a run. None: no run, so nothing."""
        with self._lock:
            root = self._runs.get(self._path(run)[-1]) if run is not None else None
            return () if root is None else tuple(retrieval for _, retrieval in root.retrieved.values())

    def elsewhere(self, run: Hashable | None) -> tuple[KnownDocument, ...]:
        """Return what was retrieved lately in other root runs."""
        with self._lock:
            root = None if run is None else self._path(run)[-1]
            others = [retrieval for other, retrieval in self._elsewhere if run is None or other != root]
            return tuple(document for retrieval in others for document in retrieval.documents)

    def _path(self, run: Hashable) -> list[Hashable]:
        """Return a run, its parent, ... and its root."""
        path = [run]
        while (known := self._runs.get(path[-1])) is not None and known.parent in self._runs:
            if known.parent in path:
                break  # a run that was reported as its own parent
            path.append(known.parent)
        return path
