"""Every entry gives one answer for all orders of the nodes, or warns at each order, as the table in the README says.

The same entries around a plain model must give several answers: otherwise this could not tell. Three nodes are asked
about in all six orders, four in eight of 24.
"""

from __future__ import annotations

from itertools import permutations

import pytest
from asks import answer
from cases import HashingLLM, caught, report_of
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
    if entry.name in ("as it is", "`InvariantChatEngine`, `chat`") and entry.wrapper == "InvariantLLM"
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


def ask(entry: Entry, llm: LLM, order: tuple[int, ...]) -> tuple[str, str, bool | None, bool]:
    """Return the answer for an order of the nodes, what was read, the verdict, and whether a user is warned."""
    (text, response), messages = caught(answer, entry.ask, llm, entry.nodes(order))
    report = report_of(response)
    return text, repr(report), report.get("invariant"), bool(messages)


CASES = [*((title, THREE) for title in ENTRIES), *((title, FOUR) for title in OF_FOUR)]


@pytest.mark.parametrize(("title", "orders"), CASES)
def test_an_entry_is_invariant_or_warns_as_its_row_says(spoken: InvariantModel, title: str, orders: list) -> None:
    entry = ENTRIES[title]
    llm, warns = WRAPPERS[entry.wrapper](spoken), entry.expected != "yes"
    asked = [ask(entry, llm, order) for order in orders]
    answers, reports, verdicts, warned = map(set, zip(*asked, strict=True))
    assert ((len(answers) > 1), warned) == (warns, {warns}), asked
    assert warns or len(reports) == 1, "what was read is one for all orders, too"
    assert len(verdicts) == 1, asked
    assert verdicts <= {None, not warns}, "a verdict is what the row says, or there is none"
    if warns and orders is not FOUR and entry.topic not in OF_SEVERAL:
        assert not ask(entry, llm, (0,))[-1], "nobody is warned about one node"


@pytest.mark.parametrize("title", ENTRIES)
def test_a_plain_model_answers_by_the_order_and_nobody_is_warned(spoken: InvariantModel, title: str) -> None:
    entry = ENTRIES[title]
    is_local = entry.wrapper == "InvariantLLM"
    llm = local_llm(spoken.with_method("sequential", ordering="given")) if is_local else HashingLLM()
    answers, orders = set[str](), iter(THREE)
    while len(answers) < 2 and (order := next(orders, None)):
        answer, *_, warned = ask(entry, llm, order)
        answers.add(answer)
        assert not (is_local and warned)
    assert (len(answers) > 1) == (title not in UNORDERED)


def test_every_response_mode_is_an_entry_and_the_table_in_the_readme_is_current() -> None:
    assert {*WHOLE, *ONE_BY_ONE, *NO_NODES} == {mode.value for mode in ResponseMode}
    text = README.read_text(encoding="utf-8")
    assert len(PLACE.findall(text)) == 1
    assert filled(text) == text, "run `make docs`"
