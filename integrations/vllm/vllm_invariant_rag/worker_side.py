"""The worker's side of the connector: keys and values from the shared folder into vLLM's blocks.

They are written with the attention layer's own `do_kv_cache_update`, so layouts of blocks and quantized caches stay
vLLM's business.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_invariant_rag.errors import EntryUnusable, UnsupportedServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.kv_cache_files import Entry

    from vllm_invariant_rag.scheduler_side import Load

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheShape:
    """What vLLM's layers expect.

    Attributes:
        layers: Layers of the whole model.
        heads: Key-value heads of the whole model.
        local_heads: Those of this worker.
        head_size: Size of a head.
        dtype: Dtype of the model.
        block_size: Tokens of a block.
    """

    layers: int
    heads: int
    local_heads: slice
    head_size: int
    dtype: torch.dtype
    block_size: int


class WorkerSide:
    """Loads entries into the blocks of one worker.

    Args:
        cache: The shared folder.
        shape: What vLLM's layers expect.
    """

    def __init__(self, cache: KeyValueCache, shape: CacheShape) -> None:
        self._cache, self._shape = cache, shape
        self._layers: dict[int, Any] = {}
        self._failed_blocks: set[int] = set()

    def register_layers(self, layers: Mapping[int, Any]) -> None:
        """Take the attention layers of this worker, by their index in the model."""
        self._layers = dict(layers)

    def load(self, load: Load) -> None:
        """Load one request's keys and values. If that is not possible, its blocks are reported as failures."""
        try:
            if load.key is None:
                raise EntryUnusable("the scheduler refused the request")
            self._write(self._checked(self._cache.get(load.key), load), load)
        except UnsupportedServer:
            raise
        except Exception as error:  # noqa: BLE001 - whatever an entry does to vLLM's kernel, other requests go on
            _logger.error("request %s fails: %s: %s", load.request_id, type(error).__name__, error)
            self._failed_blocks.update(load.loaded_blocks(self._shape.block_size))
            if load.key is not None:
                self._cache.discard(load.key)  # what cannot be loaded now never can: the next prefill writes it anew

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that could not be loaded, once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _checked(self, entry: Entry | None, load: Load) -> Entry:
        """Return the entry if it fits the request and the model.

        Raises:
            EntryUnusable: It is missing or does not fit.
        """
        if not self._layers:
            raise UnsupportedServer("expected vLLM to register its attention layers before it loads, got none")
        if entry is None:
            raise EntryUnusable(f"no keys and values {load.key}: never written, removed for space, or damaged")
        shape, tensors = self._shape, [tensor for pair in entry for tensor in pair]
        sizes, expected = {tuple(tensor.shape) for tensor in tensors}, (shape.heads, load.tokens, shape.head_size)
        if len(entry) != shape.layers or sizes != {expected}:
            raise EntryUnusable(
                f"expected {shape.layers} layers with tensors of {expected} (heads, tokens, size of a head), got "
                f"{len(entry)} layers with {sorted(sizes)}"
            )
        if dtypes := {tensor.dtype for tensor in tensors} - {shape.dtype}:
            raise EntryUnusable(f"expected keys and values in {shape.dtype}, vLLM's dtype, got {dtypes.pop()}")
        return entry

    def _write(self, entry: Entry, load: Load) -> None:
        placed = load.slots(self._shape.block_size)
        tokens, slots = torch.tensor([*placed]), torch.tensor([*placed.values()], dtype=torch.int64)
        for index, layer in self._layers.items():
            device = layer.kv_cache.device
            keys, values = (
                tensor[self._shape.local_heads][:, tokens].transpose(0, 1).contiguous().to(device)
                for tensor in entry[index]
            )
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots.to(device))
