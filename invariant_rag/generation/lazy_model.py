"""Models that are loaded when they are first used, once per process."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from invariant_rag.checks import check_kind
from invariant_rag.errors import InvalidChoice, ToyModelWarning
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.model import InvariantModel
from invariant_rag.models.loading import context_window, load_config
from invariant_rag.shown import shown


class LazyModel:
    """An `InvariantModel` that is loaded when it is first used.

    Weights are loaded once per process: objects with the same name and options share them as long as one of them, or a
    model that came from one, exists; the last used ones stay in memory. Safe for threads. A copy is the same object. A
    pickle holds the name and the options, without weights or a cache, or the model in memory.

    The source is a hub id, a folder, or a model in memory; None or `native`: an embedded model; with None, there is a
    `ToyModelWarning` when it is loaded. Options are keywords of `InvariantModel.from_pretrained` that concern weights:
    `dtype`, `device_map`... Without a cache of keys and values, it has that of the model in memory, if there is one.
    """

    def __init__(
        self,
        source: str | Path | InvariantModel | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        cache: KeyValueCache | None = None,
    ) -> None:
        if not isinstance(source, str | Path | InvariantModel | None):
            raise InvalidChoice(f"source: expected the name of a model, a folder or a model, got {shown(source)}")
        self._source = source
        self._options = dict(check_kind("options", {} if options is None else options, Mapping))  # type: ignore[type-abstract]
        self._cache = cache
        self._base = source if isinstance(source, InvariantModel) else None
        self._config: PreTrainedConfig | None = None
        self._chosen: tuple[dict[str, Any], InvariantModel] | None = None
        self._lock = Lock()
        _alive.add(self)

    @property
    def in_memory(self) -> bool:
        """Whether the model was passed in memory."""
        return isinstance(self._source, InvariantModel)

    def lm(self, **choices: Any) -> InvariantModel:
        """Return the model with choices of `with_method`; load its weights if that was not done yet.

        The same choices return the same object, so that an ordering that loads a model of its own loads it once.
        """
        with self._lock:
            if self._base is None:
                if self._source is None:
                    warnings.warn(ToyModelWarning(), stacklevel=2)
                self._base = _shared_model(self._source, self._options)
                for each in list(_alive):  # one that was made for a single call leaves its weights to the others
                    if each._base is None and (each._source, each._options) == (self._source, self._options):
                        each._base = self._base
            if self._chosen is None or self._chosen[0] != choices:
                lm = self._base.with_method(**choices) if choices else self._base
                self._chosen = choices, lm if self._cache is None else lm.with_cache(self._cache)
            return self._chosen[1]

    def context_window(self, *, local_files_only: bool = False) -> int | None:
        """Return the tokens of the context window, from the configuration alone; None where it states no limit."""
        if isinstance(self._source, InvariantModel):
            return self._source.context_window
        if self._config is None:
            self._config = load_config(self._source, local_files_only=local_files_only, **self._options)
        return context_window(self._config)

    def __deepcopy__(self, memo: object = None) -> LazyModel:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyModel, (self._source, self._options)


_alive: WeakSet[LazyModel] = WeakSet()
_loaded: WeakKeyDictionary[PreTrainedModel, tuple[object, PreTrainedTokenizerBase | None]] = WeakKeyDictionary()
"""What weights were loaded from, and their tokenizer."""
_last_used: deque[PreTrainedModel] = deque(maxlen=1)
_loading = Lock()


def _shared_model(name: Any, options: Mapping[str, Any]) -> InvariantModel:
    """Return the model of that name, with default choices; load it unless its weights are in memory."""
    # Of a folder, with the time in ns when one of its files last changed: it may be written again.
    folder = Path(name).resolve() if name is not None and Path(name).is_dir() else None
    changed = 0 if folder is None else max((file.stat().st_mtime_ns for file in folder.iterdir()), default=0)
    key = None if name is None else str(folder or name), changed, options
    with _loading:
        loaded = [(model, tokenizer) for model, (origin, tokenizer) in list(_loaded.items()) if origin == key]
        _last_used.clear()  # frees its memory for the next one
        lm = InvariantModel(*loaded[0]) if loaded else InvariantModel.from_pretrained(name, **options)
        _loaded[lm.model] = key, lm.tokenizer
        _last_used.append(lm.model)
        return lm
