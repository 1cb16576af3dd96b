"""Every entry gives one answer for all orders of the nodes, or warns at each order.

The same entries around a plain model must give several answers: otherwise this could not tell.
"""

from __future__ import annotations

import warnings
from itertools import permutations

import pytest
from entries import ENTRIES
from entry import CONTROLS, WRAPPERS, Entry, nodes_in
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from llama_index.core.llms import LLM

assert ENTRIES


def answer(entry: Entry, llm: LLM, order: tuple[int, ...]) -> tuple[str, list[OrderWarning]]:
    """Return the answer for an order, and the warnings that its user sees."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = entry.answer(llm, nodes_in(order))
    return said, [each.message for each in caught if isinstance(each.message, OrderWarning)]


CASES = [pytest.param(entry, size, id=f"{name} {size}") for name, entry in ENTRIES.items() for size in entry.sizes]


@pytest.mark.parametrize(("entry", "size"), CASES)
def test_an_entry_is_invariant_or_warns_as_its_row_says(model: InvariantModel, entry: Entry, size: int) -> None:
    llm = WRAPPERS[entry.wrapper](model)
    seen = [answer(entry, llm, order) for order in permutations(range(size))]
    distinct = len({said for said, _ in seen})
    warned = sum(bool(found) for _, found in seen)
    if entry.expected == "invariant":
        assert (distinct, warned) == (1, 0), next((found[0] for _, found in seen if found), "no warning")
    else:
        assert distinct > 1
        assert warned == len(seen)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_plain_model_answers_by_order_where_the_row_depends_on_the_model(model: InvariantModel, entry: Entry) -> None:
    llm = CONTROLS[entry.wrapper](model)
    distinct = set[str]()
    for order in permutations(range(3)):
        distinct.add(answer(entry, llm, order)[0])
        if len(distinct) > 1:
            break
    assert (len(distinct) > 1) == entry.ordered
