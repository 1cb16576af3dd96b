"""Checks of arguments that people pass to public functions: typed errors that say what was expected and what came."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from invariant_rag import errors
from invariant_rag.errors import InvalidChoice, InvariantRAGError, UnknownName
from invariant_rag.shown import shown

T = TypeVar("T")

MOST_CALLS = 100_000
"""The most permutations, rounds, orders or repetitions of one question: a number beyond it is a mistake."""
SEEDS = (-(1 << 63), (1 << 64) - 1)
"""The least and the largest seed that PyTorch takes."""


def check_number(
    name: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    *,
    error: type[InvariantRAGError] = InvalidChoice,
) -> int:
    """Return a whole number from `least` to `most` as an int; raise `error` for anything else."""
    expected = "a whole number" if least is None else f"at least {least}"
    if not isinstance(value, Integral) or isinstance(value, bool) or (least is not None and value < least):
        raise error(f"{name}: expected {expected}, got {shown(value)}", hint=f"Give {name} as an int.")
    number = int(value)
    if most is not None and number > most:
        raise error(f"{name}: expected at most {most}, got {shown(value)}", hint=f"Give a smaller {name}.")
    return number


def check_real(name: str, value: Any, *, error: type[InvariantRAGError] = InvalidChoice) -> float:
    """Return a finite number as a float; raise `error` for anything else."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if abs(number) < float("inf"):
            return number
    raise error(f"{name}: expected a finite number, got {shown(value)}", hint=f"Give {name} as a float.")


def check_text(name: str, value: Any, *, error: type[InvariantRAGError] = InvalidChoice) -> str:
    """Return a text; raise `error` for anything else."""
    if not isinstance(value, str):
        raise error(f"{name}: expected a str, got {shown(value)}", hint=f"Give {name} as text.")
    return value


def check_items(name: str, values: Any, kind: type, *, error: type[InvariantRAGError] = InvalidChoice) -> list[Any]:
    """Return objects of one class as a list; raise `error` for anything else."""
    what = f"{name}: expected a list of {kind.__name__}"
    if not isinstance(values, list | tuple) and (isinstance(values, str | bytes) or not is_iterable(values)):
        raise error(f"{what}, got {shown(values)}", hint=f"Give {name} as a list.")
    listed = list(values)
    for index, each in enumerate(listed):
        if not isinstance(each, kind):
            raise error(f"{what}, got {shown(each)} at index {index}", hint=f"Give {name} as a list.")
    return listed


def check_stops(stops: Any) -> list[str]:
    """Return stop strings as a list: a str is one of them, and None is none.

    >>> check_stops("and"), check_stops(("a", "b")), check_stops(None)
    (['and'], ['a', 'b'], [])
    """
    if stops is None:
        return []
    return [stops] if isinstance(stops, str) else check_items("stop", stops, str, error=errors.InvalidOption)


def check_tools(tools: Any) -> list[Any]:
    """Return tools, of whatever kind, as a list; None is none. Raise `InvalidTool` for what is no collection."""
    if tools is None:
        return []
    if not is_iterable(tools) or isinstance(tools, str | bytes):
        raise errors.InvalidTool(f"tools: expected a list of tools, got {shown(tools)}")
    return list(tools)


def check_kind(
    name: str, value: Any, kind: type[T], *, error: type[InvariantRAGError] = InvalidChoice, hint: str | None = None
) -> T:
    """Return an object of a class; raise `error` for anything else."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise error(f"{name}: expected {article} {kind.__name__}, got {shown(value)}", hint=hint)
    return value


def check_flag(name: str, value: Any, *, error: type[InvariantRAGError] = InvalidChoice) -> bool:
    """Return a switch, `True` or `False`; 1 and 0 are these, too; raise `error` for anything else."""
    if not isinstance(value, Integral) or value not in (0, 1):
        raise error(f"{name}: expected True or False, got {shown(value)}", hint=f"Give {name} as a bool.")
    return bool(value)


def check_function(name: str, value: Any, *, error: type[InvariantRAGError] = InvalidChoice) -> Any:
    """Return what can be called; raise `error` for anything else."""
    if not callable(value):
        raise error(f"{name}: expected a function, got {shown(value)}", hint=f"Give {name} as a function.")
    return value


def check_name(kind: str, value: Any, choices: Iterable[str], *, hint: str | None = None) -> str:
    """Return one of some names; raise `UnknownName` for another one, which the message calls a `kind`."""
    listed = list(choices)
    if not isinstance(value, str) or value not in listed:
        raise UnknownName(kind, value, listed, hint=hint)
    return str(value)


def check_path(name: str, value: Any, *, error: type[InvariantRAGError] = InvalidChoice) -> Path:
    """Return the path of a file or a folder; raise `error` for an empty text, and what the system takes for none."""
    if not isinstance(value, str | Path):
        raise error(f"{name}: expected a path, got {shown(value)}", hint=f"Give {name} as a str or a Path.")
    if value == "":
        raise error(f"{name}: expected a path, got an empty text", hint='For the working directory, write ".".')
    try:
        Path(value).stat()
    except (OSError, ValueError) as reason:  # too long, or with a null character or half of a surrogate pair
        if not isinstance(reason, OSError) or reason.errno == errno.ENAMETOOLONG:
            why = reason.strerror if isinstance(reason, OSError) else reason
            raise error(f"{name}: {shown(str(value))} is no path of a file: {why}") from reason
    return Path(value)


def is_iterable(value: Any) -> bool:
    """Return whether a loop over a value begins. Arrays and tensors without dimensions only look as if it did."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def require_extra(module: str, extra: str, *, hint: str | None = None) -> None:
    """Raise `ExtraRequired` if a module is not installed, before the work that needs it."""
    if find_spec(module) is None:
        raise errors.ExtraRequired(module, extra, hint=hint)
