"""Structured Prompting: right-aligned groups, and a test input that counts as often as there are groups."""

from __future__ import annotations

import sys
from itertools import accumulate, pairwise
from math import log
from typing import ClassVar

from invariant_rag.arrangement import Arrangement, Layout, Span, Weighted, Weighting, shared_positions
from invariant_rag.methods.rows import SetBased


class Structured(SetBased):
    """Right-aligned segments, jointly attended with rescaled attention (arXiv 2212.06713, section 3).

    The segments of a set end at the same position, so that each of them is next to what follows, whatever its length;
    the prefix, in the paper a beginning-of-text token, keeps its positions and is shared. Tokens after a set of n
    segments count the keys after the set, generated ones included, n times; the keys of the prefix and of the segments
    count once (`multihead_attention.py` and `make_positions` in microsoft/LMOps, structured_prompting).

    Cost: as `set-based`, but decoding keeps our attention, and cached keys of a segment serve in the same set only,
    because its distance from the prefix depends on the longest segment.
    """

    name: ClassVar[str] = "structured"
    paper: ClassVar[str] = "arXiv 2212.06713"
    context_free_segments: ClassVar[bool] = False
    stock_decoding: ClassVar[bool] = False

    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout attends to."""
        weighted = tuple(_rescaled(layout, ended) for ended in range(len(layout.texts)))
        rows = super().arrange(layout).weighted(weighted).rows
        return Arrangement(layout, rows, shared_positions(layout, align="right"))


def _rescaled(layout: Layout, ended: int) -> Weighted:
    """Return how often tokens after `ended` sets count the keys behind each of these sets, as weights."""
    starts = [*(text.start for text in layout.text_spans[1 : ended + 1]), sys.maxsize]  # generated tokens have no end
    offsets = accumulate(log(max(count, 1)) for count in layout.counts[:ended])
    pairs = zip(pairwise(starts), offsets, strict=True)
    return tuple((Span(*span), Weighting(offset=offset)) for span, offset in pairs if offset)
