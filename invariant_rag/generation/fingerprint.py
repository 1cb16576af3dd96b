"""What a model computes with: a digest of its config, modules and weights, and what else decides about the bits.

The digest reads every byte of the weights each time. Nothing less notices every change: PyTorch's version counters miss
what is written through `.data`, as merged adapters do, and samples miss what lies beside them. On a CPU it costs as
much as generating one or two tokens, which reads all weights, too.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules import module as hooks_of_all_modules
from transformers import PreTrainedModel

from invariant_rag.attention.dynamic_rope import has_dynamic_rope

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)
_NO_SETTINGS = {*vars(nn.Module()), "name_or_path", "warnings_issued"} - {"training"}
"""What every module has, and what transformers remembers of earlier calls, as it does in private attributes."""

_PIECE = 1 << 24  # bytes that are summed up at once
_KNOWN_HOOKS = ("accelerate", "invariant_rag", "torch", "transformers")
"""Packages whose hooks and wrappers move or record tensors, or are told by parameters: they change no answer."""


def fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of a model's config, of the class and settings of each module, and of all weights and buffers.

    Law: whatever is changed in place in one of these, the digest changes. Functions are not part of it; see
    `foreign_code`.
    """
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    dynamic = has_dynamic_rope(model)
    tensors: dict[str, Any] = model.state_dict()
    for name, module in model.named_modules():
        if dynamic and hasattr(module, "rope_type"):  # what it remembers of earlier calls, which ours forget
            continue
        digest.update(f"{name} {type(module).__module__}.{type(module).__qualname__} {_settings(module)}\n".encode())
        prefix = f"{name}." if name else ""
        tensors |= {prefix + buffer: each for buffer, each in module._buffers.items() if each is not None}
    flat = [(name, part) for name, tensor in tensors.items() for part in _plain_tensors(tensor)]
    for (name, part), checksum in zip(flat, _checksums([part for _, part in flat]), strict=True):
        shape = f"{tuple(part.shape)} {part.dtype}" if isinstance(part, torch.Tensor) else ""
        digest.update(f"{name} {shape} {checksum}\n".encode())
    return digest.hexdigest()


def environment(model: PreTrainedModel, device: torch.device) -> tuple[object, ...]:
    """Return what else decides about the bits that a model computes: versions, hardware, precision, attention.

    Keys and values of another environment are equal up to rounding only. Called without arranged attention in place.
    """
    from invariant_rag import __version__  # the package itself is above all of its modules

    configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PreTrainedModel)}
    cuda = torch.backends.cuda
    return (
        ("versions", __version__, torch.__version__, transformers.__version__),
        ("attention", *(config._attn_implementation for config in configs.values())),
        ("hardware", device.type, *_hardware(device)),
        ("autocast", torch.is_autocast_enabled(device.type) and str(torch.get_autocast_dtype(device.type))),
        ("precision", torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        ("sdpa", cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
    )


def foreign_code(model: PreTrainedModel) -> dict[str, Any]:
    """Return the code that a model runs besides that of its classes, by where: hooks, and the `forward` of one module.

    What such code does may depend on anything, so no digest can tell it.
    """
    of_all = (hooks_of_all_modules._global_forward_pre_hooks, hooks_of_all_modules._global_forward_hooks)
    found = [("a hook of all modules", each) for hooks in of_all for each in hooks.values()]
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        found += [(f"a hook of {name or 'the model'}", each) for each in hooks]
        if "forward" in vars(module):
            found.append((f"a forward of its own in {name or 'the model'}", vars(module)["forward"]))
    return {f"{where} ({number})": each for number, (where, each) in enumerate(found) if _is_foreign(each)}


def _hardware(device: torch.device) -> tuple[object, ...]:
    if device.type == "cpu":  # matrices are multiplied in as many parts as there are threads
        return torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return (torch.cuda.get_device_name(device),) if device.type == "cuda" else ()


def _is_foreign(function: Any) -> bool:
    """Return whether a function comes from another package than those whose hooks change nothing."""
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = getattr(function, "__func__", type(function).__call__)
    # `__module__` is copied by functools.wraps; the globals are those of where the code is written.
    package = getattr(function, "__globals__", {}).get("__name__", "").split(".")[0]
    return package not in _KNOWN_HOOKS


def _settings(module: nn.Module) -> list[str]:
    """Return the attributes of a module that are plain values or hold nothing else, such as scales and adapters."""
    found = []
    for name, value in vars(module).items():
        if name in _NO_SETTINGS or (name.startswith("_") and isinstance(module, PreTrainedModel)):
            continue
        kind = type(value)  # isinstance would ask a config for its class, which takes long
        if issubclass(kind, _PLAIN):
            found.append(f"{name}={value!r}")
        elif issubclass(kind, list | tuple | set | dict):
            parts = list(value.items()) if issubclass(kind, dict) else [(each,) for each in value]
            if all(isinstance(each, _PLAIN) for part in parts for each in part):
                found.append(f"{name}={sorted(map(repr, parts)) if issubclass(kind, set | dict) else parts!r}")
    return sorted(found)


def _plain_tensors(value: Any) -> Iterator[Any]:
    """Take tensors apart that are made of others (quantized, sharded): down to those with bytes of their own."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        yield repr(context)
        for name in names:
            yield from _plain_tensors(getattr(value, name))
    else:
        yield value.detach() if isinstance(value, torch.Tensor) else repr(value)


def _checksums(values: list[Any]) -> list[object]:
    """Return a checksum of each tensor, and the other values as they are."""
    bytes_of = {_place(each): each for each in values if isinstance(each, torch.Tensor)}
    pieces = [
        (place, piece)
        for place, tensor in bytes_of.items()
        for piece in tensor.contiguous().flatten().view(torch.uint8).split(_PIECE)
    ]
    read = [piece for _, piece in pieces]
    sums = _read_on_host(read) if all(each.device.type == "cpu" for each in read) else _read_on_device(read)
    found: dict[object, list[int]] = {place: [] for place in bytes_of}
    for (place, _), value in zip(pieces, sums, strict=True):
        found[place].append(value)
    return [found[_place(each)] if isinstance(each, torch.Tensor) else each for each in values]


def _place(tensor: torch.Tensor) -> object:
    """Return where a tensor lies: tied weights are read once."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _read_on_host(pieces: list[torch.Tensor]) -> list[int]:
    """Return the CRC-32 of pieces on the CPU, read by as many threads as PyTorch uses."""
    if len(pieces) == 1 or sum(map(len, pieces)) < _PIECE:
        return [zlib.crc32(each.numpy().data) for each in pieces]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # zlib reads without the interpreter's lock
        return list(threads.map(lambda each: zlib.crc32(each.numpy().data), pieces))


def _read_on_device(pieces: list[torch.Tensor]) -> list[int]:
    """Return a sum of the 32-bit words of each piece, each times a factor of its own, modulo 2**64.

    The factors are odd, so that no single word can change without the sum; two words that do cancel each other with a
    chance of about 2**-32.
    """
    sums = []
    for piece in pieces:
        whole_words = len(piece) % 4 == piece.storage_offset() % 4 == 0
        aligned = piece if whole_words else torch.cat([piece, piece.new_zeros(-len(piece) % 4)])
        words = aligned.view(torch.int32)
        sums.append((words * _factors(words.device)[: len(words)]).sum())
    return torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []


@cache
def _factors(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(-(1 << 62), 1 << 62, (_PIECE // 4,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)
