"""vLLM's attention backends, with arranged attention for the prompts of requests that have documents.

All others, and tokens that see what they would see in a plain causal model, are the parent's, untouched. This file and
`connector.py` are all that touches vLLM's internals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from invariant_rag.attention import resolve_backend
from invariant_rag.attention.call import AttentionCall, BatchBackend

from vllm_invariant_rag.errors import UnsupportedServer
from vllm_invariant_rag.step import STEP, ArrangedPrompt

_DIGIT = 7  # bits of a number that bfloat16 holds exactly


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
        prompts = STEP.arranged(attn_metadata, kv_cache.shape[2], query.device) if STEP.readings else []
        if sum(len(each.queries) for each in prompts) < (attn_metadata.num_actual_tokens if attn_metadata else 1):
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]
        for each in prompts:
            rows = slice(each.queries.start, each.queries.stop)
            keys, values = key[rows], value[rows]
            if each.computed:
                blocks = attn_metadata.block_table[each.row]
                before = self._read(layer, kv_cache, blocks, each.computed)
                keys, values = (torch.cat(pair) for pair in zip(before, (keys, values), strict=True))
            output[rows] = self._arranged(each, query[rows], keys, values).view_as(output[rows])
        return output

    def _arranged(
        self, prompt: ArrangedPrompt, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
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
        keys, values = (
            used[:, :, places].transpose(1, 2).flatten(0, 1)[:count] for places in self._places
        )  # [N, H, B, D] each
        return keys, values

    def _learn_places(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a head of a block keeps its keys and its values, `[B, D]` each.

        Kernels pack blocks by instruction set. So known numbers are written, digit by digit, and looked for.

        Raises:
            UnsupportedServer: A number is not found again, or not in all heads at the same place.
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
