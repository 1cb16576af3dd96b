"""`InvariantRAGConnector`: vLLM starts a request from keys and values that an `InvariantModel` computed.

`--kv-transfer-config '{"kv_connector": "InvariantRAGConnector", "kv_connector_module_path":
"vllm_invariant_rag.connector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"folder": "/dev/shm/kv"}}'`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.model_executor.models.utils import extract_layer_index

from vllm_invariant_rag.checkpoint import checkpoint_folder, fingerprint
from vllm_invariant_rag.errors import UnsupportedServer
from vllm_invariant_rag.heads import local_heads
from vllm_invariant_rag.scheduler_side import Loads, SchedulerSide
from vllm_invariant_rag.store import open_cache, place_of
from vllm_invariant_rag.worker_side import CacheShape, WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class InvariantRAGConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM has an environment of its own
    """Loads arranged keys and values, for requests that name a set; other requests are untouched.

    Options in `kv_connector_extra_config`:
        folder: The folder that the prefill worker writes to.
        redis_url: Or the address of the Redis server that it writes to; `$NAME` stands for an environment variable.
        memory_bytes: Size of the cache of entries in memory, per worker; default 1 GiB.

    Raises:
        UnsupportedServer: The configuration cannot be served; the message says why.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_server(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            model = vllm_config.model_config
            self._scheduler = SchedulerSide(fingerprint(checkpoint_folder(model.model, model.revision)))
        else:
            cache = open_cache(vllm_config.kv_transfer_config.kv_connector_extra_config)
            self._worker = WorkerSide(cache, _cache_shape(vllm_config, kv_cache_config))

    # The scheduler's side.

    def on_new_request(self, request: Request) -> None:
        """Check a request when it arrives."""
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens to load, in the same step."""
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note the blocks to load into."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the loads of a step."""
        return self._scheduler.take_loads()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request."""
        self._scheduler.remove(request)
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the attention layers that own these caches.

        Raises:
            UnsupportedServer: They are not one per layer of the model.
        """
        modules = self._vllm_config.compilation_config.static_forward_context
        layers = {extract_layer_index(name): modules[name] for name in kv_caches}
        model, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        expected = model.get_num_layers(parallel)
        if len(kv_caches) != expected or len(layers) != expected:
            raise UnsupportedServer(
                f"expected one cache for each of {expected} layers, got {len(kv_caches)}",
                hint="Models that share keys and values between layers, and draft models, are not supported.",
            )
        self._worker.register_layers(layers)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what this step needs, before its forward pass."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, Loads):
            for load in metadata.loads:
                self._worker.load(load)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose requests fail."""
        return self._worker.take_failed_blocks()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: loads are complete before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing: the prefill worker writes."""

    def wait_for_save(self) -> None:
        """Return at once: nothing is saved."""


def check_server(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Check that a configuration of vLLM can be served.

    Raises:
        UnsupportedServer: It cannot; the message says why.
    """
    transfer, model, parallel = vllm_config.kv_transfer_config, vllm_config.model_config, vllm_config.parallel_config
    place_of(transfer.kv_connector_extra_config)
    reasons = {
        f"kv_role: expected 'kv_consumer', got {transfer.kv_role!r}": transfer.kv_role != "kv_consumer",
        f"kv_load_failure_policy: expected 'fail', got {transfer.kv_load_failure_policy!r}, with which vLLM computes "
        "what cannot be loaded causally": transfer.kv_load_failure_policy != "fail",
        "expected keys and values of each head, got a model with latent attention (MLA)": model.use_mla,
        f"expected one group of layers in the KV cache, got {len(kv_cache_config.kv_cache_groups)}: vLLM cannot fail "
        "single requests with several; use --disable-hybrid-kv-cache-manager": len(kv_cache_config.kv_cache_groups)
        != 1,
        "expected no speculative decoding, which was not tested": vllm_config.speculative_config is not None,
        "expected the configuration that the model's files state, got hf_overrides": bool(model.hf_overrides),
        "expected no context parallelism, which spreads the tokens of a block over workers": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        )
        > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedServer(reason)


def _cache_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheShape:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_total_num_kv_heads()
    return CacheShape(
        layers=model.get_total_num_hidden_layers(),
        heads=heads,
        local_heads=local_heads(heads, parallel.tensor_parallel_size, get_tensor_model_parallel_rank()),
        head_size=model.get_head_size(),
        dtype=model.dtype,
        block_size=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
    )
