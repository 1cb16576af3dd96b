"""The hook into transformers: an attention function that a model uses for the length of a `with` block.

Inside the block the model's configs name our function in transformers' attention interface; a family without that
interface has a method of its attention modules replaced (`inline`). The active function is held in a context variable,
so other threads that call the same model meanwhile still get the model's own attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from invariant_rag.arrangement import Arrangement
from invariant_rag.attention.base import AttentionCall, AttentionFunction, Backend, BatchBackend, LayerInputs
from invariant_rag.attention.inline import inline_attention, replaced
from invariant_rag.attention.per_model import cache_of, once_per_model
from invariant_rag.attention.positions import PositionEncoding
from invariant_rag.errors import InvalidPrompt, UnsupportedModel

Output: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]

_active: ContextVar[AttentionFunction | None] = ContextVar("attention_function", default=None)
_names: dict[str, str] = {}

_ONLY_ARRANGED = "Call the model on the input_ids of the arranged prompts; on other texts, outside of the block."


def active_attention() -> AttentionFunction | None:
    """Return the attention function of the innermost `override_attention` in this thread; None outside of all."""
    return _active.get()


@contextmanager
def override_attention(model: PreTrainedModel, attention: AttentionFunction, *, once: bool = False) -> Iterator[None]:
    """Run the model's layers with another attention function; restore the model afterwards.

    With `once`, restore it as soon as one forward pass has used it. Not to be entered twice for one model at a time:
    callers hold the model's lock.
    """
    with ExitStack() as restore:

        def ended(*_: object) -> None:
            if _active.get() is attention:  # else it is a pass of another thread, or of a callback
                restore.close()

        if once:
            restore.callback(model.register_forward_hook(ended).remove)
        restore.callback(_active.reset, _active.set(attention))
        inline = inline_attention(model)
        for module, way in inline:
            restore.enter_context(replaced(module, way, active_attention))
        for config in [] if inline else _attention_configs(model):
            original = config._attn_implementation_internal
            restore.callback(setattr, config, "_attn_implementation_internal", original)
            config._attn_implementation_internal = _registered(original or "eager")
        yield


@contextmanager
def own_attention() -> Iterator[None]:
    """Run models with their own attention in this thread, also inside of `override_attention`."""
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def override_only_over(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """Keep the attention function of this thread to forward passes over one cache; others get the model's own.

    So a logits processor or a stopping criterion may call the model while it decodes.
    """
    attention, thread = _active.get(), get_ident()
    suspended: list[tuple[AbstractContextManager[None], bool]] = []

    def before(_model: object, _args: object, kwargs: dict[str, Any]) -> None:
        if get_ident() == thread:
            is_used = _active.get() is attention
            suspended.append((own_attention() if is_used and cache_of(kwargs) is not cache else nullcontext(), is_used))
            suspended[-1][0].__enter__()

    def after(*_: object) -> None:
        if get_ident() == thread:
            block, was_used = suspended.pop()
            block.__exit__(None, None, None)
            if was_used and _active.get() is not attention:  # it was for this pass alone
                hooks.close()

    with ExitStack() as hooks:
        if attention is not None:
            hooks.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(model.register_forward_hook(after, always_call=True).remove)
        yield


@once_per_model
def _attention_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs of the model and its modules, each once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


def _registered(original: str) -> str:
    """Return the name of our function over the implementation that the model was using; registers it once."""
    if original in _names.values():  # a call within another one
        return original
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
        attention_function = _active.get()
        if attention_function is None:
            own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            function: Callable[..., Output] = ALL_ATTENTION_FUNCTIONS.get_interface(original, own)
            return function(module, query, key, value, attention_mask, **options)
        if query.dtype != value.dtype:  # under autocast, rotated queries and keys are wider than what is projected
            query, key = query.to(value.dtype), key.to(value.dtype)
        scaling = options.pop("scaling", None)
        inputs = LayerInputs(
            module=module,
            layer=int(module.layer_idx),  # type: ignore[arg-type]
            queries=query,
            keys=key,
            values=value,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=None if attention_mask is None else attention_mask.shape[2],
            dropout=options.pop("dropout", 0.0),
            extra=options,
        )
        return attention_function(inputs), None

    return attention


def _mask_over(original: str) -> Callable[..., torch.Tensor | None]:
    def mask(**options: Any) -> torch.Tensor | None:
        if _active.get() is None:
            return cast("torch.Tensor | None", ALL_MASK_ATTENTION_FUNCTIONS[original](**options))
        visible = options["mask_function"]
        window = None if visible is causal_mask_function else _sliding_window(visible)
        # Arrangements decide what is visible. The mask only has to carry the window: the shape of an empty tensor does.
        return None if window is None else torch.empty((1, 1, window, 0), device=options.get("device", "cpu"))

    return mask


def _sliding_window(visible: Callable[..., Any], longest: int = 1 << 24) -> int | None:
    """Find the sliding window of a mask function `(batch, head, query, key) -> bool`; None where there is none.

    UnsupportedModel: the mask is neither causal nor a causal sliding window (chunked, bidirectional...).
    """

    def attends(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(visible(zero, zero, torch.tensor(query), torch.tensor(key)))

    query = longest
    if not attends(query, query) or attends(query, query + 1):
        raise UnsupportedModel("a layer's mask is not causal")
    if attends(query, 0):
        return None
    near, far = 1, query  # the distance 0 is attended to and the distance `query` is not: search between them
    while near < far:
        middle = (near + far) // 2
        near, far = (middle + 1, far) if attends(query, query - middle) else (near, middle)
    for other in (near - 1, near, 3 * near + 1):
        if not attends(other, max(0, other - near + 1)) or (other >= near and attends(other, other - near)):
            raise UnsupportedModel("a layer's mask is neither causal nor a sliding window")
    return near


@dataclass(frozen=True)
class PromptState:
    """One prompt of a batch, as the layers attend to it."""

    arrangement: Arrangement
    padding: int = 0  # tokens on the left of its keys
    # What each layer keeps for later forward passes over the prompt, by layer. The prefill hands it on to decoding.
    scratch: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the prompt, without padding and without generated tokens."""
        return self.arrangement.layout.length


