"""Attention modules that compute attention in their own code, outside of transformers' attention interface.

The table names, for each, the method between its projections and its output, and where that takes queries, keys and
values from. `replaced` patches it on one module, for the length of a `with` block. Threads without an active attention
function get the module's own method all the while.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from invariant_rag.attention.base import AttentionFunction, LayerInputs
from invariant_rag.attention.per_model import cache_of, once_per_model

Output: TypeAlias = tuple[torch.Tensor, None]


class Inline(NamedTuple):
    """The name of the method of a module that is replaced, and what replaces it."""

    method: str
    compute: Callable[..., Output]  # from the module, its attention function, and the arguments of the method


@once_per_model
def inline_attention(model: nn.Module) -> list[tuple[nn.Module, Inline]]:
    """Return the model's modules that compute attention in their own code and can be reached, one for each layer."""
    names = (
        (module, f"{kind.__module__}.{kind.__name__}") for module in model.modules() for kind in type(module).__mro__
    )
    # From transformers 5.24 on, GPT-J and CodeGen use the attention interface.
    listed = [(module, _INLINE[name]) for module, name in names if name in _INLINE]
    return [(module, inline) for module, inline in listed if hasattr(module, inline.method)]


def is_inline_module(name: str) -> bool:
    """Return whether a module of this name has a class whose attention is its own code."""
    return name in {each.rpartition(".")[0] for each in _INLINE}


@contextmanager
def replaced(module: nn.Module, inline: Inline, active: Callable[[], AttentionFunction | None]) -> Iterator[None]:
    """Compute a module's attention with the function that `active` returns; with its own where that is None."""
    own: Callable[..., Any] = getattr(module, inline.method)
    hidden = vars(module).get(inline.method)  # as set by accelerate, for example

    def method(*args: Any, **kwargs: Any) -> Any:
        attention = active()
        return own(*args, **kwargs) if attention is None else inline.compute(module, attention, *args, **kwargs)

    setattr(module, inline.method, method)
    try:
        yield
    finally:
        if hidden is None:
            delattr(module, inline.method)
        else:
            setattr(module, inline.method, hidden)


def _bloom(
    module: Any, attention: AttentionFunction, states: torch.Tensor, residual: torch.Tensor, **kw: Any
) -> Output:
    """BLOOM: one projection, ALiBi, and the residual added inside the module."""
    queries, keys, values = module._reshape(module.query_key_value(states))
    bias, dropout = kw["alibi"][: module.num_heads, 0], module.attention_dropout.p
    cache, scaling = kw.get("layer_past"), module.inv_norm_factor
    out = _attend(module, attention, queries, keys, values, cache, scaling, dropout, bias)
    return residual + F.dropout(module.dense(out.flatten(2)), module.hidden_dropout, module.training), None


def _mpt(module: Any, attention: AttentionFunction, states: torch.Tensor, **kw: Any) -> Output:
    """MPT: one projection, which may be clipped, and ALiBi."""
    projected = module.Wqkv(states)
    if module.clip_qkv:
        projected = projected.clamp(-module.clip_qkv, module.clip_qkv)
    parts = projected.chunk(3, dim=-1)
    queries, keys, values = (each.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for each in parts)
    bias, dropout = kw["position_bias"][:, 0], module.attn_dropout_p
    cache, scaling = cache_of(kw), module.softmax_scale
    out = _attend(module, attention, queries, keys, values, cache, scaling, dropout, bias)
    return module.out_proj(out.flatten(2)), None


def _falcon(module: Any, attention: AttentionFunction, states: torch.Tensor, **kw: Any) -> Output:
    """Falcon: one projection in three layouts; rotary embeddings, or ALiBi that is scaled as the scores are."""
    parts = module._split_heads(module.query_key_value(states))
    queries, keys, values = (each.transpose(1, 2) for each in parts)
    bias, dropout = None, 0.0  # rotary layers drop no weights in the module itself either
    if kw["alibi"] is None:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        queries, keys = rotate(queries, keys, *kw["position_embeddings"])
    else:
        alibi = kw["alibi"].reshape(-1, module.num_heads, kw["alibi"].shape[-1])
        bias, dropout = alibi[0] * module.inv_norm_factor, module.attention_dropout.p
    cache, scaling = kw.get("layer_past"), module.inv_norm_factor
    out = _attend(module, attention, queries, keys, values, cache, scaling, dropout, bias)
    return module.dense(out.flatten(2)), None


def _gptj(module: Any, attention: AttentionFunction, queries: Any, keys: Any, values: Any, *_: Any) -> Output:
    """GPT-J and CodeGen: a method that gets queries, keys and values, those of the cache included."""
    queries, keys, scaling = queries.to(values.dtype), keys.to(values.dtype), 1 / float(module.scale_attn)
    out = _attend(module, attention, queries, keys, values, None, scaling, module.attn_dropout.p)
    return out.transpose(1, 2), None


def _attend(
    module: Any,
    attention: AttentionFunction,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: Any,
    scaling: float,
    dropout: float,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one layer's attention output `[B, Q, H, D_v]`; new keys and values first go to the cache, if any."""
    if cache is not None:
        keys, values = cache.update(keys, values, module.layer_idx)
    inputs = LayerInputs(
        module=module,
        layer=int(module.layer_idx),
        queries=queries,
        keys=keys,
        values=values,
        scaling=scaling,
        sliding_window=None,
        dropout=dropout if module.training else 0.0,
        extra={},
        alibi=alibi,
    )
    return attention(inputs).to(values.dtype)


_INLINE = {
    "transformers.models.bloom.modeling_bloom.BloomAttention": Inline("forward", _bloom),
    "transformers.models.mpt.modeling_mpt.MptAttention": Inline("forward", _mpt),
    "transformers.models.falcon.modeling_falcon.FalconAttention": Inline("forward", _falcon),
    "transformers.models.gptj.modeling_gptj.GPTJAttention": Inline("_attn", _gptj),
    "transformers.models.codegen.modeling_codegen.CodeGenAttention": Inline("_attn", _gptj),
}
"""Class of the module -> how its attention is reached. Subclasses count too."""
