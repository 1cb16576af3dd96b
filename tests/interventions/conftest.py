"""A Llama in loops: the specification that interventions are held to, one token and one head at a time in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def _turned(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (0, D/2), (1, D/2 + 1)... of vectors `[..., D]` by angles `[..., D/2]`."""
    a, b = states.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def _llama_logits(
    model: Any,
    ids: list[int],
    *,
    reads: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda _layer, _token, states: states,
    values_read: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda _layer, _token, states: states,
    ratios: Callable[[int, list[list[float]]], list[float]] = lambda _layer, weights: [1.0] * len(weights),
    last: int = -1,
) -> torch.Tensor:
    """Return logits `[T, vocabulary]` of a Llama in float64.

    Args:
        model: The model.
        ids: Tokens.
        reads: Attention inputs `[T, hidden]` from which queries and keys are made for one layer and one query.
        values_read: The same for values.
        ratios: What each head divides positions by, from its attention at natural positions at the token `last`.
        last: Index of the prompt's last token.
    """
    size, frequencies = model.config.head_dim, model.model.rotary_emb.inv_freq.double()
    groups = model.config.num_attention_heads // model.config.num_key_value_heads

    def heads(projection: Any, states: torch.Tensor) -> torch.Tensor:
        return projection(states).view(len(ids), -1, size).transpose(0, 1)

    def weights(queries: torch.Tensor, keys: torch.Tensor, head: int, token: int, ratio: float) -> torch.Tensor:
        places = torch.arange(token + 1, dtype=torch.float64)[:, None] / ratio
        own = _turned(queries[head, token], frequencies * places[-1])
        moved = _turned(keys[head // groups, : token + 1], frequencies * places)
        return torch.softmax(moved @ own / size**0.5, dim=0)

    hidden = model.model.embed_tokens(torch.tensor(ids))
    for index, layer in enumerate(model.model.layers):
        attention, states = layer.self_attn, layer.input_layernorm(hidden)
        queries, keys = heads(attention.q_proj, states), heads(attention.k_proj, states)
        natural = [weights(queries, keys, head, last % len(ids), 1.0).tolist() for head in range(len(queries))]
        divisors = ratios(index, natural)
        out = torch.zeros(len(ids), len(queries), size, dtype=torch.float64)
        for token in range(len(ids)):
            seen = reads(index, token, states)
            queries, keys = heads(attention.q_proj, seen), heads(attention.k_proj, seen)
            values = heads(attention.v_proj, values_read(index, token, states))
            for head, ratio in enumerate(divisors):
                out[token, head] = weights(queries, keys, head, token, ratio) @ values[head // groups, : token + 1]
        hidden = hidden + attention.o_proj(out.flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden)).detach()


@pytest.fixture(scope="session")
def llama_logits() -> Callable[..., torch.Tensor]:
    """The specification."""
    return _llama_logits
