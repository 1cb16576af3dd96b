"""How library code reports progress. The command line passes the bar of `invariant_rag.cli.progress`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """Opens a progress display for one piece of work."""

    def __call__(
        self, label: str, total: int | None = None, completed: int = 0
    ) -> AbstractContextManager[Callable[[], None]]:
        """Return a context manager that yields a function to call after each step.

        Args:
            label: What is being done.
            total: Number of steps; None if unknown.
            completed: Steps that were done before, in an interrupted run.
        """


def no_progress(label: str, total: int | None = None, completed: int = 0) -> AbstractContextManager[Callable[[], None]]:
    """Show nothing."""
    del label, total, completed
    return nullcontext(lambda: None)
