"""The physical orders that the published code used on the golden cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invariant_rag.orderings import Candidate, Frequency, Lexical, LexicalReversed, Ordering
from invariant_rag.segments import Segment

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "manifest.json").read_text())
ORDERINGS: dict[str, Ordering] = {
    "rotor_lexical": Lexical(),
    "rotor_revlexical": LexicalReversed(),
    "rotor_freq": Frequency(),
}
ENTRIES = [entry for entry in GOLDEN["entries"] if entry["method"] in ORDERINGS]


def test_there_are_golden_orders():
    assert {entry["method"] for entry in ENTRIES} == set(ORDERINGS)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['case']}-{entry['method']}")
def test_physical_order_is_the_published_one(entry):
    rows = GOLDEN["cases"][entry["case"]]["segs"]
    listed = [Candidate(Segment.of(row), tuple(row), None) for row in rows]
    ordering = ORDERINGS[str(entry["method"])]
    published = entry["physical_order"]
    assert isinstance(published, list)
    physical = ordering.rank(listed, "")[::-1]
    keys = ordering.sort_keys(listed, "")
    # Where keys are equal the published code falls back to the input order, and no invariant ordering can.
    assert [keys[index] for index in physical] == [keys[index] for index in published]
    if len(set(keys)) == len({tuple(row) for row in rows}):
        assert [rows[index] for index in physical] == [rows[index] for index in published]
