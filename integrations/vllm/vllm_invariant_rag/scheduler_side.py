"""The scheduler's side of the connector: which tokens of a request are loaded, into which blocks.

A request whose parameters, tokens and salt do not belong together is failed by the way on which failed loads are: all
of its tokens but the last count as loaded, and the worker reports their blocks as failures. It keeps away from other
requests under a salt of its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_invariant_rag.errors import RequestRefused
from vllm_invariant_rag.parameters import COMPUTES_PROMPT, FIELD, Admitted, admit

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

NULL_BLOCK = 0
"""Stands for blocks that a sliding window has left behind. All requests have it, so nothing is written or reported."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """Keys and values that one request starts from.

    Attributes:
        request_id: The request.
        key: Key of the entry. None: the request is refused, and its blocks are to be reported as failures.
        tokens: Tokens that the entry covers.
        start: First token to load. Those before it are in vLLM's prefix cache.
        blocks: The blocks of the request, in order.
    """

    request_id: str
    key: str | None
    tokens: int
    start: int
    blocks: tuple[int, ...]

    def slots(self, block_size: int) -> dict[int, int]:
        """Return the slot of each token from `start` on, but for those that lie in no block of their own.

        >>> Load("a", "k", tokens=7, start=3, blocks=(5, 2)).slots(4)
        {3: 23, 4: 8, 5: 9, 6: 10}
        """
        return {
            token: self.blocks[token // block_size] * block_size + token % block_size
            for token in range(self.start, self.tokens)
            if self.blocks[token // block_size] != NULL_BLOCK
        }

    def loaded_blocks(self, block_size: int) -> set[int]:
        """Return the blocks of the request that hold the tokens from `start` on.

        >>> Load("a", "k", tokens=7, start=3, blocks=(5, 2, 9)).loaded_blocks(4) == {5, 2}
        True
        """
        return {*self.blocks[self.start // block_size : (self.tokens - 1) // block_size + 1]} - {NULL_BLOCK}


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has an environment of its own
    """What a step loads before its forward pass."""

    loads: list[Load] = field(default_factory=list)


class SchedulerSide:
    """Decides what is loaded.

    Args:
        model: Fingerprint of the files of vLLM's model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._requests: dict[str, Admitted | None] = {}  # None: refused
        self._loads: list[Load] = []

    def add(self, request: Request) -> None:
        """Check a new request. A refused one gets a salt of its own, so that it meets no block of another request."""
        parameters = request.kv_transfer_params or {}
        try:
            admitted = admit(parameters.get(FIELD), self._model, request.prompt_token_ids or (), request.cache_salt)
            if admitted is not None:
                _check_kind(request)
        except RequestRefused as error:
            _logger.error("refused request %s: %s", request.request_id, error)
            request.cache_salt = f"refused:{request.request_id}"
            request.block_hashes.clear()
            request.update_block_hashes()
            request.skip_reading_prefix_cache = False  # with it, vLLM would ignore what `matched_tokens` returns
            self._requests[request.request_id] = None
        else:
            if admitted is not None:
                self._requests[request.request_id] = admitted

    def matched_tokens(self, request: Request, computed: int) -> int:
        """Return how many tokens are loaded after those that vLLM's prefix cache has.

        A refused prompt of one token cannot be failed by a load. It is answered: one token attends to itself only, in
        every arrangement.
        """
        if request.request_id not in self._requests:
            return 0
        return max(0, self._tokens(request) - computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, loaded: int) -> None:
        """Note the blocks that the loaded tokens of a request go to. Called again for a request that was preempted."""
        if request.request_id not in self._requests or not loaded:
            return
        admitted, tokens = self._requests[request.request_id], self._tokens(request)
        (block_ids,) = blocks.get_block_ids()
        key = None if admitted is None else admitted.key
        self._loads.append(Load(request.request_id, key, tokens, tokens - loaded, tuple(block_ids)))

    def take_loads(self) -> Loads:
        """Return the loads of a step, once."""
        loads, self._loads = self._loads, []
        return Loads(loads)

    def remove(self, request: Request) -> None:
        """Forget a request that ended."""
        self._requests.pop(request.request_id, None)

    def _tokens(self, request: Request) -> int:
        admitted = self._requests[request.request_id]
        return int(request.num_tokens) - 1 if admitted is None else admitted.tokens


def _check_kind(request: Request) -> None:
    """Raise for requests whose keys and values are not those of their tokens alone, or that load none."""
    if request.lora_request is not None:
        raise RequestRefused("expected no LoRA adapter, whose keys and values the prefill worker did not compute")
    if request.mm_features or request.prompt_embeds is not None:
        raise RequestRefused("expected a prompt of tokens, got images, audio or embeddings")
    if request.sampling_params is None:
        raise RequestRefused("expected a request that generates, got one that pools")
    if request.resumable:
        raise RequestRefused("expected a whole prompt, got one that is still being sent")
    if request.skip_reading_prefix_cache:
        raise RequestRefused(COMPUTES_PROMPT)
