"""Every entry gives one answer for all orders of the nodes, or warns at each order, as the table in the README says.

The same entries around a plain model must give several answers: otherwise this could not tell. Three nodes are asked
about in all six orders, four in eight of 24.
"""

from __future__ import annotations

import warnings
from itertools import permutations

import pytest
from entries import ENTRIES
from entries_query import NO_NODES, WHOLE
from entries_table import PLACE, README, filled
from entry import CONTROLS, WRAPPERS, Entry
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from llama_index.core.llms import LLM
from llama_index.core.response_synthesizers import ResponseMode

assert ENTRIES
CASES = [pytest.param(entry, size, id=f"{title} {size}") for title, entry in ENTRIES.items() for size in entry.sizes]
OF_INVARIANT_LLM = {title: entry for title, entry in ENTRIES.items() if entry.wrapper == "InvariantLLM"}
OF_ONE_NODE = {
    title: entry
    for title, entry in ENTRIES.items()
    if entry.topic not in {"two answers", "`LLMRerank`"}  # they compare nodes
    and title != '`SegmentMarkerPostprocessor`, `response_mode=...`: `"simple_summarize"`'  # its marks are lost
}


def orders(size: int) -> list[tuple[int, ...]]:
    """Return all orders of three nodes; of four, those that begin anywhere and go on in either direction."""
    if size == 3:
        return list(permutations(range(size)))
    turned = [tuple((start + i) % size for i in range(size)) for start in range(size)]
    return [*turned, *(each[::-1] for each in turned)]


def ask(entry: Entry, llm: LLM, order: tuple[int, ...]) -> tuple[str, list[str]]:
    """Return the answer for an order of the nodes, and the warnings about order that a user sees."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = entry.answer(llm, entry.nodes(order))
    return answer, [str(each.message) for each in caught if issubclass(each.category, OrderWarning)]


@pytest.mark.parametrize(("entry", "size"), CASES)
def test_an_entry_is_invariant_or_warns_as_its_row_says(model: InvariantModel, entry: Entry, size: int) -> None:
    llm = WRAPPERS[entry.wrapper](model)
    asked = [ask(entry, llm, order) for order in orders(size)]
    distinct = len({answer for answer, _ in asked})
    warned = sum(bool(messages) for _, messages in asked)
    said = f"{distinct} distinct answers to {len(asked)} orders, {warned} with a warning: {asked[0][1]}"
    if entry.expected == "invariant":
        assert (distinct, warned) == (1, 0), said
    else:
        assert distinct > 1, said
        assert warned == len(asked), said


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_plain_model_answers_by_the_order_of_the_nodes(model: InvariantModel, entry: Entry) -> None:
    llm = CONTROLS[entry.wrapper](model)
    answers = set[str]()
    for order in permutations(range(3)):
        answers.add(ask(entry, llm, order)[0])
        if len(answers) > 1:
            break
    assert (len(answers) > 1) == entry.ordered


@pytest.mark.parametrize("entry", OF_INVARIANT_LLM.values(), ids=OF_INVARIANT_LLM)
def test_nobody_is_warned_who_chose_the_plain_model(model: InvariantModel, entry: Entry) -> None:
    _, messages = ask(entry, CONTROLS["InvariantLLM"](model), (2, 0, 1))
    assert messages == []


@pytest.mark.parametrize("entry", OF_ONE_NODE.values(), ids=OF_ONE_NODE)
def test_nobody_is_warned_about_one_node(model: InvariantModel, entry: Entry) -> None:
    _, messages = ask(entry, WRAPPERS[entry.wrapper](model), (0,))
    assert messages == []


def test_every_response_mode_is_an_entry() -> None:
    assert set(WHOLE) | NO_NODES == set(ResponseMode)


def test_the_table_in_the_readme_is_current() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(PLACE.findall(text)) == 1
    assert filled(text) == text, "run `make docs`"
