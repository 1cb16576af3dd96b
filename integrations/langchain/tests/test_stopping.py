"""Stop sequences: a stream, cut anywhere, says what the whole text says."""

from __future__ import annotations

import random

from langchain_invariant_rag.stopping import before_stop, stream_before_stop


def test_pieces_joined_are_the_text_before_the_first_stop_sequence() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choices("ab", k=chance.randrange(12)))
        stop = ["".join(chance.choices("ab", k=chance.randrange(1, 5))) for _ in range(chance.randrange(3))]
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert "".join(stream_before_stop(pieces, stop)) == before_stop(text, stop), (text, stop, pieces)


def test_text_that_cannot_begin_a_stop_sequence_is_not_held_back() -> None:
    assert next(stream_before_stop(iter(["hello "]), ["stop"])) == "hello "
