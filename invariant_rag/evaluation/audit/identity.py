"""The identity of a system: what tells it from a changed one, so that stored answers are those of this system.

It is a digest of everything public that can be reached from the system: the code of functions, what they enclose, and
the fields of objects. At worst two equal systems look different, and are asked again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_DEEPEST = 12
_MOST = 20_000
"""Objects that are looked at: a chain may hold a whole vector store."""


def describe(system: Any) -> str:
    """Return a digest of a system, the same in every process as long as nothing about it changes.

    >>> describe(lambda question, segments: "a") == describe(lambda question, segments: "b")
    False
    """
    digest = hashlib.sha256()
    for part in _Walk().parts(system, 0):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\\0")
    return digest.hexdigest()


@dataclass
class _Walk:
    """Goes through what can be reached from an object, each object once."""

    seen: dict[int, Any] = field(default_factory=dict)  # keeps them alive: an address may be used again

    def parts(self, value: Any, depth: int) -> Iterator[str]:
        """Yield texts that describe a value."""
        if isinstance(value, _PLAIN):
            yield f"{type(value).__name__}:{value!r}"
            return
        yield type(value).__qualname__
        if id(value) in self.seen or depth > _DEEPEST or len(self.seen) > _MOST:
            return
        self.seen[id(value)] = value
        for each in self._children(value):
            yield from self.parts(each, depth + 1)

    def _children(self, value: Any) -> list[Any]:
        """Return what describes a value: plain values, and others that are described in turn."""
        if isinstance(value, CodeType):
            return [value.co_code, value.co_names, value.co_consts]
        if isinstance(value, FunctionType):
            enclosed = [_content(each) for each in value.__closure__ or ()]
            defaults = value.__defaults__, value.__kwdefaults__
            return [value.__qualname__, value.__code__, *defaults, enclosed, _used(value)]
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, type | ModuleType | BuiltinFunctionType):
            return [value.__name__]
        return _items(value) if isinstance(value, Mapping | list | tuple | set | frozenset) else _fields(value)


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else list(value)


def _fields(value: Any) -> list[Any]:
    """Return the public fields of an object, and what it does when it is called; else how it shows itself."""
    public = {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    called = [each for each in [vars(type(value)).get("__call__")] if isinstance(each, FunctionType)]
    return [public, *called] if public or called else [_ADDRESS.sub("", repr(value))]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _used(function: FunctionType) -> list[Any]:
    """Return the functions and plain values of its module that a function uses by name."""
    found = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [
        each
        for each in found
        if isinstance(each, str | int | float | bool)
        or (isinstance(each, FunctionType) and each.__module__ == function.__module__)
    ]
