"""Make an engine from names and numbers, in whatever process is to hold it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from invariant_rag.orderings import CrossEncoder, MonoT5

if TYPE_CHECKING:
    from invariant_rag.orderings import Relevance
    from invariant_rag.server.engines.base import Engine
    from invariant_rag.server.settings import Settings

_DEFAULT_NAME = "invariant-rag"


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made from. It can be pickled, so that another process can make the engine.

    Attributes:
        model: Id or folder of a model. None: the embedded one.
        name: What requests call it. None: `model`, or `invariant-rag`.
        method: How documents are read where a request says nothing.
        ordering: Their order. None: that of the method.
        overflow: What happens to documents that do not fit.
        dtype: Of the weights, as for `InvariantModel.from_pretrained`.
        device_map: Where they are, as for `InvariantModel.from_pretrained`.
        cache_gb: Gigabytes of keys and values in memory, of all tenants together.
        cache_folder: Where they are kept on disk, too. None: nowhere.
        together: The most requests to decode as one batch.
    """

    model: str | None = None
    name: str | None = None
    method: str = "rotor"
    ordering: str | None = None
    overflow: str = "error"
    dtype: str = "auto"
    device_map: str = "auto"
    cache_gb: float = 1.0
    cache_folder: Path | None = None
    together: int = 8

    @property
    def served_name(self) -> str:
        """What requests call the model."""
        return self.name or self.model or _DEFAULT_NAME


def build_engine(config: EngineConfig, settings: Settings) -> Engine:
    """Return an engine in this process, which takes the time of loading the model.

    Args:
        config: What it is made from.
        settings: Its tenants, each of which gets a share of the cache, and its limits.
    """
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.server.engines.in_process import InProcess

    choices = {name: getattr(config, name) for name in ("method", "ordering", "overflow", "dtype", "device_map")}
    lm = InvariantModel.from_pretrained(config.model, **choices)
    tenants = sorted(set(settings.keys.values())) or [""]
    size, folder = int(config.cache_gb * (1 << 30) / len(tenants)), config.cache_folder
    caches = {each: KeyValueCache(size, folder=folder, namespace=each) for each in tenants} if size or folder else {}
    return InProcess(
        lm,
        config.served_name,
        caches=caches,
        together=config.together,
        max_prompt_tokens=settings.max_prompt_tokens,
    )


def build_reranker(name: str | None) -> Relevance:
    """Return what scores documents for a query: `monot5`, `cross-encoder`, or a MonoT5 checkpoint. None: `monot5`."""
    return CrossEncoder() if name == "cross-encoder" else MonoT5(None if name == "monot5" else name)
