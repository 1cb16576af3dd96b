"""Logs as lines of JSON, as many as somebody can read: what comes again and again is counted."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from datetime import UTC, datetime
from threading import Lock
from typing import Any

_WINDOW_SECONDS = 10.0
_MOST = 20
"""Lines of one kind in a window."""
_MOST_REQUESTS = 1000
"""Lines of requests in a window."""


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON. Of an error it has the places, and not the message, which may hold texts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)
            line["error"] = type(error).__name__
            line["at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
        return json.dumps(line, default=str)


class RateLimit(logging.Filter):
    """Lets so many records of one place in the code through in a while; the next one says how many it left out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = time.monotonic
        self._lock = Lock()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is written."""
        most = _MOST_REQUESTS if record.msg == "request" else _MOST
        place, now = (record.pathname, record.lineno), self.now()
        with self._lock:
            begun, count = self._seen.get(place, (-_WINDOW_SECONDS, 0))
            if now - begun >= _WINDOW_SECONDS:
                record.left_out = max(count - most, 0)
                begun, count = now, 0
            self._seen[place] = begun, count + 1
        return count < most


def configure_logging() -> None:
    """Write all logs of this process, and warnings, to stderr, as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(RateLimit())
    logging.captureWarnings(capture=True)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("invariant_rag", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.INFO)
