"""Make an engine from names and numbers, in whatever process is to hold it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from invariant_rag.errors import ExtraRequired, InvalidChoice
from invariant_rag.orderings import CrossEncoder, MonoT5
from invariant_rag.orderings.monot5 import default_checkpoint

if TYPE_CHECKING:
    from invariant_rag.generation.overflow import Overflow
    from invariant_rag.orderings import Relevance
    from invariant_rag.server.engines.base import Engine
    from invariant_rag.server.settings import Settings

UPSTREAM_KEY_VARIABLE = "INVARIANT_RAG_UPSTREAM_KEY"
"""The environment variable with the key of the vLLM or of the API behind a server."""

_DEFAULT_NAME = "invariant-rag"
_MEANINGLESS = {
    "vllm": (
        "dtype",
        "device_map",
        "deterministic",
        "cache_gb",
        "cache_folder",
        "together",
        "votes",
    ),
    "upstream": (
        "overflow",
        "dtype",
        "device_map",
        "deterministic",
        "cache_gb",
        "cache_folder",
        "together",
    ),
    None: ("votes",),
}
"""Fields that say nothing of an engine on vLLM, of one behind an API, and of one in process."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made from. It can be pickled, so that another process can make the engine.

    It holds no secrets: the key of a server behind it is in the environment variable `INVARIANT_RAG_UPSTREAM_KEY`.

    Attributes:
        model: Id or folder of a model; None: the embedded one. With `vllm`, where its tokenizer is; None: where
            vLLM has it. With `upstream`, the name of its model; None: the only one that it has.
        name: What requests call it. None: `model`, or its own name.
        method: How documents are read where a request says nothing. None: `rotor`; with `upstream`, `canonical`.
        ordering: Their order. None: that of the method.
        overflow: What happens to documents that do not fit.
        dtype: Of the weights, as for `InvariantModel.from_pretrained`.
        device_map: Where they are, as for `InvariantModel.from_pretrained`.
        deterministic: Whether prompts are read and decoded one by one, as for `InvariantModel`.
        cache_gb: Gigabytes of keys and values in memory, of all tenants together.
        cache_folder: Where they are kept on disk, too. None: nowhere.
        together: The most requests to decode as one batch.
        vllm: Address of a vLLM with the plug-in `vllm-invariant-rag`, which answers. None: this process does.
        upstream: Address of an OpenAI-compatible API that answers instead. None: there is none.
        votes: Orders of the method `vote`, with `upstream`.

    Raises:
        InvalidChoice: There are two engines, or a choice that says nothing of the engine.
    """

    model: str | None = None
    name: str | None = None
    method: str | None = None
    ordering: str | None = None
    overflow: Overflow = "error"
    dtype: str = "auto"
    device_map: str = "auto"
    deterministic: bool = False
    cache_gb: float = 1.0
    cache_folder: Path | None = None
    together: int = 8
    vllm: str | None = None
    upstream: str | None = None
    votes: int = 5

    def __post_init__(self) -> None:
        if self.vllm is not None and self.upstream is not None:
            raise InvalidChoice("expected vllm or upstream, got both", hint="One engine is behind a server.")
        engine = "vllm" if self.vllm is not None else "upstream" if self.upstream is not None else None
        defaults = {each.name: each.default for each in fields(self)}
        for name in _MEANINGLESS[engine]:
            if getattr(self, name) != defaults[name]:
                behind = "a model in this process" if engine is None else engine
                raise InvalidChoice(
                    f"expected no {name} with {behind}, got {getattr(self, name)!r}",
                    hint="It would change nothing. Leave it away.",
                )

    @property
    def served_name(self) -> str:
        """What requests call the model, as far as the configuration says."""
        return self.name or self.model or _DEFAULT_NAME


def build_engine(config: EngineConfig, settings: Settings) -> Engine:
    """Return an engine, which takes the time of loading the model, if one is loaded.

    Args:
        config: What it is made from.
        settings: Its tenants, each of which gets a share of the cache, and its limits.

    Raises:
        ExtraRequired: The package for vLLM is not installed.
        InvalidChoice: A choice is none, or says nothing of the engine.
        InvariantRAGError: The model cannot be loaded, or the server behind it not be reached.
    """
    if config.upstream is not None:
        return _upstream(config, settings)
    return _in_process(config, settings) if config.vllm is None else _on_vllm(config, settings)


def _in_process(config: EngineConfig, settings: Settings) -> Engine:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.server.engines.in_process import InProcess

    choices = {name: getattr(config, name) for name in ("ordering", "overflow", "dtype", "device_map", "deterministic")}
    lm = InvariantModel.from_pretrained(config.model, method=config.method or "rotor", **choices)
    tenants = sorted(set(settings.keys.values())) or [""]
    size = int(config.cache_gb * (1 << 30) / len(tenants))
    kept = size or config.cache_folder is not None
    caches = {each: KeyValueCache(size, folder=config.cache_folder, namespace=each) for each in tenants} if kept else {}
    return InProcess(
        lm,
        config.served_name,
        caches=caches,
        together=config.together,
        max_prompt_tokens=settings.max_prompt_tokens,
    )


def _on_vllm(config: EngineConfig, settings: Settings) -> Engine:
    if find_spec("vllm_invariant_rag") is None:
        raise ExtraRequired("vllm-invariant-rag", "vllm")
    from vllm_invariant_rag import VLLMBackend

    from invariant_rag.server.engines.vllm import OnVLLM

    backend = VLLMBackend(
        config.model,
        url=config.vllm,
        method=config.method,
        ordering=config.ordering,
        overflow=config.overflow,
        api_key=_upstream_key(),
        timeout=settings.timeout,
    )
    return OnVLLM(
        backend,
        config.name or config.model,
        together=settings.max_requests,
        max_prompt_tokens=settings.max_prompt_tokens,
    )


def _upstream(config: EngineConfig, settings: Settings) -> Engine:
    from invariant_rag.server.engines.upstream import Upstream

    if settings.max_prompt_tokens is not None:
        raise InvalidChoice(
            "expected no max_prompt_tokens with upstream, whose tokenizer is elsewhere",
            hint="max_body_bytes limits prompts, too.",
        )
    return Upstream(
        str(config.upstream),
        config.model,
        name=config.name,
        key=_upstream_key(),
        method=config.method or "canonical",
        ordering=config.ordering,
        votes=config.votes,
        together=settings.max_requests,
        timeout=settings.timeout,
    )


def _upstream_key() -> str | None:
    return os.environ.get(UPSTREAM_KEY_VARIABLE, "").strip() or None


def build_reranker(name: str | None) -> Relevance:
    """Return what scores documents for a query: `monot5`, `cross-encoder`, or a MonoT5 checkpoint. None: `monot5`.

    Its model is loaded at the first request. `monot5` is the published checkpoint, or the embedded one where the hub
    cannot be reached.
    """
    return (
        CrossEncoder()
        if name == "cross-encoder"
        else MonoT5(default_checkpoint() if name in (None, "monot5") else name)
    )