@dataclass(frozen=True)
class ArrangedAttention:
    """The attention function of arranged prompts, over which the rows of a batch are spread evenly (beams...).

    With `last_text_only`, the last layer attends from the last text alone, and returns zeros for the tokens before it.
    """

    prompts: Sequence[PromptState]
    backend: Backend
    rotations: Sequence[PositionEncoding]  # of each layer
    last_text_only: bool = False
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)  # what the layers share
    scratch: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)  # what each layer keeps for the batch

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        """Return one layer's attention output `[B, Q, H, D_v]`."""
        rows = inputs.queries.shape[0]
        if rows == len(self.prompts) == 1 and not self.backend.batched_prefill:
            return self._attend(inputs, 0, self.prompts[0])[None]
        repeats = rows_per_prompt(inputs, self.prompts)
        if self.backend.batched_prefill:
            together = self._attend_together(inputs, [self.prompts[row // repeats] for row in range(rows)])
            if together is not None:
                return together
        return torch.stack([self._attend(inputs, row, self.prompts[row // repeats]) for row in range(rows)])

    def _attend_together(self, inputs: LayerInputs, prompts: Sequence[PromptState]) -> torch.Tensor | None:
        """Return the outputs of all rows, one prompt each `[B, Q, H, D_v]`; None to compute them one by one."""
        for prompt in prompts:
            if inputs.keys.shape[2] - prompt.padding < prompt.length:
                raise _too_short(inputs, prompt)
        skipped = 0
        starts = {each.padding + each.arrangement.layout.text_spans[-1].start for each in prompts}
        # No row may begin in the middle of a segment, so all last texts have to begin at the same token.
        if self.last_text_only and inputs.layer == len(self.rotations) - 1 and len(starts) == 1:
            unasked = inputs.keys.shape[2] - inputs.queries.shape[2]
            skipped = max(0, min(*starts, inputs.keys.shape[2]) - unasked)
        rows, heads, count, _ = inputs.queries.shape
        if skipped == count:  # the last text is empty
            return inputs.values.new_zeros(rows, count, heads, inputs.values.shape[-1])
        call = _call_of(inputs, self.rotations[inputs.layer], self.scratch.setdefault(inputs.layer, {}))
        call = replace(call, queries=call.queries[:, :, skipped:]) if skipped else call
        backend, padding = cast("BatchBackend", self.backend), [prompt.padding for prompt in prompts]
        out = backend.batch([each.arrangement for each in prompts], padding, call, self.plans)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, skipped, 0)) if out is not None and skipped else out

    def _attend(self, inputs: LayerInputs, row: int, prompt: PromptState) -> torch.Tensor:
        """Return the output of one row of the batch `[Q, H, D_v]`."""
        is_last = self.last_text_only and inputs.layer == len(self.rotations) - 1
        first = prompt.arrangement.layout.text_spans[-1].start if is_last else 0
        call, skipped = unpad_row(inputs, row, prompt, self.rotations[inputs.layer], first)
        heads, count, _ = call.queries.shape
        out = (
            self.backend.attend(prompt.arrangement, call)
            if count
            else call.values.new_zeros(heads, 0, call.values.shape[-1])
        )
        return (
            torch.nn.functional.pad(out.transpose(0, 1), (0, 0, 0, 0, skipped, 0)) if skipped else out.transpose(0, 1)
        )


def rows_per_prompt(inputs: LayerInputs, prompts: Sequence[PromptState]) -> int:
    """Return how many rows of a batch belong to each prompt; InvalidPrompt if they cannot be spread evenly."""
    rows = inputs.queries.shape[0]
    if not prompts or rows % len(prompts):
        raise InvalidPrompt(
            f"expected as many rows for each of {len(prompts)} arranged prompts, got {rows} rows", hint=_ONLY_ARRANGED
        )
    return rows // len(prompts)


def _too_short(inputs: LayerInputs, prompt: PromptState) -> InvalidPrompt:
    length = inputs.keys.shape[2] - prompt.padding
    message = f"expected at least the {prompt.length} tokens of the arranged prompt, got {length}"
    return InvalidPrompt(message, hint=_ONLY_ARRANGED)


def unpad_row(
    inputs: LayerInputs, row: int, prompt: PromptState, rotation: PositionEncoding, first: int = 0
) -> tuple[AttentionCall, int]:
    """Return a row of a batch without padding and without queries before the token `first`, and the number of these."""
    if inputs.keys.shape[2] - prompt.padding < prompt.arrangement.layout.length:
        raise _too_short(inputs, prompt)
    padding, scratch = prompt.padding, prompt.scratch.setdefault(inputs.layer, {})
    if inputs.queries.shape[2] == inputs.keys.shape[2]:
        scratch.clear()  # it may be another text with the same arrangement
    skipped = max(0, padding + first - (inputs.keys.shape[2] - inputs.queries.shape[2]))
    unpadded = replace(
        inputs,
        queries=inputs.queries[row, :, skipped:],
        keys=inputs.keys[row, :, padding:],
        values=inputs.values[row, :, padding:],
    )
    return rotation.encoded(_call_of(unpadded, rotation, scratch), prompt.arrangement), skipped


def _call_of(inputs: LayerInputs, rotation: PositionEncoding, scratch: dict[str, Any]) -> AttentionCall:
    """Return the attention of a layer's inputs, as they are."""
    return AttentionCall(
        queries=inputs.queries,
        keys=inputs.keys,
        values=inputs.values,
        rotation=rotation,
        scaling=inputs.scaling,
        sliding_window=inputs.sliding_window,
        softcap=inputs.extra.get("softcap"),
        sinks=inputs.extra.get("s_aux"),
        dropout=inputs.dropout,
        scratch=scratch,
    )
