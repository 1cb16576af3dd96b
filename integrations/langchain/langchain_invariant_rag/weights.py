"""Loaded models, shared: two objects that name the same weights hold them once."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from invariant_rag.embedded import EMBEDDED
from invariant_rag.engine import InvariantModel
from transformers import AutoConfig

EMBEDDED_FOLDER = EMBEDDED["generator"]
"""Where the model lies that comes with invariant-rag."""

_loaded: WeakValueDictionary[str, InvariantModel] = WeakValueDictionary()
_lock = Lock()


def shared_model(name: str | Path | None, **options: Any) -> InvariantModel:
    """Return the model of that name, loaded unless somebody holds it already.

    Args:
        name: As for `InvariantModel.from_pretrained`.
        **options: As for `InvariantModel.from_pretrained`.
    """
    key = repr((None if name is None else str(name), sorted(options.items())))
    with _lock:
        model = _loaded.get(key)
        if model is None:
            model = _loaded[key] = InvariantModel.from_pretrained(name, **options)
        return model


def stated_context_window(folder: Path) -> int | None:
    """Return how many tokens the configuration in a folder allows, without loading weights; None if it is silent."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
    window: int | None = getattr(config, "max_position_embeddings", None)
    return window
