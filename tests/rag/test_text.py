"""Chunks of one source are joined in source order."""

from __future__ import annotations

from itertools import permutations

from invariant_rag.rag.text import join_chunks

SOURCE = "The ferry leaves at noon. The mill grinds barley."


def test_overlapping_chunks_give_back_their_source_in_any_order() -> None:
    chunks = [(start, SOURCE[start : start + 20]) for start in (0, 10, 20, 29)]
    assert {join_chunks(order) for order in permutations(chunks)} == {SOURCE}


def test_neighbours_are_joined_as_they_were_and_gaps_are_separated() -> None:
    assert join_chunks([(10, SOURCE[10:]), (0, SOURCE[:10])]) == SOURCE
    assert join_chunks([(0, SOURCE[:9]), (12, SOURCE[12:19])]) == f"{SOURCE[:9]}\n{SOURCE[12:19]}"


def test_a_chunk_within_another_is_not_repeated() -> None:
    assert join_chunks([(0, SOURCE), (4, SOURCE[4:9]), (0, SOURCE)]) == SOURCE


def test_texts_that_do_not_agree_with_their_offsets_are_kept_whole() -> None:
    assert join_chunks([(0, "one two"), (4, "2 three")]) == "one two\n2 three"
