"""The probe at load time: can this model's attention be arranged, and which rotary embedding does each layer have?

Nothing here knows a family by name. With attention that returns each token's own value, no token may influence
another, and the same token at several positions must differ by a rotation alone. A model that passes, and whose
logits our attention reproduces, is supported; any other is refused with the reason.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from invariant_rag.arrangement import Layout, arrange_rows
from invariant_rag.attention.hook import ArrangedAttention, LayerInputs, PromptState, override_attention
from invariant_rag.attention.rope import Rotation, candidates, identify, reset_dynamic_rope
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.errors import UnsupportedModel

_POSITIONS = (0, 1, 2, 5, 11, 23, 47)
_KNOWN_TENSORS = {"position_ids", "cache_position", "s_aux"}


@dataclass
class _Observer:
    """An attention function in which every token sees only itself; records what each layer passes."""

    seen: dict[int, LayerInputs] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        if inputs.layer in self.seen:
            self.again.add(inputs.layer)
        self.seen[inputs.layer] = inputs
        groups = inputs.queries.shape[1] // inputs.values.shape[1]
        return inputs.values.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous()


def probe(model: PreTrainedModel) -> list[Rotation]:
    """Return the rotary embedding of each layer, or refuse the model. Three forward passes over a few tokens.

    Raises:
        UnsupportedModel: Order enters this model in a way that an arrangement cannot undo; the message says how.
    """
    with torch.inference_mode(), reset_dynamic_rope(model):
        return _probe(model)


def _probe(model: PreTrainedModel) -> list[Rotation]:
    family = model.config.model_type
    config = model.config.get_text_config(decoder=True)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{family}: its forward pass takes no position_ids, so it has no rotary positions")
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(f"{family}: its attention does not go through transformers' attention interface")
    observer = _Observer()
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    device = input_device(model)
    tokens = torch.full((2, len(_POSITIONS)), min(7, config.vocab_size - 1), device=device)
    tokens[1, 0] = min(3, config.vocab_size - 2)
    positions = torch.tensor(_POSITIONS, device=device)
    with override_attention(model, observer):
        # With a 2-D mask, transformers does not take positions with gaps for several packed sequences.
        options = {"attention_mask": torch.ones_like(tokens), "use_cache": False}
        logits = model(input_ids=tokens, position_ids=positions.expand(2, -1), **options).logits
    layers = config.num_hidden_layers
    missing = sorted(set(range(layers)) - set(observer.seen))
    if missing:
        raise UnsupportedModel(
            f"{family}: expected every one of {layers} layers to call the attention interface, but "
            f"{len(missing)} do not (layers {missing}); they mix tokens in a way that cannot be arranged"
        )
    if observer.again:
        raise UnsupportedModel(f"{family}: layers attend more than once in a forward pass ({sorted(observer.again)})")
    _refuse_unknown_inputs(family, observer)
    states = [logits, *(inputs.queries.transpose(1, 2) for inputs in observer.seen.values())]
    if any(_gap(state[0, 1:], state[1, 1:]) > tolerance for state in states):
        raise UnsupportedModel(f"{family}: tokens influence later ones outside of attention")
    found, rotations = candidates(model), []
    for layer in range(layers):
        inputs = observer.seen[layer]
        rotation = identify(found, positions, [inputs.queries[0].cpu(), inputs.keys[0].cpu()], tolerance)
        if rotation is None:
            raise UnsupportedModel(
                f"{family}: position changes the queries or keys of layer {layer} by more than a rotary embedding"
            )
        rotations.append(rotation)
    _compare_with_own_attention(model, rotations, tolerance)
    return rotations


def _refuse_unknown_inputs(family: str, observer: _Observer) -> None:
    """Refuse attention that is given more than queries, keys, values, a window, a soft cap or sinks."""
    for inputs in observer.seen.values():
        unknown = {k for k, v in inputs.extra.items() if isinstance(v, torch.Tensor)} - _KNOWN_TENSORS
        if unknown:
            raise UnsupportedModel(
                f"{family}: its attention takes {', '.join(sorted(unknown))}, which is not supported"
            )
        if inputs.extra.get("is_causal") is False:
            raise UnsupportedModel(f"{family}: its attention is not causal")


def _compare_with_own_attention(model: PreTrainedModel, rotations: list[Rotation], tolerance: float) -> None:
    """Check that our attention, arranged as the plain model, gives the plain model's logits."""
    config = model.config.get_text_config(decoder=True)
    length = min(12, config.vocab_size)
    tokens = torch.arange(length, device=input_device(model))[None]
    plain = ArrangedAttention([PromptState(arrange_rows(Layout((length,), ()), []))], SDPA(), rotations)
    own = model(input_ids=tokens, use_cache=False).logits
    with override_attention(model, plain):
        ours = model(input_ids=tokens, use_cache=False).logits
    if _gap(own, ours) > tolerance:
        raise UnsupportedModel(
            f"{model.config.model_type}: our attention does not reproduce the model's own "
            f"(largest difference {_gap(own, ours):.1e} of the logits' size)"
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its input ids, also when its layers are spread over several devices."""
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    return device


def _gap(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    scale = left.abs().amax().clamp_min(1e-30)
    return float((left - right).abs().amax() / scale)
