"""Where we meet transformers: an attention function that is selected for the length of a `with` block.

Nothing is patched. Inside the block the model's configs name our function; the arrangements at work are held in a
context variable, so other threads that call the same model meanwhile still get the model's own attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from invariant_rag.arrangement import Arrangement
from invariant_rag.attention.call import AttentionCall, Backend
from invariant_rag.attention.rope import Rotation
from invariant_rag.errors import UnsupportedModel

Output: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
Memory: TypeAlias = dict[int, dict[str, Any]]
"""What layers keep of one prompt between calls, by layer."""


@dataclass(frozen=True)
class LayerInputs:
    """What a layer hands to its attention function.

    Attributes:
        module: The layer's attention module.
        layer: Index of the layer.
        queries: `[B, H, Q, D]`, keys `[B, H_kv, S, D]` and values `[B, H_kv, S, D_v]`, rotated, cache included.
        window: Sliding window of the layer, None without one.
        extra: Whatever else the layer passed.
    """

    module: nn.Module
    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    window: int | None
    dropout: float
    extra: dict[str, Any]


class Attending(Protocol):
    """What takes the place of a model's attention: it returns `[B, Q, H, D_v]`."""

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        """Compute one layer's attention."""
        ...


_attending: ContextVar[Attending | None] = ContextVar("attending", default=None)
_names: dict[str, str] = {}


def attending_now() -> Attending | None:
    """What stands in for attention in this thread; None outside of every block. Other threads may be in another one."""
    return _attending.get()


@contextmanager
def override_attention(model: PreTrainedModel, attending: Attending, *, last: int | None = None) -> Iterator[None]:
    """Run the model's layers with `attending` in place of their attention; leave the model as it was.

    Not to be entered twice for one model at a time: callers hold the model's lock.

    Args:
        model: The model.
        attending: What takes the place of its attention.
        last: Index of the last layer: once it has attended, the model attends by itself again. None: only behind the
            block.
    """
    configs = {id(config): config for config in map(_config_of, model.modules()) if config is not None}.values()
    with ExitStack() as replaced:
        wanted = attending if last is None else _Once(attending, last, replaced.close)
        replaced.callback(_attending.reset, _attending.set(wanted))
        for config in configs:
            original = config._attn_implementation_internal
            replaced.callback(setattr, config, "_attn_implementation_internal", original)
            config._attn_implementation_internal = _registered(original or "eager")
        yield


@dataclass(frozen=True)
class _Once:
    """Attends in one forward, and is done with its last layer."""

    attending: Attending
    last: int
    done: Callable[[], None]

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        out = self.attending(inputs)
        if inputs.layer == self.last:
            self.done()
        return out


def _config_of(module: nn.Module) -> PreTrainedConfig | None:
    config = getattr(module, "config", None)
    return config if isinstance(config, PreTrainedConfig) else None


def _registered(original: str) -> str:
    """Name of our function on top of the implementation that the model was using."""
    if original not in _names:
        # The original is not part of the name: transformers looks for words such as "flash" in it.
        name = f"invariant_rag_{len(_names)}"
        AttentionInterface.register(name, _attention_over(original))
        AttentionMaskInterface.register(name, _mask_over(original))
        _names[original] = name
    return _names[original]


def _attention_over(original: str) -> Callable[..., Output]:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> Output:
        attending = _attending.get()
        if attending is None:
            own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            result: Output = ALL_ATTENTION_FUNCTIONS.get_interface(original, own)(
                module, query, key, value, attention_mask, **options
            )
            return result
        scaling = options.pop("scaling", None)
        inputs = LayerInputs(
            module=module,
            layer=int(module.layer_idx),  # type: ignore[arg-type]
            queries=query,
            keys=key,
            values=value,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=None if attention_mask is None else attention_mask.shape[2],
            dropout=options.pop("dropout", 0.0),
            extra=options,
        )
        return attending(inputs), None

    return attention


