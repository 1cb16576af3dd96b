"""Make an engine from names and numbers, in whatever process is to hold it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from invariant_rag.errors import ExtraRequired, InvalidChoice, ModelNotFound
from invariant_rag.methods import METHODS
from invariant_rag.orderings import CrossEncoder, MonoT5
from invariant_rag.orderings.monot5 import default_checkpoint
from invariant_rag.server.settings import UPSTREAM_KEY_VARIABLE, EngineConfig, Settings, key_of_environment

if TYPE_CHECKING:
    from invariant_rag.orderings import Relevance
    from invariant_rag.server.engines.base import Engine


def build_engine(config: EngineConfig, settings: Settings) -> Engine:
    """Return an engine for the tenants of the settings, which takes the time of loading its model, if all is right."""
    if config.upstream is not None:
        return _upstream(config, config.upstream, settings)
    settings.within(frozenset(METHODS))
    return _in_process(config, settings) if config.vllm is None else _on_vllm(config, settings)


def _in_process(config: EngineConfig, settings: Settings) -> Engine:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.server.engines.model_engine import InProcess

    choices = {name: getattr(config, name) for name in ("ordering", "overflow", "dtype", "device_map", "deterministic")}
    tenants = sorted(set(settings.keys.values())) or [""]
    size = int(config.cache_gb * (1 << 30) / len(tenants))
    kept = size or config.cache_folder is not None
    caches = {each: KeyValueCache(size, folder=config.cache_folder, namespace=each) for each in tenants} if kept else {}
    most, name = settings.max_prompt_tokens, config.name or config.model or "invariant-rag"
    lm = InvariantModel.from_pretrained(config.model, method=config.method or "rotor", **choices)
    return InProcess(lm, name, caches=caches, together=config.together, max_prompt_tokens=most)


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
        api_key=key_of_environment(UPSTREAM_KEY_VARIABLE),
        timeout=settings.timeout,
    )
    name, most = config.name or config.model, settings.max_prompt_tokens
    return OnVLLM(backend, name, together=settings.max_requests, max_prompt_tokens=most)


def _upstream(config: EngineConfig, url: str, settings: Settings) -> Engine:
    from invariant_rag.server.engines.upstream import Upstream

    settings.within(Upstream.methods)
    if settings.max_prompt_tokens is not None:
        raise InvalidChoice(
            "expected no max_prompt_tokens with upstream, whose tokenizer is elsewhere",
            hint="max_body_bytes limits prompts, too.",
        )
    if config.model is None:
        raise InvalidChoice("model: expected the name of one with upstream", hint="GET /models of the API lists them.")
    return Upstream(
        url,
        config.model,
        name=config.name,
        key=key_of_environment(UPSTREAM_KEY_VARIABLE),
        method=config.method or "canonical",
        ordering=config.ordering,
        votes=config.votes,
        together=settings.max_requests,
        timeout=settings.timeout,
    )


def build_reranker(name: str | None) -> Relevance:
    """Return what scores documents for a query: `monot5` (None), `cross-encoder`, or a MonoT5 checkpoint.

    Its model is loaded at the first request; that of `monot5` is the embedded one where the hub cannot be reached.
    """
    if name == "cross-encoder":
        return CrossEncoder()
    return MonoT5(default_checkpoint() if name in (None, "monot5") else name)


def check_reranker(name: str | None) -> None:
    """Check that there is such a reranker, whose model is loaded later."""
    if name in (None, "monot5", "cross-encoder"):
        return
    from invariant_rag.models.hub import check_model

    expected = f"reranker: expected monot5, cross-encoder or a checkpoint of MonoT5, got {name!r}"
    try:
        check_model(name)
        from invariant_rag.models.loading import load_config  # imports torch, which takes seconds

        config = load_config(name)
    except ModelNotFound as error:
        raise InvalidChoice(expected, hint=error.hint) from error
    if not config.is_encoder_decoder:
        raise InvalidChoice(f"{expected}, a model of the family {config.model_type}")
