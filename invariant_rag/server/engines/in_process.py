"""The engine in this process: concurrent requests are decoded as one batch, each tenant with a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from invariant_rag.server.engines.base import Choices
from invariant_rag.server.engines.model_engine import ModelEngine

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.model import InvariantModel


class InProcess(ModelEngine):
    """An `InvariantModel` as an engine.

    Args:
        lm: The model. It needs a tokenizer.
        name: What requests call it. None: its own name.
        caches: A cache of keys and values for each tenant. None for all: nothing is kept.
        together: The most requests to decode as one batch.
        max_prompt_tokens: A longer prompt is refused.

    Raises:
        UnsupportedCombination: There are caches, and the keys of this model cannot be reused.
    """

    def __init__(
        self,
        lm: InvariantModel,
        name: str | None = None,
        *,
        caches: Mapping[str, KeyValueCache] | None = None,
        together: int = 8,
        max_prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(lm, name, together=together, max_prompt_tokens=max_prompt_tokens)
        self.caches = dict(caches or {})
        for tenant in [*self.caches][:1]:
            self.for_tenant(lm, Choices(tenant))

    def check_ready(self) -> None:
        """Do nothing: a model in this process is ready."""

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def for_tenant(self, lm: InvariantModel, choices: Choices) -> InvariantModel:
        """Return a model with the cache of the tenant."""
        return lm.with_cache(self.caches.get(choices.tenant) if choices.keep else None)
