"""Ask what is not answered yet, in threads or in actors, and write every answer down at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock
from time import perf_counter
from typing import TextIO

from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit.plan import Ask
from invariant_rag.evaluation.audit.remedies import Asker
from invariant_rag.evaluation.ray_map import ray_map


@dataclass(frozen=True)
class Record:
    """One stored answer.

    Attributes:
        key: `Ask.key`.
        asker: Who answered.
        question: Id of the question.
        order: How the segments were listed.
        text: The answer.
        tokens: Tokens read and written, where known.
        seconds: How long it took.
    """

    key: str
    asker: str
    question: str
    order: tuple[int, ...]
    text: str
    tokens: int | None
    seconds: float


class AnswerStore:
    """Answers by key, in memory and, where it has a path, in an append-only .jsonl file.

    An answer is one line, written and flushed before the next call of its thread begins. A last line that was torn
    when its writer was killed is no answer; it is ended, and skipped from then on. Of two lines with one key, the
    first counts. Thread-safe; one process at a time.

    Raises:
        AuditFailed: The file cannot be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.records: dict[str, Record] = {}
        self._lock = Lock()
        self._file: TextIO | None = None
        if path is not None:
            try:
                torn = self._read(path) if path.exists() else False
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise AuditFailed(f"{path}: cannot be opened: {error}", hint="Choose another folder.") from error
            if torn:
                self._file.write("\n")

    def _read(self, path: Path) -> bool:
        """Read the answers; return whether the file does not end with a line break."""
        content = path.read_bytes()
        for line in content.split(b"\n"):
            try:
                fields = json.loads(line)
                record = Record(**{**fields, "order": tuple(fields["order"])})
            except (ValueError, TypeError, KeyError):
                continue  # torn: what it held is asked again
            self.records.setdefault(record.key, record)
        return bool(content) and not content.endswith(b"\n")

    def add(self, record: Record) -> None:
        """Keep an answer."""
        with self._lock:
            if record.key not in self.records:
                self.records[record.key] = record
                if self._file is not None:
                    self._file.write(json.dumps(asdict(record)) + "\n")
                    self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def answer(ask: Ask, askers: Mapping[str, Asker]) -> Record:
    """Make a call.

    Raises:
        AuditFailed: It failed.
    """
    segments = ask.call.listed(ask.question)
    start = perf_counter()
    try:
        reply = askers[ask.call.asker](ask.question, segments, ask.call.salt)
    except AuditFailed:
        raise
    except Exception as error:
        raise AuditFailed(
            f"{ask.call.asker} failed on question {ask.question.id!r}: {type(error).__name__}: {error}",
            hint="Its segments began with hashes. If it parses their texts, audit it with tags=False (--no-tags)."
            if ask.call.tags
            else None,
        ) from error
    seconds = perf_counter() - start
    return Record(ask.key, ask.call.asker, ask.question.id, ask.call.order, reply.text, reply.tokens, seconds)


def answer_all(
    asks: Sequence[Ask],
    askers: Mapping[str, Asker],
    store: AnswerStore,
    *,
    workers: int,
    on_answer: Callable[[], object],
) -> None:
    """Make calls in this process, `workers` at a time, and store what they answer.

    Raises:
        AuditFailed: A call failed. The calls that were running are finished and stored, no other is begun.
    """
    failed = Event()

    def make(ask: Ask) -> None:
        if failed.is_set():
            return
        try:
            store.add(answer(ask, askers))
        except AuditFailed:
            failed.set()
            raise
        on_answer()

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(make, ask) for ask in asks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    for future in futures:
        if not future.cancelled():
            future.result()


def answer_over_actors(
    asks: Sequence[Ask],
    askers: Mapping[str, Asker],
    store: AnswerStore,
    *,
    actors: int,
    on_answer: Callable[[], object],
) -> None:
    """Make calls in Ray actors, each with a copy of all that is asked, and store what they answer.

    Raises:
        AuditFailed: A call failed.
        ActorsLost: A call lost its actor again and again.
        ExtraRequired: Ray is not installed.
    """
    for record in ray_map(lambda: partial(answer, askers=askers), asks, actors):
        store.add(record)
        on_answer()
