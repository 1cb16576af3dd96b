"""Orderings and methods never change once they are built."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from invariant_rag.errors import ImmutableObject
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS, Embedding


@pytest.mark.parametrize("kind", [*ORDERINGS.values(), *METHODS.values()])
def test_an_attribute_is_neither_assigned_nor_deleted(kind: Callable[[], Any]) -> None:
    for built in (kind(), copy.deepcopy(kind()), pickle.loads(pickle.dumps(kind()))):
        before = dict(vars(built))
        for name in ("name", "invariant", "new", *(each for each in before if not each.startswith("_"))):
            with pytest.raises(AttributeError):  # of a dataclass, or ours
                setattr(built, name, "other")
        with pytest.raises(AttributeError):
            del built.name
        assert {**vars(built), "_lock": 0} == {**before, "_lock": 0}


def test_the_error_says_what_never_changes() -> None:
    with pytest.raises(ImmutableObject, match="expected 'batch_size' of Embedding to be neither assigned nor deleted"):
        Embedding().batch_size = 3


def test_a_subclass_may_set_what_it_likes_while_it_is_built() -> None:
    class Mine(ORDERINGS["lexical"]):  # type: ignore[misc]
        def __init__(self) -> None:
            self.name = self.weight = "mine"

    assert Mine().weight == "mine"
    with pytest.raises(ImmutableObject):
        Mine().weight = "other"
