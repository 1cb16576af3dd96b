"""Methods: which segments attend to which, and at which positions. A registry by name."""

from __future__ import annotations

from invariant_rag.checks import check_name
from invariant_rag.methods.ape import APE
from invariant_rag.methods.base import Method, RowMethod
from invariant_rag.methods.parallel_windows import ParallelWindows
from invariant_rag.methods.pine import PINE, PINEInPlace, PINEReverse
from invariant_rag.methods.rotor import RoToR
from invariant_rag.methods.rows import Isolated, Sequential, SetBased
from invariant_rag.methods.structured_prompting import Structured
from invariant_rag.orderings import Ordering, resolve_ordering

METHODS: dict[str, type[Method]] = {
    each.name: each
    for each in (
        Sequential,
        RoToR,
        PINE,
        PINEInPlace,
        PINEReverse,
        Isolated,
        ParallelWindows,
        SetBased,
        Structured,
        APE,
    )
}

__all__ = [
    "APE",
    "METHODS",
    "PINE",
    "Isolated",
    "Method",
    "PINEInPlace",
    "PINEReverse",
    "ParallelWindows",
    "RoToR",
    "RowMethod",
    "Sequential",
    "SetBased",
    "Structured",
    "check_method_and_ordering",
    "resolve_method",
]


def resolve_method(method: str | Method) -> Method:
    """Return the method of that name, or the instance as it is; an `UnknownName` lists the names."""
    if isinstance(method, Method):
        return method
    return METHODS[check_name("method", method, METHODS)]()


def check_method_and_ordering(method: str | Method, ordering: str | Ordering | None) -> None:
    """Check the names of a method and an ordering (None: the method's default), and what they need installed.

    Takes no time, so that nothing is loaded, downloaded or indexed before an `UnknownName` or an `ExtraRequired`.
    """
    resolve_ordering(ordering, resolve_method(method).default_ordering).check_installed()
