"""What was retrieved: one retrieval, and the retrievals of a run, stored until its root run ends."""

from __future__ import annotations

from asyncio import current_task
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from string import ascii_lowercase, ascii_uppercase
from threading import Lock, get_ident

from invariant_rag.segments import Segment

_MOST_RUNS = 10_000


@dataclass(frozen=True)
class Retrieval:
    """What one call of a retriever returned."""

    segments: tuple[Segment, ...]  # in the order in which they were listed
    query: str = ""  # if it is known: a slot with this text is the user's question, and no set
    fields: tuple[Mapping[str, str], ...] = ()  # texts of templates beside title and metadata, for each document
    one_by_one: bool = False  # whether a model may get one document: it runs inside of the retriever
    is_set: bool = True  # whether their order means nothing; a list that no retriever returned is a reason to warn

    @property
    def rows(self) -> list[dict[str, str]]:
        """The fields of each document."""
        rows = []
        for index, each in enumerate(self.segments):
            row = {"title": each.title} if each.title else {}
            if each.metadata:
                row["metadata"] = str(dict(each.metadata))
                row.update((f"metadata.{key}", str(value)) for key, value in each.metadata.items())
            rows.append({**row, **(self.fields[index] if index < len(self.fields) else {})})
        return rows

    @property
    def columns(self) -> list[tuple[str, ...]]:
        """The fields in which documents differ, each with its text for every document; "" where one has none.

        Fields with running numbers or letters are left out: a template may count.
        """
        rows = self.rows
        names = sorted({name for row in rows for name in row})
        columns = dict.fromkeys(tuple(row.get(name, "") for row in rows) for name in names)
        return [each for each in columns if len(set(each)) > 1 and not _counts(each)]


def _counts(values: Sequence[str]) -> bool:
    """Return whether values are those of a count of documents from 0, 1 or A on, in any order."""
    listed = sorted(each.lstrip("0") or "0" if each.isdecimal() else each for each in values)
    numbers = [sorted(map(str, range(first, first + len(values)))) for first in (0, 1)]
    return listed in (*numbers, *(list(alphabet[: len(values)]) for alphabet in (ascii_lowercase, ascii_uppercase)))


@dataclass
class Outside:
    """The last retrievals of a context in runs that called no model, such as a retriever on its own."""

    retrievals: list[Retrieval]
    task: tuple[int, int]  # the thread and the task in which the run began


_OUTSIDE: ContextVar[Outside | None] = ContextVar("invariant_rag_outside", default=None)


def begin_outside() -> Outside:
    """Return where an outermost run of this thread and task stores its retrievals, if it calls no model.

    It is visible in this context, and in copies of it. Call it when the run begins: its end may be reported in a task
    of the framework.
    """
    outside, task = _OUTSIDE.get(), (get_ident(), 0)
    with suppress(RuntimeError):  # no event loop runs in this thread
        task = get_ident(), id(current_task())
    if outside is None or outside.task != task:
        outside = Outside([] if outside is None else outside_retrievals(), task)
        _OUTSIDE.set(outside)
    return outside


def outside_retrievals() -> list[Retrieval]:
    """Return the last retrievals of this context that no model was called with: they cause warnings, never sets."""
    outside = _OUTSIDE.get()
    listed = () if outside is None else outside.retrievals
    return list(map(partial(replace, one_by_one=True, is_set=False), listed))


def forget_outside(texts: Iterable[str]) -> None:
    """Forget these retrievals once a model was called with all their texts: a later question may quote them."""
    listed, joined = outside_retrievals(), "\n".join(texts)
    if listed and all(each.text.strip() in joined for one in listed for each in one.segments):
        begin_outside().retrievals = []


@dataclass(eq=False)
class _ChainRun:
    parent: _ChainRun | None
    query: str | None  # of a retriever
    outside: Outside | None  # of a root
    noted: list[tuple[_ChainRun, Retrieval]] = field(default_factory=list)  # in a root: with the run that retrieved it
    slots: dict[str, None] = field(default_factory=dict)  # in a root
    called_model: bool = False  # whether a model was called in this root
    ended: bool = False

    @property
    def path(self) -> list[_ChainRun]:
        path = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path


class RunRetrievals:
    """Retrievals and slots by run, in trees of calls: known within one root run, and gone with it. Safe for threads."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, _ChainRun] = OrderedDict()
        self._lock = Lock()

    def start(self, run: Hashable, parent: Hashable | None = None, *, query: str | None = None) -> None:
        """Note that a run began, and the query of a retriever. It is a root run if nothing is known of its parent."""
        with self._lock:
            above = self._runs.get(parent) if parent is not None and parent != run else None
            self._runs[run] = _ChainRun(above, query, _OUTSIDE.get() if above is None else None)
            while len(self._runs) > _MOST_RUNS:  # runs that never ended, such as abandoned generators
                self._runs.popitem(last=False)[1].ended = True

    def end(self, run: Hashable, *, failed: bool = False) -> None:
        """Note that a run ended. What a root run retrieved for no model is then known outside of it."""
        with self._lock:
            own = self._runs.pop(run, None) or _ChainRun(None, None, None)
            own.ended = True
            if own.outside is not None and own.noted and not failed:
                own.outside.retrievals = [] if own.called_model else [each for _, each in own.noted]

    def add(self, run: Hashable, retrieval: Retrieval) -> None:
        """Note what a run retrieved. It replaces what retrievers below this one returned: it chose from that."""
        with self._lock:
            own, root = self._find(run)
            if own is None or root is None or not retrieval.segments:
                return
            if not retrieval.is_set and retrieval.segments in [each.segments for _, each in root.noted]:
                return  # handed from run to run
            if own.query is not None:
                root.noted = [(each, other) for each, other in root.noted if own not in each.path]
                retrieval = replace(retrieval, query=retrieval.query or own.query)
            root.noted.append((own, retrieval))

    def add_slots(self, run: Hashable, *slots: str) -> None:
        """Note values of the variables of a prompt that was filled in, in the root run of a run."""
        with self._lock:
            _, root = self._find(run)
            if root is not None:
                root.slots.update(dict.fromkeys(slots))

    def of(self, run: Hashable | None) -> tuple[list[Retrieval], list[str]]:
        """Return retrievals and slots of the root run of a run; nothing for None: no run."""
        with self._lock:
            own, root = self._find(run)
            if own is None or root is None:
                return [], []
            root.called_model = True
            inside = any(each.query is not None for each in own.path)
            return [replace(each, one_by_one=inside) for _, each in root.noted], list(root.slots)

    def _find(self, run: Hashable | None) -> tuple[_ChainRun | None, _ChainRun | None]:
        own = self._runs.get(run)
        root = None if own is None else own.path[-1]
        return own, None if root is None or root.ended else root
