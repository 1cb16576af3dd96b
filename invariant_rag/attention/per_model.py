"""Values that are computed once per model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from invariant_rag.locks import ForkSafeLock

Fact = TypeVar("Fact")


def once_per_model(find: Callable[[Any], Fact]) -> Callable[[Any], Fact]:
    """Call a function of a model once for each model, and forget its result with the model. Safe for threads."""
    known: WeakKeyDictionary[Any, Fact] = WeakKeyDictionary()
    lock = ForkSafeLock()

    @wraps(find)
    def found(model: Any) -> Fact:
        if model not in known:
            with lock:
                if model not in known:
                    known[model] = find(model)
        return known[model]

    return found
