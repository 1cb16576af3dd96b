"""What was retrieved in which run, so that a model of the same run can find it in its prompt."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from threading import Lock

from invariant_rag.prompts.known_documents import KnownDocument, Retrieval
from invariant_rag.prompts.written_order import order_written

_MOST_RUNS = 10_000
_MOST_RETRIEVALS = 256


@dataclass
class _Run:
    parent: Hashable | None
    retrieves: bool = False
    query: str = ""
    retrieved: list[_Retrieved] = field(default_factory=list)  # in a root: of all runs below it


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

    def start(self, run: Hashable, parent: Hashable | None, *, retrieves: bool = False, query: str = "") -> None:
        """Note that a run began. It is a root run if nothing is known of its parent.

        Args:
            run: The run.
            parent: The run that called it.
            retrieves: Whether it is a retriever. A model inside of one may filter what others found, one by one.
            query: What a retriever is asked.
        """
        with self._lock:
            self._runs[run] = _Run(parent, retrieves, query)
            while len(self._runs) > _MOST_RUNS:  # runs that never ended, such as abandoned generators
                self._runs.popitem(last=False)

    def end(self, run: Hashable) -> None:
        """Note that a run ended."""
        with self._lock:
            self._runs.pop(run, None)

    def add(self, run: Hashable, *retrievals: Iterable[KnownDocument]) -> None:
        """Note what a run retrieved. It replaces what runs below it retrieved: they found what it chose from.

        Args:
            run: The run.
            *retrievals: Documents that were retrieved together, and others.
        """
        lists = [each for each in map(tuple, retrievals) if each]
        if not lists:
            return
        with self._lock:
            path = tuple(self._path(run))
            root = path[-1]
            noted = self._runs[root].retrieved if root in self._runs else []
            below = [each.retrieval for each in noted if run in each.path]
            own = (self._runs[run].query,) if run in self._runs and self._runs[run].query else ()
            queries = own or tuple(dict.fromkeys(query for each in below for query in each.queries))
            kept = [each for each in noted if run not in each.path]
            for listed in lists:
                doubts = (each.doubt or order_written(listed, each.documents) for each in below)
                retrieval = Retrieval(listed, queries, next(filter(None, doubts), ""))
                self._elsewhere.append((root, retrieval))
                alike = next((at for at, other in enumerate(kept) if other.retrieval.documents == listed), None)
                if alike is None:
                    kept.append(_Retrieved(retrieval, path))
                    continue
                earlier = kept[alike].retrieval  # handed from run to run, or found again
                both = tuple(dict.fromkeys((*earlier.queries, *queries)))
                kept[alike] = replace(kept[alike], retrieval=replace(earlier, queries=both))
            if root in self._runs:
                self._runs[root].retrieved = kept

    def of(self, run: Hashable | None) -> tuple[Retrieval, ...]:
        """Return what was retrieved in the root run of a run, the nearest first; nothing for None: no run.

        Of equal texts that were retrieved in several branches of a run, those of the nearest branch count.
        """
        with self._lock:
            path = [] if run is None else [each for each in self._path(run) if each in self._runs]
            if not path:
                return ()
            chosen_from = any(self._runs[each].retrieves for each in path)
            by_distance: dict[int, list[Retrieval]] = {}
            for noted in self._runs[path[-1]].retrieved:
                distance = next((place for place, mine in enumerate(path) if mine in noted.path), len(path))
                by_distance.setdefault(distance, []).append(noted.retrieval)
        found: list[Retrieval] = []
        for _, retrievals in sorted(by_distance.items()):
            nearer = {document.segment.text for each in found for document in each.documents}
            for each in retrievals:
                documents = tuple(one for one in each.documents if one.segment.text not in nearer)
                if documents:
                    found.append(replace(each, documents=documents, chosen_from=chosen_from))
        return tuple(found)

    def elsewhere(self, run: Hashable | None) -> tuple[KnownDocument, ...]:
        """Return what was retrieved lately in other root runs, and not in that of this run."""
        with self._lock:
            root = None if run is None else self._path(run)[-1]
            here = self._runs[root].retrieved if root in self._runs else ()
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
