"""Digests, for the keys of caches: of plain data, of a model's weights, and of all that can change an answer.

The digest of weights is computed from every byte each time, which takes as long as one or two tokens on a CPU. Nothing
less notices every change: PyTorch's version counters miss what is written through `.data`, as merged adapters do.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from torch.nn.modules import module as hooks_of_all_modules
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from invariant_rag.attention.per_model import dynamic_rope_modules
from invariant_rag.interventions import Intervention
from invariant_rag.locks import ForkSafeLock
from invariant_rag.read_only import ReadOnly

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

_PLAIN = (str, bytes, bool, int, float, complex, type(None), Path, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_NO_SETTINGS = {*vars(nn.Module()), "name_or_path", "warnings_issued"} - {"training"}
"""What every module has, and what transformers remembers of earlier calls, as it does in private attributes."""

_PIECE = 1 << 25  # bytes of weights on a device that are summed at once
_KNOWN_HOOKS = ("accelerate", "invariant_rag", "torch", "transformers")
"""Packages whose hooks and wrappers move or record tensors, or depend on parameters alone: they change no answer."""

_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, str]] = WeakKeyDictionary()
_tokens: MutableMapping[object, str] = WeakIdKeyDictionary()
_lock = ForkSafeLock()


def digest_of(*parts: Any) -> str:
    """Return the SHA-256 of plain values, in hexadecimal."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def model_digest(lm: InvariantModel) -> str:
    """Return a digest of everything about a wrapped model that can change an answer.

    Law: of two models with the same digest, either may answer for the other. It is computed at every call, so it
    follows what was changed in place, and is the same in every process, unless a choice holds an object without
    comparable content, such as an ordering with a model in memory. A cache of keys and values is no part of it.
    """
    is_offloaded = any(parameter.is_meta for parameter in lm.model.parameters())
    return digest_of(
        choices_digest(lm),
        f"offloaded@{_token(lm.model)}" if is_offloaded else lm.prefiller.shared.weights_digest(lm.model),
        lm.model.config.to_json_string(use_diff=False),
        lm.model.training,
        {place: _reference(each) for place, each in foreign_code(lm.model).items()},
        lm.device.type,
        lm.model.generation_config.to_json_string(use_diff=False),
        None if lm.tokenizer is None else _tokenizer_state(lm.tokenizer),
    )


def choices_digest(lm: InvariantModel) -> str:
    """Return a digest of a wrapper's class and choices, without its weights. A cache changes no answer."""
    choices = {name: value for name, value in vars(lm.choices).items() if name != "cache"}
    routing = [getattr(lm, name, None) for name in ("alpha", "plain_order")]
    return digest_of(_reference(type(lm)), describe(choices), routing)


def describe(value: Any) -> str:
    """Return a text that is equal for equal data, and different for different data.

    Data and choices are described by their contents, classes and functions by their import path, any other object, such
    as a loaded model, by a random token that belongs to it alone: at worst two equal ones look different.

    >>> describe({"a": [1], "b": None}) == describe({"b": None, "a": [1]}) != describe({"a": [1.0]})
    True
    """
    kind = type(value).__name__
    if isinstance(value, _PLAIN):
        return f"{kind}:{value!r}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{describe(key)}={describe(each)}' for key, each in value.items()))}}}"
    if isinstance(value, list | tuple | set | frozenset):
        items = [describe(each) for each in value]
        return f"{kind}[{', '.join(items if isinstance(value, list | tuple) else sorted(items))}]"
    is_data = is_dataclass(value) and not isinstance(value, type)
    if is_data or isinstance(value, ReadOnly | Intervention) or callable(getattr(type(value), "attend", None)):
        return f"{_reference(type(value))}({describe(value.__getstate__())})"
    return _reference(value)


def weights_digest(model: PreTrainedModel) -> str:
    """Return a digest of a model's config, of the class and settings of each module, and of all weights and buffers.

    Law: whatever is changed in place in one of these, the digest changes. Functions are not part of it; see
    `foreign_code`.
    """
    modules = list(model.named_modules())
    if dynamic_rope_modules(model):  # what it remembers of earlier calls, which ours forget
        modules = [each for each in modules if not hasattr(each[1], "rope_type")]
    tensors: dict[str, Any] = model.state_dict()
    tensors |= {f"{name}.{buffer}": each for name, module in modules for buffer, each in module._buffers.items()}
    names, parts = [], []
    for name, tensor in tensors.items():
        for part in [tensor] if type(tensor) in (torch.Tensor, nn.Parameter) else _plain_tensors(tensor):
            parts.append(part)
            names.append(f"{name} {tuple(part.shape)} {part.dtype}" if isinstance(part, torch.Tensor) else name)
    return digest_of(model.config.to_json_string(use_diff=False), _settings(modules), names, _checksums(parts))


