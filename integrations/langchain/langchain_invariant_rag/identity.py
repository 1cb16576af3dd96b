"""What tells two models apart: the part of a cache key that names weights, methods and orderings."""

from __future__ import annotations

import hashlib
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from invariant_rag.methods import METHODS, Method
from invariant_rag.orderings import ORDERINGS, Ordering

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from transformers import PreTrainedModel

_PLAIN = (str, int, float, type(None), Path, tuple)

_fingerprints: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
_lock = Lock()


def described(part: str | Method | Ordering) -> str:
    """Return a registered name as it is, and any other instance with everything it was built with.

    What is not plain data, such as a model inside an ordering, is told apart by its address. At worst that makes a
    cache miss; it never makes two of them look alike.
    """
    if isinstance(part, str):
        return part
    if not vars(part) and type(part) in (METHODS.get(part.name), ORDERINGS.get(part.name)):
        return part.name
    values = ", ".join(
        f"{name}={value!r}" if isinstance(value, _PLAIN) else f"{name}={type(value).__qualname__}@{id(value):x}"
        for name, value in sorted(vars(part).items())
    )
    return f"{type(part).__module__}.{type(part).__qualname__}({values})"


def fingerprint(engine: InvariantModel) -> str:
    """Return a name for the weights of a loaded model: its own name is not enough, two may share it.

    It hashes the configuration, and of every parameter the shape, the type and the first values.
    """
    model = engine.model
    with _lock:
        if model not in _fingerprints:
            digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
            for name, weights in model.named_parameters():
                first = "offloaded" if weights.is_meta else weights.detach().flatten()[:8].double().tolist()
                digest.update(f"{name} {tuple(weights.shape)} {weights.dtype} {first}".encode())
            _fingerprints[model] = digest.hexdigest()
    return f"{engine.name}@{_fingerprints[model]}"
