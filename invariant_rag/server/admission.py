"""How many requests run and wait, and when another one may try again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Lock

from invariant_rag.server.errors import Busy
from invariant_rag.server.metrics import Metrics

_WEIGHT = 0.2
"""Of the latest request, in the mean of how long requests take."""
_LONGEST_WAIT = 60


class Admission:
    """Places for requests. One that finds none is refused, so that the queue never grows beyond what is answered.

    Args:
        places: Requests that run or wait.
        together: How many are answered at a time.
        metrics: Counts what is admitted and refused.
    """

    def __init__(self, places: int, together: int, metrics: Metrics) -> None:
        self._places, self._together, self._metrics = places, together, metrics
        self._active = 0
        self._seconds = 1.0
        self._lock = Lock()

    @property
    def active(self) -> int:
        """Requests that run or wait."""
        return self._active

    def enter(self) -> Callable[[], None]:
        """Take a place, and return the function that gives it back. It may be called from any thread, once.

        Raises:
            Busy: There is none.
        """
        with self._lock:
            if self._active >= self._places:
                wait = min(max(math.ceil(self._seconds * self._active / self._together), 1), _LONGEST_WAIT)
                self._metrics.rejected.labels("queue").inc()
                raise Busy(f"expected at most {self._places} requests at a time", retry_after=wait)
            self._active += 1
            self._metrics.active.inc()
        start = time.monotonic()

        def leave() -> None:
            with self._lock:
                self._active -= 1
                self._seconds += _WEIGHT * (time.monotonic() - start - self._seconds)
                self._metrics.active.dec()

        return leave