def environment(model: PreTrainedModel, device: torch.device) -> tuple[object, ...]:
    """Return the rest of a KV cache key: versions, hardware, thread count and precision settings."""
    from invariant_rag import __version__  # the package itself is above all of its modules

    configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PreTrainedModel)}
    cuda, hardware = torch.backends.cuda, [device.type]
    if device.type == "cpu":  # matrices are multiplied in as many parts as there are threads
        hardware += [torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    elif device.type == "cuda":
        hardware.append(torch.cuda.get_device_name(device))
    return (
        (__version__, torch.__version__, transformers.__version__),
        [config._attn_implementation for config in configs.values()],
        hardware,
        torch.is_autocast_enabled(device.type) and str(torch.get_autocast_dtype(device.type)),
        (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
    )


def foreign_code(model: PreTrainedModel) -> dict[str, Any]:
    """Return the code that a model runs besides that of its classes, by place: no digest can cover what it does."""
    of_all = (hooks_of_all_modules._global_forward_pre_hooks, hooks_of_all_modules._global_forward_hooks)
    code = [("a hook of all modules", each) for hooks in of_all for each in hooks.values()]
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        code += [(f"a hook of {name or 'the model'}", each) for each in hooks] if hooks else []
        if "forward" in vars(module):
            code.append((f"a forward of its own in {name or 'the model'}", vars(module)["forward"]))
    return {f"{where} ({number})": each for number, (where, each) in enumerate(code) if _is_foreign(each)}


def _is_foreign(function: Any) -> bool:
    """Return whether a function comes from another package than those whose hooks change nothing."""
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = getattr(function, "__func__", type(function).__call__)
    # `__module__` is copied by functools.wraps; the globals are those of where the code is written.
    package = getattr(function, "__globals__", {}).get("__name__", "").split(".")[0]
    return package not in _KNOWN_HOOKS


def _settings(modules: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Return the attributes of modules that are plain values or hold nothing else, such as scales and adapters."""
    facts = []
    for name, module in modules:
        is_model, kind = isinstance(module, PreTrainedModel), type(module)
        facts.append(f"{name} {kind.__module__}.{kind.__qualname__}")
        for attribute, value in sorted(vars(module).items()):
            kind = type(value)  # isinstance would resolve the class of a config, which takes long
            if attribute in _NO_SETTINGS or (is_model and attribute.startswith("_")):
                continue
            items = [*value, *value.values()] if issubclass(kind, dict) else value
            if issubclass(kind, _PLAIN):
                facts.append(f"{attribute}={value!r}")
            elif issubclass(kind, _CONTAINERS) and all(isinstance(each, _PLAIN) for each in items):
                facts.append(f"{attribute}={describe(value)}")
    return facts


def _plain_tensors(value: Any) -> list[Any]:
    """Split tensors that are made of others (quantized, sharded): down to those with bytes of their own."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return [repr(context), *(part for name in names for part in _plain_tensors(getattr(value, name)))]
    return [value if isinstance(value, torch.Tensor) else repr(value)]


def _checksums(values: list[Any]) -> list[object]:
    """Return a checksum of each tensor, and the other values as they are. Tied weights are summed once."""
    found: list[Any] = []
    sums: dict[Any, Future[int] | torch.Tensor] = {}
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # zlib runs without the interpreter's lock
        for value in values:
            if not isinstance(value, torch.Tensor):
                found.append(value)
                continue
            place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if place not in sums:
                content = value.detach().contiguous().flatten().view(torch.uint8)
                is_host = content.device.type == "cpu"
                sums[place] = threads.submit(zlib.crc32, content.numpy().data) if is_host else _sum_on_device(content)
            found.append(sums[place])
    on_device = [each for each in sums.values() if isinstance(each, torch.Tensor)]
    if on_device:  # all of them in one transfer, since each waits for its device
        totals = torch.stack([each.to(on_device[0].device) for each in on_device]).tolist()
        on_host = dict(zip(map(id, on_device), totals, strict=True))
        found = [on_host[id(each)] if isinstance(each, torch.Tensor) else each for each in found]
    return [each.result() if isinstance(each, Future) else each for each in found]


def _sum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 32-bit words `[bytes]`, each times an odd factor of its own, modulo 2**64.

    No single word can change without the sum; two that do cancel each other with a chance of about 2**-32.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(tensor.split(_PIECE)):
        aligned = len(piece) % 4 == piece.storage_offset() % 4 == 0
        words = (piece if aligned else torch.cat([piece, piece.new_zeros(-len(piece) % 4)])).view(torch.int32)
        total += (words * _factors(words.device)[: len(words)]).sum() * (2 * number + 1)
    return total


@cache
def _factors(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(-(1 << 62), 1 << 62, (_PIECE // 4,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return what decides between two tokenizers; all but the vocabulary is read anew."""
    size = len(tokenizer)
    with _lock:
        known = _vocabularies.get(tokenizer)
        if known is None or known[0] != size:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            vocabulary: Any = sorted(tokenizer.get_vocab().items())
            if backend is not None:  # the last call left its padding and truncation in it
                vocabulary = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
            known = _vocabularies[tokenizer] = size, digest_of(vocabulary)
    behaviour = ("chat_template", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    return [known[1], special, *(describe(getattr(tokenizer, name, None)) for name in behaviour)]


def _reference(value: Any) -> str:
    """Return the import path of a class or a function; for what cannot be imported, a token of its own."""
    module: Any = getattr(value, "__module__", None)
    name: Any = getattr(value, "__qualname__", None)
    with suppress(AttributeError, KeyError, TypeError):  # of what cannot be imported
        if module != "__main__" and attrgetter(name)(sys.modules[module]) is value:
            return f"{module}.{name}"
    return f"{type(value).__qualname__}@{_token(value)}"


def _token(value: object) -> str:
    """Return a random text that belongs to one object as long as it exists. Unlike an address, it is never reused."""
    token = uuid4().hex
    with _lock, suppress(TypeError):  # an object without weak references gets another token every time
        token = _tokens.setdefault(value, token)
    return token
