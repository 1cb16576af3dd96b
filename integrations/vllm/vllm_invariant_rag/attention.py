"""vLLM's attention backends, with arranged attention for the prompts of requests that have documents.

All others, and tokens that attend as in a plain causal model, are the parent's, untouched. This file and
`connector.py` are all that touches vLLM's internals.

vLLM hands a backend batches without names. A row of the batch is identified by the first block of its request: requests
that share it have the same sets, since the connector salts vLLM's prefix cache for each set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from invariant_rag.arrangement import Arrangement
from invariant_rag.attention import hook, resolve_backend
from invariant_rag.attention.base import LayerInputs
from invariant_rag.attention.positions import Rotation

from vllm_invariant_rag.arranged_prompt import ArrangedPrompt
from vllm_invariant_rag.errors import UnsupportedServer
from vllm_invariant_rag.sequences import Sequences

_DIGIT = 7  # bits of a number that bfloat16 holds exactly
_FOUND, _ANOTHER = "_invariant_rag_found", "_invariant_rag_another"


@dataclass
class Step:
    """What the connector passes to the layers of a worker's process."""

    prompts: Mapping[int, ArrangedPrompt] = field(default_factory=dict)  # by first block: those arranged in this step
    block_size: int = 0
    rotation: Rotation | None = None  # the position encoding of all layers
    factors: torch.Tensor | None = None  # `[P, R / 2]` complex: how it rotates keys at each position


STEP = Step()


@dataclass(frozen=True)
class _ArrangedPrompt:
    """One row of a batch whose tokens are arranged in this step."""

    queries: slice  # its tokens, among those of the batch
    computed: int  # how many of its tokens were computed before
    row: int  # in the block table
    arrangement: Arrangement
    factors: torch.Tensor | None  # `[S, 1, R / 2]` from vLLM's positions, which are indices, to those of the method
    sequences: Sequences | None  # on a CPU, where the kernel takes them
    plans: dict[Any, Any] = field(default_factory=dict)  # shared by the layers of the step


@dataclass(frozen=True)
class _Batch:
    """The parts of a batch, computed once for all layers of a step."""

    prompts: Sequence[_ArrangedPrompt] = ()  # the arranged ones; without any, the whole batch is the parent's
    others: Any = None  # the tokens of all others
    metadata: Any = None  # vLLM's, of these requests


class BatchBuilder:
    """What a subclass of a builder of vLLM's metadata adds to it: metadata that makes some for other batches."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the metadata of a batch."""
        build: Callable[..., Any] = super().build  # type: ignore[misc]
        metadata = build(common_prefix_len, common_attn_metadata, *args, **kwargs)

        def another(queries: Sequence[int], lengths: Sequence[int], table: torch.Tensor) -> Any:
            starts = torch.tensor([*accumulate(queries, initial=0)], dtype=torch.int32)
            sizes = {"num_reqs": len(queries), "num_actual_tokens": sum(queries)}
            sizes |= {"max_query_len": max(queries), "max_seq_len": max(lengths)}
            tables = {"query_start_loc": starts, "query_start_loc_cpu": starts, "block_table_tensor": table}
            seq_lens = torch.tensor(lengths, dtype=torch.int32)
            return build(0, replace(common_attn_metadata, seq_lens=seq_lens, **sizes, **tables))

        setattr(metadata, _ANOTHER, another)
        return metadata


