"""Graph-KV: segments in parallel, but a segment reads those that it builds on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.arrangement import Layout, RowArrangement, Span, arrange_views, shared_positions
from invariant_rag.methods.base import Method


class GraphKV(Method):
    """A segment with `Segment.sources` sees these; segments without read in parallel (arXiv 2506.07334, section 3.1).

    Sources share a range of positions, and segments that have sources share the range after it. The suffix starts after
    both and sees everything. A source always gives its own keys, computed without sources. So one that has sources
    itself lies in memory twice: once as a source, and once as a reader.

    Without sources this is `set-based`. As in every method here, segments see the text before their set; the
    published code hides it from them. It asks for a model that was trained on segments in parallel.
    """

    name: ClassVar[str] = "graph-kv"
    paper: ClassVar[str] = "arXiv 2506.07334"
    cost: ClassVar[str] = "less than plain"
    fair: ClassVar[bool] = True

    def drafts(self, sources: Sequence[Sequence[int]]) -> Sequence[int]:
        """Segments that have sources and are one themselves."""
        used = {index for each in sources for index in each}
        return [index for index, each in enumerate(sources) if each and index in used]

    def arrange(self, layout: Layout) -> RowArrangement:
        """Return which keys every token of a prompt with this layout sees."""
        readers: list[list[int]] = []
        views: list[list[list[Span]]] = []
        for number, segments in enumerate(layout.set_spans):
            sources = layout.sources_of(number)
            given = dict(enumerate(segments)) | dict(zip(self.drafts(sources), layout.draft_spans[number], strict=True))
            readers.append([index for index, each in enumerate(sources) if each])
            views.append([[given[source] for source in each] for each in sources])
        return arrange_views(layout, views, shared_positions(layout, readers))
