"""The probe at load time: whether a model is supported, and the position encoding of each layer.

It replaces attention by a function that returns each token's own value; then no token may influence another, and
queries and keys of the same token at several positions must differ only by a rotation. With ALiBi they must not differ
at all, and the bias of a key must be a line over positions. Finally, our attention must reproduce the logits of the
model's own. A model that fails raises `UnsupportedModel` with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from invariant_rag.arrangement import Layout, arrange_rows
from invariant_rag.attention.base import LayerInputs
from invariant_rag.attention.dynamic_rope import private_dynamic_rope
from invariant_rag.attention.hook import ArrangedAttention, PromptState, override_attention
from invariant_rag.attention.inline import inline_attention, is_inline_module
from invariant_rag.attention.per_model import input_device, takes_position_ids
from invariant_rag.attention.positions import Alibi, PositionEncoding, candidates, find_slopes, identify
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_POSITIONS = (0, 1, 2, 5, 11, 23, 47)
_NO_ATTENTION = {"linear_attention", "conv", "mamba"}
"""Types of layers in configurations that mix tokens outside of attention."""
_NOT_ALL_LAYERS = (
    "expected every one of {} layers to call the attention interface, but {} do not (layers {}); they mix tokens "
    "outside of attention"
)
_KNOWN_TENSORS = {"position_ids", "cache_position", "s_aux"}


@dataclass
class _InputRecorder:
    """An attention function in which every token attends to itself only; it records the inputs of each layer."""

    inputs: dict[int, LayerInputs] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        if inputs.layer in self.inputs:
            self.repeated.add(inputs.layer)
        self.inputs[inputs.layer] = inputs
        groups = inputs.queries.shape[1] // inputs.values.shape[1]
        return inputs.values.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous()


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a model that its configuration shows to be unsupported, before its weights are loaded.

    Raises:
        UnsupportedModel: Its class, or a type of its layers, mixes tokens by other means than attention that we can
            replace. Models that pass can still fail the probe.
    """
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(kind, type):
        _check_class(kind, config, is_inline=is_inline_module(kind.__module__))
    layers = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if others := [index for index, each in enumerate(layers) if each in _NO_ATTENTION]:
        raise _unsupported(config, _NOT_ALL_LAYERS.format(len(layers), len(others), others))


def _check_class(model: Any, config: PreTrainedConfig, *, is_inline: bool) -> None:
    """Refuse a model, or a class of models, whose attention cannot be replaced."""
    if not is_inline and not takes_position_ids(model):
        raise _unsupported(config, "its forward pass takes no position_ids, so it has no rotary positions")
    if not is_inline and not model._can_set_attn_implementation():
        raise _unsupported(config, "its attention does not go through transformers' attention interface")


def probe(model: PreTrainedModel) -> list[PositionEncoding]:
    """Return the position encoding of each layer, from three forward passes over a few tokens.

    Raises:
        UnsupportedModel: The model depends on token order by other means than causal attention with rotary positions
            or ALiBi; the message gives the reason.
    """
    with torch.inference_mode(), private_dynamic_rope(model):
        return _probe(model)


def _probe(model: PreTrainedModel) -> list[PositionEncoding]:
    config, vocabulary = model.config, model.config.get_text_config(decoder=True).vocab_size
    _check_class(model, config, is_inline=bool(inline_attention(model)))
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    tokens = torch.full((2, len(_POSITIONS)), min(7, vocabulary - 1), device=input_device(model))
    tokens[1, 0] = min(3, vocabulary - 2)
    positions = torch.tensor(_POSITIONS, device=tokens.device)
    logits, layers = _record(model, tokens, positions)
    states = [logits, *(inputs.queries.transpose(1, 2) for inputs in layers)]
    if any(_relative_error(state[0, 1:], state[1, 1:]) > tolerance for state in states):
        raise _unsupported(config, "tokens influence later ones outside of attention")
    choices = candidates(model)
    rotations: list[PositionEncoding] = []
    for inputs in layers:
        rotation = identify(choices, positions, [inputs.queries[0].cpu(), inputs.keys[0].cpu()], tolerance)
        if rotation is None:
            what = f"position changes the queries or keys of layer {inputs.layer} by more than a rotary embedding"
            raise _unsupported(config, what)
        slopes = None if inputs.alibi is None else find_slopes(inputs.alibi.cpu(), tolerance)
        if inputs.alibi is not None and (slopes is None or rotation.module is not None):
            what = f"layer {inputs.layer} adds biases to its scores that are not those of ALiBi alone"
            raise _unsupported(config, what)
        rotations.append(rotation if slopes is None else Alibi(slopes))
    _compare_with_own_attention(model, rotations, tolerance)
    return rotations


def _record(
    model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, list[LayerInputs]]:
    """Return logits, and the inputs of every layer: a sliding window, a soft cap or sinks, and no others."""
    recorder, count = _InputRecorder(), model.config.get_text_config(decoder=True).num_hidden_layers
    # Without a mask, transformers treats positions with gaps as several packed sequences.
    options = {"attention_mask": torch.ones_like(tokens), "use_cache": False}
    if takes_position_ids(model):
        options["position_ids"] = positions.expand(2, -1)
    with override_attention(model, recorder):
        logits = model(input_ids=tokens, **options).logits
    missing = sorted(set(range(count)) - set(recorder.inputs))
    if missing:
        raise _unsupported(model.config, _NOT_ALL_LAYERS.format(count, len(missing), missing))
    if recorder.repeated:
        twice = sorted(recorder.repeated)
        raise _unsupported(model.config, f"layers call attention more than once in a forward pass ({twice})")
    for inputs in recorder.inputs.values():
        unknown = {name for name, each in inputs.extra.items() if isinstance(each, torch.Tensor)} - _KNOWN_TENSORS
        if unknown:
            raise _unsupported(model.config, f"its attention takes the unsupported inputs {', '.join(sorted(unknown))}")
        if inputs.extra.get("is_causal") is False:
            raise _unsupported(model.config, "its attention is not causal")
    return logits, [recorder.inputs[layer] for layer in range(count)]


def _unsupported(config: PreTrainedConfig, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{config.model_type}: {reason}")


def _compare_with_own_attention(model: PreTrainedModel, rotations: list[PositionEncoding], tolerance: float) -> None:
    """Check that our attention with the arrangement of the plain model reproduces the model's logits."""
    config = model.config.get_text_config(decoder=True)
    length = min(12, config.vocab_size)
    tokens = torch.arange(length, device=input_device(model))[None]
    plain = ArrangedAttention([PromptState(arrange_rows(Layout((length,), ()), []))], SDPA(), rotations)
    own = model(input_ids=tokens, use_cache=False).logits
    with override_attention(model, plain):
        ours = model(input_ids=tokens, use_cache=False).logits
    error = _relative_error(own, ours)
    if error > tolerance:
        reason = "our attention does not reproduce the model's own logits (largest error"
        raise _unsupported(model.config, f"{reason} {error:.1e}, relative to the largest logit)")


def _relative_error(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest absolute difference, relative to the largest value of `left`."""
    scale = left.abs().amax().clamp_min(1e-30)
    return float((left - right).abs().amax() / scale)
