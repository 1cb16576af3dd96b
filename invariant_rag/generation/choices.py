"""The choices of one wrapper of a model, from names or instances to objects that fit each other."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from invariant_rag.attention import resolve_backend
from invariant_rag.attention.probe import input_device
from invariant_rag.checks import check_flag, check_name
from invariant_rag.errors import ImmutableModel, InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.overflow import Overflow, TokenLimits
from invariant_rag.generation.prefix_cache import check_cacheable
from invariant_rag.generation.shared_state import shared_state
from invariant_rag.interventions import INTERVENTIONS, Intervention, resolve_intervention
from invariant_rag.methods import Method, check_method_and_ordering, resolve_method
from invariant_rag.models.loading import context_window, load_config, resolve_dtype
from invariant_rag.orderings import Ordering, resolve_ordering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.attention.call import Backend

_ALIKE = 0.8
"""From this similarity on, a keyword that is none of ours is a misspelt one. transformers' `cache_dir` has 0.71."""


@dataclass(frozen=True)
class Choices:
    """The choices of an `InvariantModel`. They never change; another choice makes another wrapper.

    Attributes:
        method: How segments see each other.
        ordering: Which segment goes where.
        backend: What computes the attention.
        limits: How long prompts may be, and what happens to longer ones.
        intervention: A change to the plain model's attention; None for none.
        cache: Keeps keys and values of prompt prefixes; None for none.
        deterministic: Whether the prompts of a batch are computed one by one, so that they change no bit of each other.
    """

    method: Method
    ordering: Ordering
    backend: Backend
    limits: TokenLimits
    intervention: Intervention | None = None
    cache: KeyValueCache | None = None
    deterministic: bool = False

    @property
    def stock_decoding(self) -> bool:
        """Whether tokens after a prefilled prompt use the model's own attention."""
        return self.method.stock_decoding and self.intervention is None

    @classmethod
    def resolve(
        cls,
        model: PreTrainedModel,
        *,
        method: str | Method,
        ordering: str | Ordering | None,
        backend: str | Backend,
        max_segment_tokens: int | None,
        overflow: Overflow,
        intervention: str | Intervention | None,
        cache: KeyValueCache | None,
        deterministic: bool,
    ) -> Self:
        """Resolve the arguments of `InvariantModel`, which documents them and the errors."""
        check_method_and_ordering(method, ordering)
        method = resolve_method(method)
        choices = cls(
            method=method,
            ordering=resolve_ordering(ordering, method.default_ordering),
            backend=resolve_backend(backend, input_device(model)),
            limits=TokenLimits(context_window(model.config), max_segment_tokens, overflow),
            intervention=resolve_intervention(intervention, method, model),
            deterministic=check_flag("deterministic", deterministic),
        )
        _check_positions(model, method)
        return choices.with_cache(model, cache)

    def with_method(
        self,
        model: PreTrainedModel,
        *,
        method: str | Method | None,
        ordering: str | Ordering | None,
        backend: str | Backend | None,
        max_segment_tokens: int | None,
        overflow: Overflow | None,
        intervention: str | Intervention | None,
        deterministic: bool | None,
    ) -> Self:
        """Return other choices; None keeps a choice. A new method brings its default ordering and no intervention."""
        changes: dict[str, Any] = {}
        if method is not None:
            resolved = resolve_method(method)
            _check_positions(model, resolved)
            default = resolve_ordering(resolved.default_ordering)
            changes |= {"method": resolved, "ordering": default, "intervention": None}
        if ordering is not None:
            changes["ordering"] = resolve_ordering(ordering)
            changes["ordering"].check_installed()
        if backend is not None:
            changes["backend"] = resolve_backend(backend, input_device(model))
        if max_segment_tokens is not None:
            changes["limits"] = replace(self.limits, max_segment_tokens=max_segment_tokens)
        if overflow is not None:
            changes["limits"] = replace(changes.get("limits", self.limits), overflow=overflow)
        if intervention is not None:
            changes["intervention"] = resolve_intervention(intervention, changes.get("method", self.method), model)
        if deterministic is not None:
            changes["deterministic"] = check_flag("deterministic", deterministic)
        return replace(self, **changes).with_cache(model, self.cache)

    def with_cache(self, model: PreTrainedModel, cache: KeyValueCache | None) -> Self:
        """Return the same choices with another cache, or with none.

        Raises:
            InvalidChoice: It is no cache.
            UnsupportedCombination: Keys and values of this model, method or intervention cannot be reused.
        """
        _check_cache(cache)
        if cache is not None:
            check_cacheable(model, self.intervention)
        return replace(self, cache=cache)


