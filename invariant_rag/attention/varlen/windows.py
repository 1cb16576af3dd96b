"""Windows: which neighbouring keys neighbouring queries attend to, for all rows of a batch. Plain integers, no tensors.

Variable-length kernels take packed queries and keys, and for each stretch of queries one window of the keys. A row of
an arrangement is a few such windows: one that ends with its own tokens, which is causal, and one for every other run of
keys, for which the queries are rotated instead of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invariant_rag.arrangement import UNWEIGHTED, Arrangement, RankedSet, Span, Weighting


@dataclass(frozen=True)
class Window:
    """Neighbouring queries, and neighbouring keys that they attend to.

    Attributes:
        queries: The queries.
        keys: The keys.
        shift: Shift of the keys. The queries are rotated by its opposite instead.
        weighting: How the keys weigh against those of other windows.
    """

    queries: Span
    keys: Span
    shift: int = 0
    weighting: Weighting = UNWEIGHTED


@dataclass(frozen=True)
class Ranked:
    """Neighbouring queries that rank the segments of one set.

    Attributes:
        queries: The queries, among those of the batch.
        set: The set, as tokens of its prompt.
        offset: Index of the first token of the prompt among the keys of the batch.
    """

    queries: Span
    set: RankedSet
    offset: int


@dataclass(frozen=True)
class Windows:
    """What all queries of a batch attend to.

    Attributes:
        causal: Windows that end with their own queries. They cover all queries, in order.
        others: Windows by *slot*: those of a slot have no query in common, and are in order.
        ranked: Ranked sets by slot: the first, second... that a query ranks.
    """

    causal: tuple[Window, ...]
    others: tuple[tuple[Window, ...], ...]
    ranked: tuple[tuple[Ranked, ...], ...]


def lay_windows(
    arrangements: Sequence[Arrangement], padding: Sequence[int], num_queries: int, num_keys: int
) -> Windows:
    """Return the windows of a left-padded batch, whose queries `[B, num_queries]` are the last of its tokens.

    Args:
        arrangements: What the tokens of each row of the batch attend to.
        padding: Tokens of padding of each row. They attend to one another, so that every query has a key.
        num_queries: Queries of each row.
        num_keys: Keys of each row.
    """
    causal: list[Window] = []
    others: list[list[Window]] = []
    ranked: list[list[Ranked]] = []
    unasked = num_keys - num_queries  # tokens of each row, padding among them, that have no query
    for number, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
        key, query = number * num_keys + padded, number * num_queries + padded - unasked
        if padded > unasked:
            causal.append(Window(Span(number * num_queries, query), Span(key - padded + unasked, key)))
        for row in arrangement.rows_from(max(0, unasked - padded), num_keys - padded):
            queries = Span(row.queries.start + query, row.queries.stop + query)
            *before, own = [
                Window(queries, Span(run.start + key, run.stop + key), run.shift, run.weighting) for run in row.runs
            ]
            causal.append(own)
            for slot, window in enumerate(before):
                others += [[]] if slot == len(others) else []
                others[slot].append(window)
            for slot, each in enumerate(row.ranked):
                ranked += [[]] if slot == len(ranked) else []
                ranked[slot].append(Ranked(queries, each, key))
    return Windows(tuple(causal), tuple(map(tuple, others)), tuple(map(tuple, ranked)))
