"""Rotary frequencies that depend on the length of the prompt (dynamic NTK, LongRoPE), private to every call.

transformers stores them in the rotary module, which all threads share: another thread that runs a longer prompt changes
the frequencies of this one in the middle of a forward pass, and a later prompt inherits those of an earlier one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from invariant_rag.attention.per_model import dynamic_rope_modules

private_modules: ContextVar[Mapping[nn.Module | None, nn.Module]] = ContextVar("private_rotary_modules", default={})  # noqa: B039 - never changed
"""The copies of rotary modules that this thread uses; there are none outside of `private_dynamic_rope`."""


@contextmanager
def private_dynamic_rope(model: nn.Module) -> Iterator[None]:
    """Give this thread length-dependent frequencies of its own, those of a newly loaded model.

    Law: what other threads run on the model changes no frequency of this thread, and this thread none of theirs.
    Not to be entered by two threads for one model at a time: callers hold the model's lock.
    """
    modules = dynamic_rope_modules(model)
    with ExitStack() as restore:
        if modules:
            private = {**private_modules.get(), **{module: _as_loaded(module) for module in modules}}
            restore.callback(private_modules.reset, private_modules.set(private))
        for module in modules:
            attributes = vars(module)
            if "forward" in attributes:  # of a call around this one, or of accelerate
                restore.callback(attributes.__setitem__, "forward", attributes["forward"])
            else:
                restore.callback(attributes.__delitem__, "forward")
            attributes["forward"] = partial(_forward, module, module.forward)
        yield


def _forward(module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the rotary module of this thread, if it has one, else the one that all threads share."""
    private = private_modules.get().get(module)
    return original(*args, **kwargs) if private is None else type(private).forward(private, *args, **kwargs)


def _as_loaded(module: nn.Module) -> nn.Module:
    """Return a copy of a rotary module with its own buffers and the frequencies that it was loaded with."""
    private = copy.copy(module)
    buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    vars(private)["_buffers"] = buffers
    for name, buffer in list(buffers.items()):
        if name.endswith("original_inv_freq") and buffer is not None:
            buffers[name.replace("original_inv_freq", "inv_freq")] = buffer.clone()
    for name, value in list(vars(private).items()):
        if name.endswith("max_seq_len_cached"):
            vars(private)[name] = private.original_max_seq_len
        elif isinstance(value, torch.Tensor):
            vars(private)[name] = value.clone()
    return private