def _check_cache(cache: object) -> None:
    if not isinstance(cache, KeyValueCache | None):
        raise InvalidChoice(
            f"expected a KeyValueCache, got {type(cache).__name__}", hint="For a folder: KeyValueCache(folder=...)."
        )


def _check_positions(model: PreTrainedModel, method: Method) -> None:
    """Raise UnsupportedCombination if the model has no place for the keys that a method's tokens see."""
    if method.reads_later_positions and shared_state(model).has_alibi:
        raise UnsupportedCombination(
            f"expected a method whose tokens see keys before their own position only, got {method.name!r}: "
            f"{model.config.model_type} has ALiBi, whose biases say nothing of keys behind it",
            hint="Use a model with rotary positions, or another method, such as 'set-based'.",
        )


def check_before_loading(
    name: str | Path | None,
    *,
    method: str | Method = "rotor",
    ordering: str | Ordering | None = None,
    backend: str | Backend = "auto",
    dtype: Any = "auto",
    device_map: Any = "auto",
    max_segment_tokens: int | None = None,
    overflow: Overflow = "error",
    intervention: str | Intervention | None = None,
    cache: KeyValueCache | None = None,
    deterministic: bool = False,
    **others: Any,
) -> None:
    """Check what can be checked of the arguments of `InvariantModel.from_pretrained`, before anything is loaded.

    Raises:
        UnknownName: There is no method, ordering, backend, overflow or intervention of that name; or another keyword
            looks like a misspelt one of these.
        InvalidChoice: Another argument is none.
        ExtraRequired: A package that the ordering needs is not installed.
    """
    del device_map  # only loading tells which devices there are
    check_method_and_ordering(method, ordering)
    resolve_backend(backend)
    resolve_dtype(dtype)
    TokenLimits(None, max_segment_tokens, overflow)
    if isinstance(intervention, str):
        check_name("intervention", intervention, INTERVENTIONS)
    _check_cache(cache)
    check_flag("deterministic", deterministic)
    ours = [each for each in inspect.signature(check_before_loading).parameters if each not in {"name", "others"}]
    misspelt = [each for each in others if get_close_matches(each, ours, 1, _ALIKE)]
    config = load_config(name, **others) if misspelt else None
    for each in misspelt:
        if not hasattr(config, each):  # transformers takes what the configuration has, whatever it looks like
            raise UnknownName("keyword", each, ours, hint="Those of transformers' from_pretrained are taken, too.")


class ReadOnlyChoices(ABC):
    """The choices of a wrapper as read-only attributes. Assigning one raises an error that names the right call."""

    @property
    @abstractmethod
    def choices(self) -> Choices:
        """All choices."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ImmutableModel(name)

    def __delattr__(self, name: str) -> NoReturn:
        raise ImmutableModel(name)

    @property
    def method(self) -> Method:
        """The method: which segments each segment attends to."""
        return self.choices.method

    @property
    def ordering(self) -> Ordering:
        """The ordering: how segments are ranked."""
        return self.choices.ordering

    @property
    def backend(self) -> Backend:
        """The attention implementation."""
        return self.choices.backend

    @property
    def intervention(self) -> Intervention | None:
        """The change to the plain model's attention, or None."""
        return self.choices.intervention

    @property
    def cache(self) -> KeyValueCache | None:
        """The cache of keys and values, or None."""
        return self.choices.cache

    @property
    def context_window(self) -> int | None:
        """Maximum number of tokens of prompt and answer together; None if the config has no limit."""
        return self.choices.limits.context_window

    @property
    def overflow(self) -> Overflow:
        """Strategy for prompts that are too long."""
        return self.choices.limits.overflow

    @property
    def deterministic(self) -> bool:
        """Whether the prompts of a batch are computed one by one, so that they change no bit of each other."""
        return self.choices.deterministic

    @property
    def max_segment_tokens(self) -> int | None:
        """Maximum number of tokens of one segment; None: no limit."""
        return self.choices.limits.max_segment_tokens
