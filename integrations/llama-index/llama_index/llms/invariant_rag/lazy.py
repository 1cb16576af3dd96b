"""A model that is loaded when it is first used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from threading import Lock
from typing import Any

from invariant_rag import InvariantModel
from invariant_rag.errors import ModelNotFound
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.models.loading import context_window

_EMBEDDED = {None: EMBEDDED["generator"], "native": EMBEDDED["native"]}
_CONFIG_OPTIONS = ("revision", "token", "trust_remote_code", "cache_dir")


class LazyModel:
    """Loads a model once, when it is first asked for; copies share it.

    Args:
        name: A hub id or a folder. None: the embedded model.
        options: Keywords of `InvariantModel.from_pretrained`.
        loaded: The model itself, where it exists already.
        cache: What keeps keys and values. None: what the loaded model has.
    """

    def __init__(
        self,
        name: str | None,
        options: Mapping[str, Any],
        loaded: InvariantModel | None = None,
        cache: KeyValueCache | None = None,
    ) -> None:
        self._name = name
        self._options = options
        self._cache = cache
        self._model = None if loaded is None else self._with_cache(loaded)
        self._lock = Lock()
        self.given = loaded is not None

    def __call__(self) -> InvariantModel:
        """Return the model."""
        with self._lock:
            if self._model is None:
                self._model = self._with_cache(InvariantModel.from_pretrained(self._name, **self._options))
            return self._model

    def _with_cache(self, model: InvariantModel) -> InvariantModel:
        return model if self._cache is None else model.with_cache(self._cache)

    @cached_property
    def context_window(self) -> int | None:
        """Tokens of the context window, read from the configuration alone.

        Raises:
            ModelNotFound: There is no such model.
        """
        if self._model is not None:
            return self._model.context_window
        from transformers import AutoConfig

        place = _EMBEDDED.get(self._name) or str(self._name)
        options = {name: self._options[name] for name in _CONFIG_OPTIONS if name in self._options}
        try:
            config = AutoConfig.from_pretrained(place, **options)
        except (OSError, ValueError) as error:
            raise ModelNotFound(f"expected a causal LM at {str(place)!r}: {error}") from error
        return context_window(config)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyModel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyModel, (self._name, self._options)  # weights, keys and values are computed again when needed
