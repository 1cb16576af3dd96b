"""Objects that never change once they are built: orderings and methods, which a model's answers depend on."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from invariant_rag.errors import ImmutableObject


class _Sealing(ABCMeta):
    """Seals an object when its constructor has returned."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        built = super().__call__(*args, **kwargs)
        object.__setattr__(built, "_sealed", True)
        return built


class ReadOnly(metaclass=_Sealing):
    """Refuses to assign or delete attributes after it was built.

    Names that begin with an underscore are an object's own, such as a model that is loaded when it is first used.
    """

    # Not in vars(), which names the hyper-parameters of a method.
    __slots__ = ("__dict__", "__weakref__", "_sealed")

    def __setattr__(self, name: str, value: object) -> None:
        self._check(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._check(name)
        object.__delattr__(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        object.__setattr__(self, "_sealed", True)

    def _check(self, name: str) -> None:
        if not name.startswith("_") and getattr(self, "_sealed", False):
            raise ImmutableObject(type(self).__name__, name)
