"""PINE and its two ablations: bidirectional attention between segments, positions by importance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from invariant_rag.arrangement import Arrangement, Layout, Slots, Weighted, natural_positions
from invariant_rag.methods.base import Method, RowMethod

if TYPE_CHECKING:
    import torch

    from invariant_rag.attention.call import AttentionCall


@dataclass(frozen=True)
class RankedArrangement:
    """Rows that depend on the input: every head ranks the segments of a set, for each segment and each text token.

    Attributes:
        layout: Where the texts and segments lie in memory.
        reverse: Whether the most important segment is placed farthest instead of nearest.
    """

    layout: Layout
    reverse: bool = False

    @property
    def positions(self) -> tuple[int, ...]:
        """Every token at its index; queries are rotated instead of keys."""
        return natural_positions(self.layout)

    @property
    def is_plain(self) -> bool:
        """Whether this is plain causal attention: no set has more than one segment."""
        return all(len(segments) < 2 for segments in self.layout.sets)

    def keys_of_queries(self, call: AttentionCall, head: int) -> Iterator[Sequence[tuple[int, int]]]:
        """Yield what each query of a head attends to: index and position of every key, far to near, itself last."""
        ranking = _Ranking(self, call, head)
        return (ranking.row(query) for query in range(call.query_start, call.keys.shape[1]))

    def weighted_from(self, start: int) -> Weighted:
        """Return no keys: none is weighed."""
        return ()

    def far_to_near(self, importance: Sequence[float]) -> list[int]:
        """Return the segments from far to near by importance; ties keep their physical order."""
        sign = -1.0 if self.reverse else 1.0
        return sorted(range(len(importance)), key=lambda i: sign * importance[i])


class _Ranking:
    """The rows of one head, in float64: segments ranked by their importance to each query.

    Importance is softmax attention without positions, over the tokens of the other segments, summed over the queries
    and over the tokens of a segment, divided by its length (section 3.3).
    """

    def __init__(self, arrangement: RankedArrangement, call: AttentionCall, head: int) -> None:
        self._arrangement, self._query_start, self._scaling = arrangement, call.query_start, call.scaling
        self._keys = _projected(call, call.keys[head // call.num_key_value_groups], 0)
        self._queries = _projected(call, call.queries[head], call.query_start)
        self._cached: dict[tuple[int, int], list[float]] = {}

    def row(self, query: int) -> list[tuple[int, int]]:
        """Return the keys of one query, far to near: index in memory, and position in the row."""
        order: list[int] = []
        end = 0
        own_set, own = self._own(query)
        for number, spans in enumerate(self._arrangement.layout.set_spans):
            if not spans or query < spans[0].start or own_set not in (None, number):
                continue  # a set sees the sets before it as a text
            order += range(end, spans[0].start)
            inside = own if own_set == number else None
            for i in self._arrangement.far_to_near(self._importance(query, number, inside)):
                if i != inside:
                    order += range(spans[i].start, spans[i].stop)
            end = spans[-1].stop if inside is None else spans[inside].start
        order += range(end, query + 1)
        return list(zip(order, range(len(order)), strict=True))

    def _own(self, query: int) -> tuple[int | None, int | None]:
        """Return the set that holds a token, and its segment there; None and None for a token of a text."""
        for number, spans in enumerate(self._arrangement.layout.set_spans):
            for i, span in enumerate(spans):
                if span.start <= query < span.stop:
                    return number, i
        return None, None

    def _importance(self, query: int, number: int, own: int | None) -> list[float]:
        """Return the importance of each segment of a set to a token, or to its whole segment if it is in the set."""
        spans = self._arrangement.layout.set_spans[number]
        queries = [query] if own is None else list(range(spans[own].start, spans[own].stop))
        key = (queries[0], number)
        if key not in self._cached:
            total = [0.0] * len(spans)
            others = [i for i in range(len(spans)) if i != own and len(spans[i])]
            tokens = [index for i in others for index in range(spans[i].start, spans[i].stop)]
            for token in queries if tokens else ():
                scores = (self._keys[tokens] @ self._queries[token - self._query_start]) * self._scaling
                weights = dict(zip(tokens, scores.softmax(dim=0).tolist(), strict=True))
                for i in others:
                    total[i] += sum(weights[index] for index in range(spans[i].start, spans[i].stop)) / len(spans[i])
            self._cached[key] = total
        return self._cached[key]


def _projected(call: AttentionCall, x: torch.Tensor, first: int) -> torch.Tensor:
    """Return one head's queries or keys `[T, D]`, at positions `first`, `first + 1`..., without these, in float64."""
    exact = x.double()
    back = exact.new_tensor([-(first + index) for index in range(len(exact))])
    return call.rotation.unscaled(call.rotation.rotate_by(exact, back))


class PINE(Method):
    """Every segment sees all others, the most important nearest (arXiv 2407.01100, section 3.3).

    The ordering decides between equally important segments only.
    """

    name: ClassVar[str] = "pine"
    paper: ClassVar[str] = "arXiv 2407.01100"
    cost: ClassVar[str] = "attention both ways, rankings"
    fair: ClassVar[bool] = True
    stock_decoding: ClassVar[bool] = False

    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout sees."""
        return RankedArrangement(layout)


class PINEReverse(PINE):
    """Ablation: the most important segment is placed farthest (arXiv 2407.01100, section 3.4)."""

    name: ClassVar[str] = "pine-reverse"

    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout sees."""
        return RankedArrangement(layout, reverse=True)


class PINEInPlace(RowMethod):
    """Ablation: segments see all others, and no position is re-assigned (arXiv 2407.01100, section 4.3).

    In a model with a sliding window, a segment counts as standing after all others, as in PINE.
    """

    name: ClassVar[str] = "pine-in-place"
    paper: ClassVar[str] = "arXiv 2407.01100"
    cost: ClassVar[str] = "attention both ways"
    reads_later_positions: ClassVar[bool] = True
    slots: ClassVar[Slots] = "natural"

    def row(self, segment: int, count: int) -> Sequence[int]:
        """All others, then itself."""
        return [*(other for other in range(count) if other != segment), segment]
