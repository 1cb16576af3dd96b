"""Configurations of vLLM that the connector cannot serve stop at the start, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_invariant_rag import UnsupportedServer
from vllm_invariant_rag.connector import InvariantRAGConnector, check_server


def configuration(**changes: Any) -> tuple[Any, Any]:
    """Return what the check reads of vLLM's configuration, with changes by dotted names."""
    vllm = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"folder": "/tmp/entries"}, kv_role="kv_consumer", kv_load_failure_policy="fail"
        ),
        model_config=SimpleNamespace(use_mla=False, hf_overrides={}),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        speculative_config=None,
    )
    cache = SimpleNamespace(kv_cache_groups=[object()])
    for name, value in changes.items():
        path, _, attribute = name.rpartition("__")
        setattr(getattr(vllm, path) if path else (cache if hasattr(cache, attribute) else vllm), attribute, value)
    return vllm, cache


def test_the_launch_line_of_the_readme_is_served() -> None:
    check_server(*configuration())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_transfer_config__kv_connector_extra_config": {}}, "folder"),
        ({"kv_transfer_config__kv_connector_extra_config": {"folder": 3}}, "folder"),
        ({"kv_transfer_config__kv_connector_extra_config": {"folder": "/x", "fodler": 1}}, "fodler"),
        ({"kv_transfer_config__kv_connector_extra_config": {"folder": "/x", "redis_url": "redis://x"}}, "redis_url"),
        ({"kv_transfer_config__kv_connector_extra_config": {"redis_url": "redis://:$NOT_SET@x"}}, "NOT_SET"),
        ({"kv_transfer_config__kv_role": "kv_both"}, "kv_consumer"),
        ({"kv_transfer_config__kv_load_failure_policy": "recompute"}, "causally"),
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__hf_overrides": {"rope_theta": 1}}, "hf_overrides"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"speculative_config": object()}, "speculative"),
        ({"kv_cache_groups": [object(), object()]}, "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedServer, match=why):
        check_server(*configuration(**changes))


def test_vllm_turns_its_hybrid_manager_off_for_the_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    assert not supports_hma(InvariantRAGConnector)
