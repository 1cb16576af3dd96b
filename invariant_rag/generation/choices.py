"""The choices of a wrapper: one dataclass, from which its keywords, their defaults and its attributes come."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from transformers import PreTrainedModel

from invariant_rag.attention import resolve_backend
from invariant_rag.attention.base import Backend
from invariant_rag.attention.per_model import dynamic_rope_modules, input_device
from invariant_rag.checks import check_flag, check_name, check_number
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.prefill import shared_state
from invariant_rag.generation.prepare import Overflow
from invariant_rag.interventions import INTERVENTIONS, Intervention, resolve_intervention
from invariant_rag.methods import Method, check_method_and_ordering, resolve_method
from invariant_rag.models.devices import check_device
from invariant_rag.models.loading import context_window, resolve_dtype
from invariant_rag.orderings import Ordering, resolve_ordering

Function = TypeVar("Function", bound=Callable[..., Any])

_MISSPELT = 0.8  # similarity of an unknown keyword to a choice; transformers' `cache_dir` has 0.71


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of an `InvariantModel`, with their defaults; names are checked, and resolved for a model.

    Raises:
        UnknownName: Unknown method, ordering, backend, overflow or intervention.
        InvalidChoice: Another choice has a wrong type or value.
    """

    method: str | Method = "rotor"  # which segments each attends to: a name from `invariant-rag methods`, or a `Method`
    # How segments are ranked: a name from `invariant-rag orderings`, or an `Ordering`. None: `lexical`, or the method's
    ordering: str | Ordering | None = None
    backend: str | Backend = "auto"  # `auto` (`varlen` on CUDA, else `sdpa`), `varlen`, `sdpa` or `reference`
    max_segment_tokens: int | None = None  # most tokens of one segment. None: no limit
    # For prompts that are too long: `error` raises; `drop_last` drops segments that do not fit even alone, then those
    # of the lowest rank; `trim_segments` truncates the longest segments at their ends, all to the same length
    overflow: Overflow = "error"
    # A change to the plain model's attention that reduces its position bias, for the method `sequential` only: a name
    # from `invariant_rag.interventions.INTERVENTIONS`, or an `Intervention`. It is the ordering that makes it invariant
    intervention: str | Intervention | None = None
    cache: KeyValueCache | None = None  # of keys and values of sets and segments for later prompts, in any order
    deterministic: bool = False  # whether prompts of a batch are computed one by one, so that none changes another

    def __post_init__(self) -> None:
        check_method_and_ordering(self.method, self.ordering)
        resolve_backend(self.backend)
        check_name("overflow", self.overflow, get_args(Overflow))
        if self.max_segment_tokens is not None:
            check_number("max_segment_tokens", self.max_segment_tokens, 1)
        if isinstance(self.intervention, str):
            check_name("intervention", self.intervention, INTERVENTIONS)
        if not isinstance(self.cache, KeyValueCache | None):
            hint = "For a folder: KeyValueCache(folder=...)."
            raise InvalidChoice(f"expected a KeyValueCache, got {type(self.cache).__name__}", hint=hint)
        check_flag("deterministic", self.deterministic)

    def resolve(self, model: PreTrainedModel) -> ResolvedChoices:
        """Resolve names for a model; UnsupportedCombination if the choices do not go together, or not with it."""
        method = resolve_method(self.method)
        if method.attends_to_later_positions and shared_state(model).has_alibi:
            raise UnsupportedCombination(
                f"expected a method whose tokens attend to keys before their own position only, got {method.name!r}: "
                f"{model.config.model_type} has ALiBi, which has no bias for later keys",
                hint="Use a model with rotary positions, or another method, such as 'set-based'.",
            )
        resolved = ResolvedChoices(
            **vars(self)
            | {
                "method": method,
                "ordering": resolve_ordering(self.ordering, method.default_ordering),
                "backend": resolve_backend(self.backend, input_device(model)),
                "intervention": resolve_intervention(self.intervention, method, model),
                "deterministic": bool(self.deterministic),
                "context_window": context_window(model.config),
            }
        )
        if resolved.cache is not None:
            _check_cacheable(model, resolved.intervention)
        return resolved


_NAMES = [each.name for each in fields(Choices)]


@dataclass(frozen=True, kw_only=True)
class ResolvedChoices(Choices):
    """Choices whose names are resolved for one model."""

    method: Method
    ordering: Ordering
    backend: Backend
    intervention: Intervention | None = None
    context_window: int | None = None  # most positions of prompt and answer together; None: no limit

    def change(self, model: PreTrainedModel, **changes: Any) -> ResolvedChoices:
        """Return other choices for the same model. A new method brings its default ordering and no intervention."""
        if "method" in changes:
            changes = {"ordering": None, "intervention": None, **changes}
        current = {name: getattr(self, name) for name in _NAMES}
        resolved = Choices(**{**current, **known_keywords(changes)}).resolve(model)
        return replace(resolved, context_window=self.context_window)


def known_keywords(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return keywords, all of which are choices, or raise UnknownName."""
    for each in keywords:
        check_name("keyword", each, _NAMES)
    return keywords


def takes_choices(function: Function) -> Function:
    """Show the choices that a function takes as `**choices` as keywords in its signature."""
    signature = inspect.signature(function)
    *own, last = signature.parameters.values()  # `**choices`, or `**kwargs` with others among them
    ours = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(Choices)
    ]
    function.__signature__ = signature.replace(parameters=[*own, *ours, *([last] if last.name == "kwargs" else [])])  # type: ignore[attr-defined]
    return function


def check_before_loading(
    *, dtype: Any = "auto", device_map: Any = "auto", **keywords: Any
) -> tuple[Choices, dict[str, Any]]:
    """Return the choices among keywords of `from_pretrained`, checked, and the others, which are for transformers."""
    resolve_dtype(dtype)
    check_device(device_map)
    others = dict(keywords)
    choices = Choices(**{each: others.pop(each) for each in _NAMES if each in keywords})
    known = [*_NAMES, "dtype", "device_map"]
    for each in others:
        if get_close_matches(each, known, 1, _MISSPELT):  # no option of transformers resembles that
            raise UnknownName("keyword", each, known, hint="Those of transformers' from_pretrained are taken, too.")
    return choices, others


def _check_cacheable(model: PreTrainedModel, intervention: Intervention | None) -> None:
    """Refuse a cache where keys and values of a prefix cannot be reused by other prompts."""
    devices = sorted(set(map(str, getattr(model, "hf_device_map", {}).values())))
    expected, actual = "", ""
    if intervention is not None:
        expected, actual = "a model without an intervention", repr(intervention.name)
    elif dynamic_rope_modules(model):
        expected, actual = "rotary frequencies that do not depend on the prompt length", "some that grow with it"
    elif len(devices) > 1 or any(each.is_meta for each in model.parameters()):
        expected = "a model on one device, with its weights in memory,"
        actual = f"one that is offloaded or spread over {', '.join(devices) or 'devices'}"
    if expected:
        hint = "Use with_cache(None), or another model: without an intervention, on one device (`device_map`)."
        raise UnsupportedCombination(f"expected {expected} for a key-value cache, got {actual}", hint=hint)
