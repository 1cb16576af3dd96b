"""Who may wait, and whose turn it is: shares of tenants, round robin between them, and short requests before long ones.

No queue is endless, and no tenant fills one: half of each queue's capacity is reserved in equal parts for the tenants.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock

from invariant_rag.server.errors import Busy
from invariant_rag.server.settings import Settings
from invariant_rag.server.telemetry import Metrics

POLL_SECONDS = 0.05  # how often a waiting thread looks whether somebody still waits for the result
_WEIGHT = 0.2  # of the latest request, in the mean of how long requests take
_LONGEST_WAIT = 60


class Shares:
    """Places that tenants share. Not locked: its owner is.

    Half of the places belong to the tenants in equal parts, one at least; the rest belongs to whoever comes.
    """

    def __init__(self, places: int, tenants: int) -> None:
        self.places, self._tenants = places, tenants
        self.own = 0 if tenants < 2 else max(places // (2 * tenants), 1)
        self.taken: Counter[str] = Counter()  # to give a place back, count it down

    def take(self, tenant: str) -> bool:
        """Take a place for a tenant, and return whether there was one."""
        kept = 0
        if self.own and self.taken[tenant] >= self.own:
            used = sum(min(count, self.own) for name, count in self.taken.items() if name != tenant)
            kept = self.own * (self._tenants - 1) - used
        is_free = self.places - self.taken.total() > kept
        self.taken[tenant] += is_free
        return is_free


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its turn.

    `due` is when it came, and as many seconds later as it is estimated to take: so a short request overtakes long ones
    that came shortly before it, and no long one waits for ever.
    """

    tenant: str
    due: float
    turn: Event = field(default_factory=Event)


class FairQueue:
    """Turns for so many requests together. The next is of the tenant who has the fewest, and waits the longest."""

    def __init__(self, together: int, tenants: int) -> None:
        self._shares = Shares(together, tenants)
        self._waiting: list[_Waiting] = []
        self._last: dict[str, float] = {}
        self._lock = Lock()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextmanager
    def turn(self, tenant: str, seconds: float, abandoned: Event) -> Iterator[None]:
        """Wait for a turn of a request that takes about so many seconds, and have it during the block."""
        mine = _Waiting(tenant, time.monotonic() + seconds)
        with self._lock:
            if not self._waiting and self._shares.take(tenant):
                self._last[tenant] = time.monotonic()
                mine.turn.set()
            else:
                self._waiting.append(mine)
                self._call_next()
        try:
            while not mine.turn.wait(POLL_SECONDS):
                if abandoned.is_set():
                    raise CancelledError
            yield
        finally:
            with self._lock:
                if mine.turn.is_set():
                    self._shares.taken[tenant] -= 1
                else:
                    self._waiting.remove(mine)
                if self._waiting:
                    self._call_next()

    def _call_next(self) -> None:
        """Give turns as long as there is room for one who waits."""
        taken, last = self._shares.taken, self._last
        while self._waiting:
            by_turn = sorted(self._waiting, key=lambda each: (taken[each.tenant], last.get(each.tenant, 0.0), each.due))
            chosen = next((each for each in by_turn if self._shares.take(each.tenant)), None)
            if chosen is None:
                return
            self._waiting.remove(chosen)
            last[chosen.tenant] = time.monotonic()
            chosen.turn.set()


class Admission:
    """Places for requests. One that finds none is refused, so that no queue grows beyond what is answered.

    So many are answered together, and as many bodies parsed as there are workers.
    """

    def __init__(self, settings: Settings, together: int, workers: int, metrics: Metrics) -> None:
        self._shares, self._together = Shares(settings.max_requests, settings.tenants), together
        self.parsing = FairQueue(workers, settings.tenants)
        # One batch is decoded while the next one gathers.
        self.answering = FairQueue(2 * together, settings.tenants)
        self._metrics, self._seconds, self._lock = metrics, 1.0, Lock()

    @property
    def active(self) -> int:
        """Requests that run or wait."""
        return self._shares.taken.total()

    def enter(self, tenant: str) -> None:
        """Take a place for a tenant."""
        with self._lock:
            if not self._shares.take(tenant):
                wait = min(max(math.ceil(self._seconds * self.active / self._together), 1), _LONGEST_WAIT)
                self._metrics.rejected.labels("queue").inc()
                others = ", and no tenant to take the places of others" if self._shares.own else ""
                room = f"expected at most {self._shares.places} requests at a time{others}"
                raise Busy(room, retry_after=wait)
            self._metrics.active.inc()

    def leave(self, tenant: str, seconds: float) -> None:
        """Give a place back, from any thread, after so many seconds."""
        with self._lock:
            self._shares.taken[tenant] -= 1
            self._seconds += _WEIGHT * (seconds - self._seconds)
            self._metrics.active.dec()
