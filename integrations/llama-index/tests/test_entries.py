"""Every entry gives one answer for all orders of the nodes, or warns at each order, as the table in the README says.

The same entries around a plain model must give several answers: otherwise this could not tell. Three nodes are asked
about in all six orders where an index answers, or an LLM behind an API, and else in three; four in eight of 24.
"""

from __future__ import annotations

from itertools import permutations

import pytest
from asks import answer
from cases import HashingLLM, caught, verdict_of
from entries import ENTRIES, NO_NODES, ONE_BY_ONE, PLACE, README, WHOLE, WRAPPERS, Entry, filled
from invariant_rag import InvariantModel
from llama_index.core.llms import LLM
from llama_index.core.response_synthesizers import ResponseMode
from tiny import local_llm

THREE = list(permutations(range(3)))
FOUR = [tuple((start + step * i) % 4 for i in range(4)) for start in range(4) for step in (1, -1)]
OF_FOUR = [
    title
    for title, entry in ENTRIES.items()
    if entry.name in ("as it is", "`InvariantChatEngine`") and entry.wrapper == "InvariantLLM"
]
NAMES = (
    "which reads no node",
    "`CitationQueryEngine` with the parts of this package: `InvariantSynthesizer`",
    "two answers: `InvariantPairwiseEvaluator`",
    "two answers: `PairwiseComparisonEvaluator`,",
)
UNORDERED = {title for title in ENTRIES if any(each in title for each in NAMES)}
"""Entries whose answer is one even from a plain model: they read no node, or put them in order themselves."""
OF_SEVERAL = {"two answers", "`LLMRerank`"}
"""Topics whose entries compare nodes: there is nothing to ask about one."""


def orders_of(entry: Entry) -> list[tuple[int, ...]]:
    is_whole = entry.wrapper != "InvariantLLM" or entry.topic.startswith("`index.as_query_engine(...)`")
    return THREE if is_whole or entry.topic in OF_SEVERAL else [THREE[0], THREE[3], THREE[5]]


def ask(entry: Entry, llm: LLM, order: tuple[int, ...]) -> tuple[str, bool | None, bool]:
    """Return the answer for an order of the nodes, its verdict, and whether a user is warned about order."""
    (text, response), messages = caught(lambda: answer(entry.ask, llm, entry.nodes(order)))
    return text, verdict_of(response), bool(messages)


CASES = [*((title, orders_of(each)) for title, each in ENTRIES.items()), *((each, FOUR) for each in OF_FOUR)]


@pytest.mark.parametrize(("title", "orders"), CASES)
def test_an_entry_is_invariant_or_warns_as_its_row_says(model: InvariantModel, title: str, orders: list) -> None:
    entry = ENTRIES[title]
    llm = WRAPPERS[entry.wrapper](model)
    asked = [ask(entry, llm, order) for order in orders]
    answers, verdicts, warned = map(set, zip(*asked, strict=True))
    warns = entry.expected != "yes"
    assert ((len(answers) > 1), warned) == (warns, {warns}), asked
    assert len(verdicts) == 1, asked
    assert verdicts <= {None, not warns}, "a verdict is what the row says, or there is none"
    if warns and orders is not FOUR and entry.topic not in OF_SEVERAL:
        assert not ask(entry, llm, (0,))[2], "nobody is warned about one node"


@pytest.mark.parametrize("title", ENTRIES)
def test_a_plain_model_answers_by_the_order_and_nobody_is_warned(model: InvariantModel, title: str) -> None:
    entry = ENTRIES[title]
    is_local = entry.wrapper == "InvariantLLM"
    llm = local_llm(model.with_method("sequential", ordering="given")) if is_local else HashingLLM()
    answers = set[str]()
    for order in THREE:
        answer, _, warned = ask(entry, llm, order)
        answers.add(answer)
        assert not (is_local and warned)
        if len(answers) > 1:
            break
    assert (len(answers) > 1) == (title not in UNORDERED)


def test_every_response_mode_is_an_entry_and_the_table_in_the_readme_is_current() -> None:
    assert {*WHOLE, *ONE_BY_ONE, *NO_NODES} == {mode.value for mode in ResponseMode}
    text = README.read_text(encoding="utf-8")
    assert len(PLACE.findall(text)) == 1
    assert filled(text) == text, "run `make docs`"
