"""`InvariantRAGConnector`: tells vLLM's attention layers which requests have documents, and isolates their blocks.

It transfers nothing: vLLM passes a KV connector each new request, and carries its metadata to all workers of a step.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from invariant_rag.generation.digest import digest_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from vllm_invariant_rag.arranged_prompt import ArrangedPrompt
from vllm_invariant_rag.attention import STEP
from vllm_invariant_rag.engines import ServerFacts
from vllm_invariant_rag.errors import RequestRefused
from vllm_invariant_rag.requirements import check_engine, check_request, check_worker, rotation_of_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_logger = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has an environment of its own
    """What the workers need for a step: its prompts (see `attention.Step`), and the blocks of requests that fail."""

    prompts: dict[int, ArrangedPrompt] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


class InvariantRAGConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Has requests with documents arranged; other requests are untouched.

    A request that cannot be arranged fails in the way of a failed load: its tokens but the last
    count as loaded, and the worker reports their blocks as failures.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_engine(vllm_config, kv_cache_config)
        self._config, self._facts = vllm_config, ServerFacts.of(vllm_config)
        self._prompts: dict[str, ArrangedPrompt] = {}  # by request
        self._refused: set[str] = set()  # requests
        self._first_blocks: dict[str, int] = {}
        self._refused_blocks: set[int] = set()
        self._secret = secrets.token_hex()
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

    # The scheduler's side.

    def on_new_request(self, request: Request) -> None:
        """Parse the arranged prompt of a request, and salt its blocks: no client can name or guess such a salt."""
        length = request.num_tokens + request.max_tokens
        try:
            prompt = ArrangedPrompt.parse(request.kv_transfer_params, request.prompt_token_ids or ())
            if prompt is None or prompt.arrangement.is_plain:
                return
            check_request(request)
            self._facts.check(prompt, length, RequestRefused)
        except RequestRefused as error:
            _logger.error("refused request %s: %s", request.request_id, error)
            self._refused.add(request.request_id)
            _salt(request, f"{self._secret}:{request.request_id}")
            # With it, vLLM would ignore what `get_num_new_matched_tokens` says.
            request.skip_reading_prefix_cache = False
            return
        self._prompts[request.request_id] = prompt
        # A key depends on later segments too, so blocks are shared by requests about the same sets only.
        sets = tuple(request.prompt_token_ids[: prompt.sets_end]), prompt.layout.texts[:-1], prompt.layout.sets
        _salt(request, digest_of(self._secret, request.cache_salt or "", prompt.method, *sets))
        if prompt.ranks or self._facts.exceeds_window(length):  # blocks do not hold what is needed
            request.skip_reading_prefix_cache = True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return 0, but for a refused request."""
        unread = max(0, request.num_tokens - 1 - num_computed_tokens)
        return (unread if request.request_id in self._refused else 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note the blocks of a refused request."""
        if request.request_id in self._refused:
            self._refused_blocks.update(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the prompts of the requests that this step arranges."""
        metadata, self._refused_blocks = StepMetadata(refused=self._refused_blocks), set()
        cached = scheduler_output.scheduled_cached_reqs
        new = [(each.req_id, each.num_computed_tokens, each.block_ids) for each in scheduler_output.scheduled_new_reqs]
        old = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request_id, computed, blocks in (*new, *old):
            prompt, firsts = self._prompts.get(request_id), self._first_blocks
            if prompt is None:
                continue
            if blocks is not None and (
                computed == 0 or request_id not in firsts or request_id in cached.resumed_req_ids
            ):
                firsts[request_id] = blocks[0][0]
            if prompt.is_arranged(computed):
                stop = computed + scheduler_output.num_scheduled_tokens[request_id]
                if computed < prompt.sets_end and stop < prompt.sets_end:
                    raise RequestRefused(f"expected a step with all {prompt.sets_end} tokens, got {stop}")
                metadata.prompts[firsts[request_id]] = prompt
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request."""
        self._prompts.pop(request.request_id, None)
        self._first_blocks.pop(request.request_id, None)
        self._refused.discard(request.request_id)
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Check the model's layers, and find its position encoding."""
        check_worker(self._config, kv_caches)
        (STEP.rotation, STEP.factors), STEP.block_size = rotation_of_model(), self._block_size

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Tell the layers who is arranged, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        STEP.prompts = connector_metadata.prompts
        self._refused_blocks.update(connector_metadata.refused)

    def clear_connector_metadata(self) -> None:
        """End the step."""
        super().clear_connector_metadata()
        STEP.prompts = {}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose requests fail, once."""
        refused, self._refused_blocks = self._refused_blocks, set()
        return refused

    def _transfer_nothing(self, *args: Any, **kwargs: Any) -> None: ...

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _transfer_nothing


def _salt(request: Request, salt: str) -> None:
    """Give a request another salt, and its blocks the hashes that follow from it."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
