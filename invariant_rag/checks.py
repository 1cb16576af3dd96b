"""Checks of arguments that people pass to public functions: typed errors that say what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any

from invariant_rag.errors import ExtraRequired, InvalidChoice, InvariantRAGError


def check_number(
    name: str, value: Any, least: int | None = None, *, error: type[InvariantRAGError] = InvalidChoice
) -> int:
    """Return a whole number as an int.

    Raises:
        InvariantRAGError: It is none, or below `least`; raised as the given `error` class.
    """
    at_least = "a whole number" if least is None else f"at least {least}"
    if not isinstance(value, Integral) or isinstance(value, bool) or (least is not None and value < least):
        raise error(f"{name}: expected {at_least}, got {shown(value)}", hint=f"Give {name} as an int.")
    return int(value)


def check_real(name: str, value: Any, *, error: type[InvariantRAGError] = InvalidChoice) -> float:
    """Return a finite number as a float.

    Raises:
        InvariantRAGError: It is none; raised as the given `error` class.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if abs(number) < float("inf"):
            return number
    raise error(f"{name}: expected a finite number, got {shown(value)}", hint=f"Give {name} as a float.")


def check_text(name: str, value: Any, *, error: type[InvariantRAGError] = InvalidChoice) -> str:
    """Return a text.

    Raises:
        InvariantRAGError: It is none; raised as the given `error` class.
    """
    if not isinstance(value, str):
        raise error(f"{name}: expected a str, got {shown(value)}", hint=f"Give {name} as text.")
    return value


def check_items(name: str, values: Any, kind: type, *, error: type[InvariantRAGError] = InvalidChoice) -> list[Any]:
    """Return objects of one class as a list.

    Raises:
        InvariantRAGError: It is no collection of them; raised as the given `error` class.
    """
    what = f"{name}: expected a list of {kind.__name__}"
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise error(f"{what}, got {shown(values)}", hint=f"Give {name} as a list.")
    listed = list(values)
    for index, each in enumerate(listed):
        if not isinstance(each, kind):
            raise error(f"{what}, got {shown(each)} at index {index}", hint=f"Give {name} as a list.")
    return listed


def require_extra(module: str, extra: str, *, hint: str | None = None) -> None:
    """Check that a module is installed, before the work that needs it.

    Raises:
        ExtraRequired: It is not; the message names the extra that installs it.
    """
    if find_spec(module) is None:
        raise ExtraRequired(module, extra, hint=hint)


def shown(value: Any) -> str:
    """Return a value for a message, short however large it is."""
    if isinstance(value, Integral) and abs(int(value)) > 10**20:
        return "a number of more than 20 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} {text[:60]}..."