def _mask_over(original: str) -> Callable[..., torch.Tensor | None]:
    def mask(**options: Any) -> torch.Tensor | None:
        if _attending.get() is None:
            result: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[original](**options)
            return result
        window = _window(options["mask_function"])
        # Arrangements decide what is visible; the mask only has to say how far, which an empty tensor can.
        return None if window is None else torch.empty((1, 1, window, 0), device=options.get("device", "cpu"))

    return mask


def _window(visible: Callable[..., Any], longest: int = 1 << 24) -> int | None:
    """Read the sliding window off a mask function `(batch, head, query, key) -> bool`; None where there is none.

    Raises:
        UnsupportedModel: The mask is neither causal nor a causal sliding window (chunked, bidirectional...).
    """

    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(visible(zero, zero, torch.tensor(query), torch.tensor(key)))

    query = longest
    if not sees(query, query) or sees(query, query + 1):
        raise UnsupportedModel("a layer's mask is not causal")
    if sees(query, 0):
        return None
    near, far = 1, query  # the distance 0 is seen and the distance `query` is not: search between them
    while near < far:
        middle = (near + far) // 2
        near, far = (middle + 1, far) if sees(query, query - middle) else (near, middle)
    for other in (near - 1, near, 3 * near + 1):
        if not sees(other, max(0, other - near + 1)) or (other >= near and sees(other, other - near)):
            raise UnsupportedModel("a layer's mask is neither causal nor a sliding window")
    return near


@dataclass
class Arranged:
    """Attend as arrangements say, one for each prompt of the batch.

    Attributes:
        arrangements: One for each prompt. Rows of the batch are spread evenly over them (beams, returned sequences).
        padding: For each prompt, the tokens of padding on the left of its keys.
        backend: What computes them.
        rotations: The rotary embedding of each layer.
        memories: For each prompt, what its layers keep for later calls. The prefill's are handed on to decoding.
        whole: Whether the outputs of all tokens are wanted. Otherwise the last layer, whose outputs no other layer
            reads, attends from the last text alone, and gives zeros for what stands before it.
    """

    arrangements: Sequence[Arrangement]
    padding: Sequence[int]
    backend: Backend
    rotations: Sequence[Rotation]
    memories: Sequence[Memory]
    whole: bool = True

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        """Compute one layer's attention: `[B, Q, H, D_v]`."""
        repeats = inputs.queries.shape[0] // len(self.arrangements)
        outs = [self._one(inputs, row, row // repeats) for row in range(inputs.queries.shape[0])]
        return outs[0][None] if len(outs) == 1 else torch.stack(outs)

    def _one(self, inputs: LayerInputs, row: int, prompt: int) -> torch.Tensor:
        """One row of the batch: `[Q, H, D_v]`."""
        memory = self.memories[prompt].setdefault(inputs.layer, {})
        call, skipped = unpad_row(inputs, row, self.padding[prompt], self.rotations[inputs.layer], memory)
        arrangement = self.arrangements[prompt]
        if not self.whole and inputs.layer == len(self.rotations) - 1:
            unread = max(0, arrangement.layout.text_spans[-1].start - call.first)
            call, skipped = replace(call, queries=call.queries[:, unread:]), skipped + unread
        out = (arrangement.attend(self.backend, call) if call.queries.shape[1] else call.empty()).transpose(0, 1)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, skipped, 0)) if skipped else out


def unpad_row(
    inputs: LayerInputs, row: int, padding: int, rotation: Rotation, memory: dict[str, torch.Tensor]
) -> tuple[AttentionCall, int]:
    """Return one row of the batch without its padding, and how many of its queries are padding themselves."""
    skipped = max(0, padding - (inputs.keys.shape[2] - inputs.queries.shape[2]))
    call = AttentionCall(
        queries=inputs.queries[row, :, skipped:],
        keys=inputs.keys[row, :, padding:],
        values=inputs.values[row, :, padding:],
        rotation=rotation,
        scaling=inputs.scaling,
        window=inputs.window,
        softcap=inputs.extra.get("softcap"),
        sinks=inputs.extra.get("s_aux"),
        dropout=inputs.dropout,
        memory=memory,
    )
    return call, skipped
