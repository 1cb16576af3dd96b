"""Facts about a model, each computed once; and what releases of transformers name differently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from invariant_rag.locks import ForkSafeLock

if TYPE_CHECKING:
    import torch

Fact = TypeVar("Fact")


def once_per_model(compute: Callable[[Any], Fact]) -> Callable[[Any], Fact]:
    """Call a function of a model once for each model, and forget its result with the model. Safe for threads."""
    known: WeakKeyDictionary[Any, Fact] = WeakKeyDictionary()
    lock = ForkSafeLock()

    @wraps(compute)
    def fact(model: Any) -> Fact:
        if model not in known:
            with lock:
                if model not in known:
                    known[model] = compute(model)
        return known[model]

    return fact


@once_per_model
def forward_parameters(model: Any) -> frozenset[str]:
    """Return the names of the arguments that a model's forward pass takes."""
    return frozenset(inspect.signature(model.forward).parameters)


def takes_position_ids(model: Any) -> bool:
    """Return whether the model takes the positions of tokens. With ALiBi alone, it counts them itself."""
    return "position_ids" in forward_parameters(model)


def input_device(model: Any) -> torch.device:
    """Return the device of a model's input ids, also if its layers are spread over several devices."""
    device: torch.device = model.get_input_embeddings().weight.device
    return device


@once_per_model
def dynamic_rope_modules(model: Any) -> list[Any]:
    """Return the modules whose rotary frequencies depend on the sequence length (dynamic NTK, LongRoPE)."""
    kinds = [(module, str(getattr(module, "rope_type", ""))) for module in model.modules()]
    return [module for module, kind in kinds if "dynamic" in kind or "longrope" in kind]


def cache_keyword(names: Container[str]) -> str:
    """Return which of the names of arguments is that of keys and values: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in names else "past_key_values"


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """Return the keys and values that a model is called with, by either name; None without any."""
    return kwargs.get("cache", kwargs.get("past_key_values"))
