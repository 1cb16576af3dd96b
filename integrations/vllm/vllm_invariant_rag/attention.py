"""vLLM's attention backends, with arranged attention for the prompts of requests that have documents.

All others, and tokens that see what they would see in a plain causal model, are the parent's, untouched. This file and
`connector.py` are all that touches vLLM's internals.

vLLM hands a backend batches without names. A row of the batch is found by the first block of its request: requests
that share it have the same sets, since the connector salts vLLM's prefix cache for each set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from invariant_rag.arrangement import Arrangement
from invariant_rag.attention import resolve_backend
from invariant_rag.attention.call import AttentionCall, BatchBackend
from invariant_rag.attention.positions import Rotation
from invariant_rag.attention.varlen.passes import shifts_of

from vllm_invariant_rag.errors import UnsupportedServer
from vllm_invariant_rag.reading import Reading

_DIGIT = 7  # bits of a number that bfloat16 holds exactly
_FOUND = "_invariant_rag_prompts"


@dataclass
class Step:
    """What the connector tells the layers of a worker's process."""

    readings: Mapping[int, Reading] = field(default_factory=dict)  # by first block; of what is arranged in this step
    block_size: int = 0
    rotation: Rotation | None = None  # the position encoding of all layers


STEP = Step()


@dataclass(frozen=True)
class _Prompt:
    """One row of a batch whose tokens are arranged in this step."""

    queries: slice  # its tokens, among those of the batch
    computed: int  # how many of its tokens were computed before
    row: int  # in the block table
    arrangement: Arrangement
    query_shifts: torch.Tensor | None  # `[Q, 1]` from vLLM's positions, which are indices, to those of the method
    key_shifts: torch.Tensor | None  # `[S, 1]` of all of its keys
    plans: dict[Any, Any] = field(default_factory=dict)  # what the layers of the step share


def _arranged_prompts(metadata: Any, kernel_block: int, device: torch.device) -> list[_Prompt]:
    """Return the arranged prompts of a batch, found once for all layers of a step.

    A block of vLLM may be several of the kernel's. UnsupportedServer: a request to arrange is not in the batch.
    """
    if not STEP.readings or metadata is None:
        return []
    known: list[_Prompt] | None = getattr(metadata, _FOUND, None)
    if known is not None:
        return known
    found, missing = [], set(STEP.readings)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    firsts = (metadata.block_table[:, 0] * kernel_block // STEP.block_size).tolist()
    for row, (start, stop, length, first) in enumerate(zip(starts, starts[1:], lengths, firsts, strict=False)):
        reading, computed = STEP.readings.get(first), length - (stop - start)
        if stop == start or reading is None:
            continue
        missing.discard(first)
        if reading.is_arranged(computed):
            later = [position - index for index, position in enumerate(reading.arrangement.positions[:length])]
            later += later[-1:] * (length - len(later))
            shifts = shifts_of(later[computed:], device), shifts_of(later, device)
            found.append(_Prompt(slice(start, stop), computed, row, reading.arrangement, *shifts))
    if missing:
        raise UnsupportedServer(f"expected {len(missing)} more requests with documents in a batch of vLLM, got none")
    setattr(metadata, _FOUND, found)
    return found


class ArrangedAttention:
    """What a subclass of an implementation of vLLM's attention adds to it."""

    _places: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend for a batch, as vLLM's backends do: queries `[T, H, D]`, keys and values of the same tokens."""
        prompts = _arranged_prompts(attn_metadata, kv_cache.shape[2], query.device)
        arranged = sum(each.queries.stop - each.queries.start for each in prompts)
        if arranged < (attn_metadata.num_actual_tokens if attn_metadata else 1):
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]
        for each in prompts:
            keys, values = key[each.queries], value[each.queries]
            if each.computed:
                blocks = attn_metadata.block_table[each.row]
                before = self._read(layer, kv_cache, blocks, each.computed)
                keys, values = (torch.cat(pair) for pair in zip(before, (keys, values), strict=True))
            rows = output[each.queries]
            rows[:] = self._attend(each, query[each.queries], keys, values).view_as(rows)
        return output

    def _attend(self, prompt: _Prompt, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the attention `[Q, H, D]` of a prompt's last Q tokens to all of its tokens."""
        rotation = STEP.rotation
        if rotation is None:
            raise UnsupportedServer("expected the connector to find the model's position encoding, got none")
        if prompt.query_shifts is not None:
            queries = rotation.rotate_by(queries, prompt.query_shifts)
        if prompt.key_shifts is not None:
            keys = rotation.rotate_by(keys, prompt.key_shifts)
        call = AttentionCall(
            queries=queries.transpose(0, 1)[None],
            keys=keys.transpose(0, 1)[None],
            values=values.transpose(0, 1)[None],
            rotation=rotation,
            scaling=self.scale,  # type: ignore[attr-defined]
            sliding_window=self._window(),
            softcap=getattr(self, "logits_soft_cap", 0) or None,
            sinks=getattr(self, "sinks", None),
        )
        backend = resolve_backend("auto", queries.device)
        if backend.reads_together:
            together = cast("BatchBackend", backend).batch([prompt.arrangement], [0], call, prompt.plans)
            if together is not None:
                return together[0]
        one = replace(call, queries=call.queries[0], keys=call.keys[0], values=call.values[0])
        return backend.attend(prompt.arrangement, one).transpose(0, 1)

    def _window(self) -> int | None:
        """Return the tokens of the layer's sliding window; backends keep the number, or how far it reaches back."""
        window = getattr(self, "sliding_window", None)
        if isinstance(window, tuple):
            return window[0] + 1 if window[0] >= 0 else None
        return None if window in (None, -1) else window

    def _read(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first keys and values `[count, H_kv, D]` of a request from vLLM's blocks `[N, H_kv, B, 2 D]`."""
        if self._places is None:
            self._places = self._learn_places(layer, kv_cache)
        used = kv_cache[blocks[: -(-count // kv_cache.shape[2])].long()].flatten(2)
        keys, values = (used[:, :, places].transpose(1, 2).flatten(0, 1)[:count] for places in self._places)
        return keys, values

    def _learn_places(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a head of a block keeps its keys and its values, `[B, D]` each.

        Kernels pack blocks by instruction set. So known numbers are written, digit by digit, and looked for.
        """
        scratch = torch.zeros_like(kv_cache[:2])
        _, heads, size, width = scratch.shape
        numbers = torch.arange(size * width, device=scratch.device).view(size, 1, width)
        slots, digits = torch.arange(size, 2 * size, device=scratch.device), (size * width).bit_length()
        found = torch.zeros_like(scratch[1], dtype=torch.long)
        for shift in range(0, digits, _DIGIT):
            written = ((numbers >> shift) % (1 << _DIGIT)).expand(-1, heads, -1).to(kv_cache.dtype)
            keys, values = (half.contiguous() for half in written.chunk(2, dim=-1))
            self.do_kv_cache_update(layer, keys, values, scratch, slots)  # type: ignore[attr-defined]
            found += scratch[1].long() << shift
        flat = found.flatten(1)
        places = torch.zeros(size * width, dtype=torch.long, device=scratch.device)
        places[flat[0] % (size * width)] = torch.arange(size * width, device=scratch.device)
        if not torch.equal(flat[:, places], numbers.flatten().expand(heads, -1)):
            raise UnsupportedServer("expected keys and values to be kept in blocks as they are, got another format")
        keys, values = places.view(size, width).chunk(2, dim=-1)
        return keys, values
