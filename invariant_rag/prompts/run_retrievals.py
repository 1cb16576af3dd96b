"""What was retrieved in which run, kept with the run, and gone with it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from threading import Lock

from invariant_rag.prompts.recognition import Retrieval

_MOST_RUNS = 10_000


@dataclass
class _Run:
    root: Hashable
    parent: Hashable | None
    query: str | None  # of a retriever
    noted: list[tuple[list[Hashable], Retrieval]] = field(default_factory=list)  # in a root: path of a run below it
    slots: dict[str, None] = field(default_factory=dict)


class RunRetrievals:
    """Retrievals and slots by run. Runs are trees of calls, as frameworks trace them: a chain, a retriever, a model.

    They are known within one root run only, and forgotten when it ends. Safe for threads.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, _Run] = OrderedDict()
        self._lock = Lock()

    def start(self, run: Hashable, parent: Hashable | None = None, *, query: str | None = None) -> None:
        """Note that a run began. It is a root run if nothing is known of its parent.

        Args:
            run: The run.
            parent: The run that called it.
            query: What it is asked, if it is a retriever.
        """
        with self._lock:
            above = self._runs.get(parent) if parent is not None and parent != run else None
            self._runs[run] = _Run(run if above is None else above.root, parent, query)
            while len(self._runs) > _MOST_RUNS:  # runs that never ended, such as abandoned generators
                self._runs.popitem(last=False)

    def end(self, run: Hashable) -> None:
        """Note that a run ended."""
        with self._lock:
            self._runs.pop(run, None)

    def add(self, run: Hashable, retrieval: Retrieval) -> None:
        """Note what a run retrieved. It replaces what retrievers below this one found: it chose from that."""
        with self._lock:
            own = self._runs.get(run)
            root = self._runs.get(own.root) if own is not None else None
            if own is None or root is None or not retrieval.segments:
                return
            if not retrieval.is_set and any(each.segments == retrieval.segments for _, each in root.noted):
                return  # handed from run to run
            if own.query is not None:
                root.noted = [each for each in root.noted if run not in each[0]]
                retrieval = replace(retrieval, query=retrieval.query or own.query)
            root.noted.append((self._path(run), retrieval))

    def add_slots(self, run: Hashable, *slots: str) -> None:
        """Note values of the variables of a prompt that was filled in, in the root run of a run."""
        with self._lock:
            own = self._runs.get(run)
            if own is not None and own.root in self._runs:
                self._runs[own.root].slots.update(dict.fromkeys(slots))

    def of(self, run: Hashable | None) -> tuple[list[Retrieval], list[str]]:
        """Return retrievals and slots of the root run of a run; nothing for None: no run."""
        with self._lock:
            own = self._runs.get(run) if run is not None else None
            root = self._runs.get(own.root) if own is not None else None
            if root is None:
                return [], []
            above = (self._runs.get(each) for each in self._path(run))
            inside = any(each is not None and each.query is not None for each in above)
            return [replace(each, one_by_one=inside) for _, each in root.noted], list(root.slots)

    def _path(self, run: Hashable | None) -> list[Hashable]:
        """Return a run, its parent, ... and its root, as long as they go on."""
        path: list[Hashable] = []
        while run is not None and run not in path:
            path.append(run)
            known = self._runs.get(run)
            run = None if known is None else known.parent
        return path