def _find_prompts(metadata: Any, kernel_block: int, device: torch.device) -> _Batch:
    """Find the arranged prompts of a batch.

    A block of vLLM may be several of the kernel's. UnsupportedServer: a request to arrange is not in the batch.
    """
    if not STEP.prompts or metadata is None:
        return _Batch()
    known: _Batch | None = getattr(metadata, _FOUND, None)
    if known is not None:
        return known
    prompts, others, missing = [], [], set(STEP.prompts)
    another = getattr(metadata, _ANOTHER, None) if device.type == "cpu" else None
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    firsts = (metadata.block_table[:, 0] * kernel_block // STEP.block_size).tolist()
    for row, (start, stop, length, first) in enumerate(zip(starts, starts[1:], lengths, firsts, strict=False)):
        prompt, computed = STEP.prompts.get(first), length - (stop - start)
        if stop == start:
            continue
        missing.discard(first)
        if prompt is None or not prompt.is_arranged(computed):
            others.append(row)
        else:
            arrangement = prompt.arrangement
            sequences = another and Sequences.of(arrangement.rows_from(computed, length), length, another)
            factors = _factors_to(arrangement.positions, length)
            prompts.append(_ArrangedPrompt(slice(start, stop), computed, row, arrangement, factors, sequences))
    if missing:
        raise UnsupportedServer(f"expected {len(missing)} more requests with documents in a batch of vLLM, got none")
    batch = _Batch(prompts, slice(None) if others else None, metadata)
    if prompts and others and another is not None:
        tokens = [index for row in others for index in range(starts[row], starts[row + 1])]
        queries = [starts[row + 1] - starts[row] for row in others]
        rest = another(queries, [lengths[row] for row in others], metadata.block_table[others])
        batch = _Batch(prompts, tokens, rest)
    setattr(metadata, _FOUND, batch)
    return batch


def _factors_to(positions: Sequence[int], length: int) -> torch.Tensor | None:
    """Return the factors `[length, 1, R / 2]` from indices to positions, which count on; None where these are indices.

    They are quotients of vLLM's own factors, so keys become what vLLM would compute at those positions, with the same
    float32 error, which grows with the angle.
    """
    moved = [*positions[:length], *range(positions[-1] + 1, positions[-1] + 1 + length - len(positions))]
    if moved == [*range(length)]:
        return None
    factors = cast("torch.Tensor", STEP.factors)
    return (factors[moved] / factors[:length])[:, None].to(torch.complex64)


class ArrangedAttentionImpl:
    """What a subclass of an implementation of vLLM's attention adds to it."""

    _layout: tuple[torch.Tensor, ...] | None = None

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
        batch = _find_prompts(attn_metadata, kv_cache.shape[2], query.device)
        attend: Callable[..., torch.Tensor] = super().forward  # type: ignore[misc]
        if not batch.prompts:
            return attend(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if (others := batch.others) is not None:
            rest, *tokens = (each[others] for each in (output, query, key, value))
            attend(layer, *tokens, kv_cache, batch.metadata, rest, *args, **kwargs)
            output[others] = rest
        for each in batch.prompts:
            keys, values = key[each.queries], value[each.queries]
            if each.computed:
                blocks = attn_metadata.block_table[each.row]
                before = self._gather(layer, kv_cache, blocks, each.computed)
                keys, values = (torch.cat(pair) for pair in zip(before, (keys, values), strict=True))
            rows, queries, rotation = output[each.queries], query[each.queries], cast("Rotation", STEP.rotation)
            if each.factors is not None:
                queries = rotation.rotate_with(queries, each.factors[each.computed :])
                keys = rotation.rotate_with(keys, each.factors)
            sequences, window = each.sequences, self._window()
            if sequences is not None and (window is None or sequences.longest <= window):
                blocks = sequences.fill(keys, values, rotation, partial(self.do_kv_cache_update, layer))  # type: ignore[attr-defined]
                attend(layer, queries, keys, values, blocks, sequences.metadata, rows, *args, **kwargs)
            else:
                queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
                extra = {"softcap": getattr(self, "logits_soft_cap", 0) or None, "s_aux": getattr(self, "sinks", None)}
                inputs = LayerInputs(layer, 0, queries, keys, values, self.scale, window, 0.0, extra)  # type: ignore[attr-defined]
                backend, states = resolve_backend("auto", queries.device), [hook.PromptState(each.arrangement)]
                of_core = hook.ArrangedAttention(states, backend, [rotation], plans=each.plans)
                rows[:] = of_core(inputs)[0].view_as(rows)
        return output

    def _window(self) -> int | None:
        """Return the tokens of the layer's sliding window; backends keep the number, or how far it reaches back."""
        window = getattr(self, "sliding_window", None)
        if isinstance(window, tuple):
            return window[0] + 1 if window[0] >= 0 else None
        return None if window in (None, -1) else window

    def _gather(self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Return the first keys and values `[count, H_kv, D]` of a request from vLLM's blocks `[N, H_kv, B, 2 D]`."""
        if self._layout is None:
            self._layout = self._learn_layout(layer, kv_cache)
        used = kv_cache[blocks[: -(-count // kv_cache.shape[2])].long()].flatten(2)
        return tuple(used[:, :, indices].transpose(1, 2).flatten(0, 1)[:count] for indices in self._layout)

    def _learn_layout(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the indices of keys and of values within a head of a block, `[B, D]` each.

        Kernels pack blocks by instruction set. So known numbers are written, digit by digit, and located.
        """
        scratch = torch.zeros_like(kv_cache[:2])
        _, heads, size, width = scratch.shape
        numbers = torch.arange(size * width, device=scratch.device).view(size, 1, width)
        slots, digits = torch.arange(size, 2 * size, device=scratch.device), (size * width).bit_length()
        packed = torch.zeros_like(scratch[1], dtype=torch.long)
        for shift in range(0, digits, _DIGIT):
            written = ((numbers >> shift) % (1 << _DIGIT)).expand(-1, heads, -1).to(kv_cache.dtype)
            keys, values = (half.contiguous() for half in written.chunk(2, dim=-1))
            self.do_kv_cache_update(layer, keys, values, scratch, slots)  # type: ignore[attr-defined]
            packed += scratch[1].long() << shift
        flat = packed.flatten(1)
        indices = flat[0].argsort()
        if not torch.equal(flat[:, indices], numbers.flatten().expand(heads, -1)):
            raise UnsupportedServer("expected keys and values to be kept in blocks as they are, got another format")
        return indices.view(size, width).chunk(2, dim=-1)
