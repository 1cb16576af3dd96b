"""Each entry of the table in README.md is invariant, or warns, as its row says.

It gives one answer for all orders of the nodes, or warns at each order. The same entries around a plain model must give
several answers: otherwise this could not tell. Three nodes are asked about in all six orders, four in eight of 24.
"""

import re
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import ORDERS, TEXTS, Recorder, report_of
from entries import ENTRIES, IDS, ONE_BY_ONE, WHOLE, answer, local_llm
from framework_cases import caught
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.llms.invariant_rag import canonical, vote

README = Path(__file__).parent.parent / "README.md"
WRAPPERS = {
    "`canonical(llm)`": lambda _: canonical(Recorder(says=str)),
    "`vote(llm)`": lambda _: vote(Recorder(says=str), votes=3),
}
"""Topics of which the entries are others, around an LLM behind an API."""


class Row(NamedTuple):
    """What the table says of an entry."""

    wrapper: str  # empty for `InvariantLLM`
    topic: str
    name: str
    warns: bool  # whether each order of the nodes has an answer of its own, and a warning; else all have one answer

    @property
    def title(self):
        return ": ".join(filter(None, self[:3]))

    def ask(self, llm, order):
        """Return the answer for an order of the nodes, what was read, the verdict, and whether a user is warned."""
        (text, response), messages = caught(answer, ENTRIES[self.topic][self.name], llm, self.nodes(order))
        says = report_of(response) or ({} if hasattr(response, "metadata") else None)  # every engine says what was read
        return text, repr(says), (says or {}).get("invariant"), bool(messages)

    def nodes(self, order):
        """Return nodes in an order, tied, as a reader of files makes them; no other entry has the same texts."""
        texts, page = (*TEXTS, "The bell of Varn rings twice a day."), zlib.crc32(self.title.encode()) % 10_000
        made = [
            TextNode(text=f"{texts[i]} See page {page}.", id_=IDS[i], metadata={"file_name": f"{IDS[i][8:]}.txt"})
            for i in order
        ]
        return [NodeWithScore(node=each, score=0.5) for each in made]


def rows():
    """Return the rows of the table, an entry each."""
    (table,) = re.findall(r"<!-- entries: .*? -->\n\n.*?\n.*?\n(.*?)\n\n<!--", README.read_text("utf-8"), re.DOTALL)
    for line in table.split("\n"):
        titles, expected, _ = line.strip("| ").split(" | ")
        topic, names = titles.split(": ", 1)
        for name in names.split("; "):
            place = (topic, *name.split(": ", 1)) if topic in WRAPPERS else ("", topic, name)
            yield Row(*place, warns={"yes": False, "no: warns": True}[expected])


TABLE = list(rows())
OF_FOUR_NODES = [tuple((start + step * i) % 4 for i in range(4)) for start in range(4) for step in (1, -1)]
CASES = [(row, ORDERS) for row in TABLE]
CASES += [
    (row, OF_FOUR_NODES)
    for row in TABLE
    if not row.wrapper and row.name in ("as it is", "`InvariantChatEngine`, `chat`")
]
NAMES = (
    "which reads no node",
    "`CitationQueryEngine`: with `InvariantSynthesizer`",
    "two answers: `InvariantPairwiseEvaluator`",
    "two answers: `PairwiseComparisonEvaluator`,",
)
"""Entries whose answer is one even from a plain model: they read no node, or put them in order themselves."""
OF_SEVERAL = ("two answers", "`LLMRerank`")
"""Entries that compare nodes: there is nothing to ask about one."""


def test_every_entry_has_a_row_and_every_response_mode_is_an_entry():
    assert sorted(each[1:3] for each in TABLE if not each.wrapper) == sorted(
        (topic, name) for topic, names in ENTRIES.items() for name in names
    )
    assert len({each.title for each in TABLE}) == len(TABLE) >= 71
    without_nodes = ["generation", "no_text", "context_only"]  # the last two ask no LLM at all
    assert {*WHOLE, *ONE_BY_ONE, *without_nodes} == {mode.value for mode in ResponseMode}


@pytest.mark.parametrize(("row", "orders"), CASES, ids=lambda given: getattr(given, "title", len(given)))
def test_an_entry_is_invariant_or_warns_as_its_row_says_and_a_plain_model_answers_by_the_order(spoken, row, orders):
    llm = WRAPPERS.get(row.wrapper, local_llm)(spoken)
    asked = [row.ask(llm, order) for order in orders]
    answers, reports, verdicts, warned = map(set, zip(*asked, strict=True))
    assert ((len(answers) > 1), warned) == (row.warns, {row.warns}), asked
    assert row.warns or len(reports) == 1, "what was read is one for all orders, too"
    assert len(verdicts) == 1, asked
    assert verdicts == {not row.warns} or reports == {"None"} or "reads no node" in row.name, "a text says nothing"
    if orders is not ORDERS:
        return
    if row.warns and not any(each in row.title for each in OF_SEVERAL):
        assert not row.ask(llm, (0,))[-1], "nobody is warned about one node"
    plain = Recorder(says=str) if row.wrapper else local_llm(spoken.with_method("sequential", ordering="given"))
    answers, others = set(), iter(ORDERS)
    while len(answers) < 2 and (order := next(others, None)):
        answer, *_, warned = row.ask(plain, order)
        answers.add(answer)
        assert not warned or row.wrapper
    assert (len(answers) > 1) != any(each in row.title for each in NAMES)
