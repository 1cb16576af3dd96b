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
    retrieves: bool = False
    retrieved: dict[Hashable, _Retrieved] = field(default_factory=dict)  # in a root: of all runs below it


@dataclass(frozen=True)
class _Retrieved:
    retrieval: Retrieval
    path: tuple[Hashable, ...]  # of the run that retrieved: it may have ended since


class RunDocuments:
    """Documents by run. A run is a tree of calls, as frameworks trace them: a chain, its retriever, its model.

    Documents are known within one root run only, and forgotten when it ends. The last ones of other runs are kept for
    one purpose: to warn of a prompt that holds them. Safe for threads.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, _Run] = OrderedDict()
        self._elsewhere: deque[tuple[Hashable, Retrieval]] = deque(maxlen=_MOST_RETRIEVALS)
        self._lock = Lock()

    def start(self, run: Hashable, parent: Hashable | None, *, retrieves: bool = False) -> None:
        """Note that a run began. It is a root run if nothing is known of its parent.

        Args:
            run: The run.
            parent: The run that called it.
            retrieves: Whether it is a retriever. A model inside of one (that rewrites or filters) answers nobody yet.
        """
        with self._lock:
            self._runs[run] = _Run(parent, retrieves)
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
            path = tuple(self._path(run))
            root = path[-1]
            self._elsewhere.append((root, retrieval))
            if root in self._runs:
                retrieved = self._runs[root].retrieved
                for other in [other for other, each in retrieved.items() if run in each.path]:
                    del retrieved[other]
                if all(each.retrieval != retrieval for each in retrieved.values()):  # else handed from run to run
                    retrieved[run] = _Retrieved(retrieval, path)

    def of(self, run: Hashable | None) -> tuple[Retrieval, ...]:
        """Return what was retrieved in the root run of a run; nothing within a retriever, or for None: no run."""
        with self._lock:
            path = [] if run is None else [self._runs[each] for each in self._path(run) if each in self._runs]
            if not path or any(each.retrieves for each in path):
                return ()
            return tuple(each.retrieval for each in path[-1].retrieved.values())

    def elsewhere(self, run: Hashable | None) -> tuple[KnownDocument, ...]:
        """Return what was retrieved lately in other root runs, and not in that of this run."""
        with self._lock:
            root = None if run is None else self._path(run)[-1]
            here = self._runs[root].retrieved.values() if root in self._runs else ()
            own = {document.segment.text for each in here for document in each.retrieval.documents}
            others = [retrieval for other, retrieval in self._elsewhere if run is None or other != root]
            found = (document for retrieval in others for document in retrieval.documents)
            return tuple(document for document in found if document.segment.text not in own)

    def path(self, run: Hashable) -> list[Hashable]:
        """Return a run, its parent, ... and its root, as long as they go on."""
        with self._lock:
            return self._path(run)

    def _path(self, run: Hashable) -> list[Hashable]:
        """Return a run, its parent, ... and its root."""
        path = [run]
        while (known := self._runs.get(path[-1])) is not None and known.parent in self._runs:
            if known.parent in path:
                break  # a run that was reported as its own parent
            path.append(known.parent)
        return path
