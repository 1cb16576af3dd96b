"""PCW: every segment in a window of its own, which starts with the prefix."""

from __future__ import annotations

from itertools import accumulate
from math import log
from typing import ClassVar

from invariant_rag.arrangement import Arrangement, Layout, Span, Weighted, Weighting
from invariant_rag.methods.rows import SetBased


class ParallelWindows(SetBased):
    """PCW: each window is the prefix and one segment; tokens after the set attend to all windows (arXiv 2212.10947).

    Windows share their positions, and the suffix starts after the longest one. The published code merges the windows'
    keys and keeps one beginning-of-text token, so the suffix attends to n copies of every other token of the prefix
    (`combine_past_key_values` in AI21Labs/Parallel-Context-Windows; RoToR, arXiv 2502.08662, appendix C.1, joins the
    prefix to every segment too). The copies have the same tokens at the same positions, so their keys are equal: the
    prefix is computed and stored once, and tokens after the set count each of its keys n times, the first one once.

    The published code takes the first token of every window for the beginning of the text; a prompt without a prefix
    has none, and keeps all its tokens. With a prefix of at most one token this is `set-based`. Before a second set,
    everything counts as the prefix of its windows. An empty segment has no window.

    Cost: that of `set-based`, and the weighting, which keeps our attention while decoding. The published code prefills
    and stores n prefixes.
    """

    name: ClassVar[str] = "parallel-windows"
    paper: ClassVar[str] = "arXiv 2212.10947"
    stock_decoding: ClassVar[bool] = False

    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout attends to."""
        weighted = tuple(_copies(layout, ended) for ended in range(len(layout.texts)))
        return super().arrange(layout).weighted(weighted)


def _copies(layout: Layout, ended: int) -> Weighted:
    """Return how many copies of each key tokens after `ended` sets attend to, as weights.

    A key is copied into the windows of every set after it, and each of these copies into those of the next.
    """
    starts = [1, *(text.stop for text in layout.text_spans[:ended])]
    spans = (Span(start, text.stop) for start, text in zip(starts, layout.text_spans[:ended], strict=False))
    windows = [log(max(count, 1)) for count in layout.counts[:ended]]
    offsets = reversed([*accumulate(reversed(windows))])
    pairs = zip(spans, offsets, strict=True)
    return tuple((span, Weighting(offset=offset)) for span, offset in pairs if offset and span.stop > span.start)
