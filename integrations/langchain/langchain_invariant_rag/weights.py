"""Loaded models, shared: two objects that name the same weights hold them once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from invariant_rag.generation.model import InvariantModel
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.models.loading import context_window
from transformers import AutoConfig

_loaded: WeakValueDictionary[str, InvariantModel] = WeakValueDictionary()
_last: deque[InvariantModel] = deque(maxlen=1)  # outlives objects that are made for a single call
_lock = Lock()


@dataclass
class HeldWeights:
    """Holds a loaded model for an object and its copies, which share this holder.

    Attributes:
        model: What `shared_model` returned. None: nothing was loaded yet.
    """

    model: InvariantModel | None = None


def shared_model(name: str | Path | None, **options: Any) -> InvariantModel:
    """Return the model of that name, loaded unless somebody holds it already, or it was asked for last.

    Args:
        name: As for `InvariantModel.from_pretrained`.
        **options: As for `InvariantModel.from_pretrained`.
    """
    key = repr((None if name is None else str(name), sorted(options.items())))
    with _lock:
        model = _loaded.get(key)
        if model is None:
            _last.clear()  # frees its memory for the next one
            model = _loaded[key] = InvariantModel.from_pretrained(name, **options)
        _last.append(model)
        return model


def stated_context_window(name: str | Path | None) -> int | None:
    """Return how many tokens a model's positions reach, as its configuration says it, without loading weights.

    Args:
        name: As for `InvariantModel.from_pretrained`.

    Returns:
        None where the configuration is silent, or not on this machine: nothing is asked of a hub.
    """
    place = EMBEDDED[name or "generator"] if name in (None, "native") else Path(name)
    if not place.is_dir():
        return None
    return context_window(AutoConfig.from_pretrained(place, local_files_only=True))
