"""The progress bar of every command, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel


@contextmanager
def progress_bar(label: str, total: int | None = None, completed: int = 0) -> Iterator[Callable[[], None]]:
    """Show a progress bar of so many steps, some of them done before, and yield the function that advances it by one.

    Without a total, the bar pulses. Implements `invariant_rag.audit.calls.Progress`.
    """
    counters = () if total is None else (MofNCompleteColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *counters, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, completed=completed)
        yield lambda: bar.advance(task)
        if total is None:
            bar.update(task, total=1, completed=1)


def disable_transformers_bars() -> None:
    """Disable the progress bars of transformers, so that there is one bar at a time."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def load_with_progress(name: str | None, **loading: Any) -> InvariantModel:
    """Load a model, with a bar; importing torch, which takes seconds, is a part of that."""
    with progress_bar("Loading model"):
        from invariant_rag.generation.model import InvariantModel

        disable_transformers_bars()
        return InvariantModel.from_pretrained(name, **loading)
