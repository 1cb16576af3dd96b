"""The identity of a model: one digest of everything that can change its answers, for cache and batch keys."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from invariant_rag.generation.fingerprint import foreign_code
from invariant_rag.locks import ForkSafeLock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.model import InvariantModel

_PLAIN = (str, bytes, bool, int, float, complex, type(None), Path, torch.dtype, torch.device)

_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, str]] = WeakKeyDictionary()
_tokens: dict[int, tuple[ReferenceType[Any], str]] = {}
_lock = ForkSafeLock()


def identity(lm: InvariantModel) -> str:
    """Return a digest of everything about a model that can change an answer.

    Law: of two models with the same identity, either may answer for the other. Caches of answers and batches of several
    callers are keyed by it, together with the prompt and the keywords of the call. It is computed at every call, so it
    follows weights, configs and chat templates that were changed in place. It is the same in every process,
    unless a choice holds an object without a comparable content, such as an ordering with a model in memory.

    A cache of keys and values is no part of it: it changes no answer.
    """
    tokenizer = lm.tokenizer
    parts = {
        "kind": _reference(type(lm)),
        "weights": weights_digest(lm),
        "config": lm.model.config.to_json_string(use_diff=False),
        "training": lm.model.training,
        "code": {where: _reference(each) for where, each in foreign_code(lm.model).items()},
        "device": lm.device.type,
        "generation_config": lm.model.generation_config.to_json_string(use_diff=False),
        "tokenizer": None if tokenizer is None else _tokenizer_state(tokenizer),
        "method": describe_choice(lm.method),
        "ordering": describe_choice(lm.ordering),
        "backend": describe_choice(lm.backend),
        "intervention": None if lm.intervention is None else describe_choice(lm.intervention),
        "limits": describe_data(lm.choices.limits),
        "deterministic": lm.deterministic,
        "routing": [getattr(lm, name, None) for name in ("alpha", "plain_order")],
    }
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def weights_digest(lm: InvariantModel) -> str:
    """Return a digest of the configuration, the modules and the weights, computed from all of them at every call.

    Weights that accelerate offloads have no values to read: such a model gets a token of its own.
    """
    if any(parameter.is_meta for parameter in lm.model.parameters()):
        return f"offloaded@{_token(lm.model)}"
    return lm.prefiller.shared.fingerprint(lm.model)


def describe_choice(choice: object) -> str:
    """Return a text that tells a method, an ordering, a backend or an intervention from every other one.

    It is the class, and the state that the object would be pickled with as `describe_data` has it.

    >>> from invariant_rag.methods import APE
    >>> describe_choice(APE(temperature=0.5)) == describe_choice(APE(temperature=0.5)) != describe_choice(APE())
    True
    """
    return f"{_reference(type(choice))}({describe_data(choice.__getstate__())})"


def describe_data(value: Any) -> str:
    """Return a text that is equal for equal data, and different for different data.

    Plain values, containers and dataclasses are described by their contents, classes and functions by their import
    path. Any other object, such as a loaded model, is told by a random token that belongs to it alone: at worst two
    equal ones look different.

    >>> describe_data({"a": [1], "b": None}) == describe_data({"b": None, "a": [1]}) != describe_data({"a": [1.0]})
    True
    """
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, Mapping):
        items = sorted(f"{describe_data(key)}={describe_data(each)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(map(describe_data, value))}]"
    if isinstance(value, set | frozenset):
        return f"set[{', '.join(sorted(map(describe_data, value)))}]"
    if is_dataclass(value) and not isinstance(value, type):
        state = {each.name: getattr(value, each.name) for each in fields(value)}
        return f"{_reference(type(value))}({describe_data(state)})"
    return _reference(value)


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return what decides between two tokenizers; all but the vocabulary is read anew."""
    behaviour = ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")
    return [
        _vocabulary_digest(tokenizer),
        describe_data(tokenizer.chat_template),
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
        [getattr(tokenizer, name, None) for name in behaviour],
    ]


def _vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of how a tokenizer splits text, taken again when tokens were added."""
    size = len(tokenizer)
    with _lock:
        known = _vocabularies.get(tokenizer)
        if known is None or known[0] != size:
            backend = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
            if backend is None:
                serialized = repr(sorted(tokenizer.get_vocab().items()))
            else:
                backend.no_padding()  # the last call left its padding and truncation behind
                backend.no_truncation()
                serialized = backend.to_str()
            known = size, hashlib.sha256(serialized.encode("utf-8", "surrogatepass")).hexdigest()
            _vocabularies[tokenizer] = known
        return known[1]


def _reference(value: Any) -> str:
    """Return the import path of a class or a function; for what cannot be imported, a token of its own."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and module != "__main__":
        found: Any = sys.modules.get(module)
        for each in name.split("."):
            found = getattr(found, each, None)
        if found is value:
            return f"{module}.{name}"
    return f"{type(value).__qualname__}@{_token(value)}"


def _token(value: object) -> str:
    """Return a random text that belongs to one object as long as it exists. Unlike an address, it is never reused."""
    with _lock:
        known = _tokens.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        for key in [key for key, (watched, _) in _tokens.items() if watched() is None]:
            del _tokens[key]
        token = uuid4().hex
        with suppress(TypeError):  # what cannot be watched gets another token every time
            _tokens[id(value)] = ref(value), token
        return token
