"""Chunks of one source are joined in source order."""

from itertools import permutations

import pytest

from invariant_rag.rag.text import join_chunks

SOURCE = "The ferry leaves at noon. The mill grinds barley."


@pytest.mark.parametrize(
    ("chunks", "joined"),
    [
        ([(start, SOURCE[start : start + 20]) for start in (0, 10, 20, 29)], SOURCE),  # they overlap
        ([(10, SOURCE[10:]), (0, SOURCE[:10])], SOURCE),
        ([(0, SOURCE[:9]), (12, SOURCE[12:19])], f"{SOURCE[:9]}\n{SOURCE[12:19]}"),  # a gap
        ([(0, SOURCE), (4, SOURCE[4:9]), (0, SOURCE)], SOURCE),  # one within another
        ([(0, "one two"), (4, "2 three")], "one two\n2 three"),  # texts that do not agree with their offsets
    ],
)
def test_chunks_give_back_their_source_in_any_order(chunks, joined):
    assert {join_chunks(order) for order in permutations(chunks)} == {joined}
