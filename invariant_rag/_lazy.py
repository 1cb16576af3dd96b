"""Public names that are imported on first use, so that importing a package does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    `homes` has each public name and the module that defines it: one of the package, or one elsewhere by its full name.
    A name that is its own home is a module of the package.
    """

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = import_module(home if home.startswith("invariant_rag.") else f"{package}.{home}")
        return module if home == name else getattr(module, name)

    return get_attribute, lambda: sorted(homes)
