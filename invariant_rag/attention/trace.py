"""Attention that is measured while it is computed: what each segment, and the answer, sees of every segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch

from invariant_rag.arrangement import Layout, Span
from invariant_rag.attention.pine import ranked_parts

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement
    from invariant_rag.attention.call import AttentionCall, Backend

Distances: TypeAlias = list[list[list[float]]]
"""For each reader and each segment, the distances at which the one sees the other."""


@dataclass(frozen=True)
class Sight:
    """How one reader sees one segment, over all layers, heads and tokens of the reader.

    Attributes:
        attention: Mean share of the reader's attention that goes to the segment.
        layers: Share of the layers in which any does.
        distances: From the last token of the reader to the last one of the segment, in positions; negative where the
            segment lies behind the reader. One value for methods with one rule; for PINE one for every layer and head.
            Empty if the segment is not seen.
    """

    attention: float
    layers: float
    distances: tuple[float, ...]

    @property
    def distance(self) -> float | None:
        """The mean distance; None if the segment is not seen."""
        return sum(self.distances) / len(self.distances) if self.distances else None


class TracingBackend:
    """A backend that computes with another one, and keeps what each reader sees in every layer.

    The readers are the segments, in memory order, and then the answer: the last token of the prompt and the tokens
    after it. Attention is linear in the values, so with indicators of the segments as values, any arrangement of any
    method returns how much of its attention each segment gets.

    Args:
        backend: What computes.
        layout: That of the one prompt in the batch.
    """

    name: ClassVar[str] = "tracing"
    reads_together: ClassVar[bool] = False

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self._backend, self._layout = backend, layout
        self._segments = [*chain.from_iterable(layout.set_spans)]
        self._attention: list[torch.Tensor] = []
        self._distances: list[Distances] = []

    def attend(self, arrangement: Arrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]`, and keep distances and shares of attention."""
        if not self._distances or any(row.ranked for row in arrangement.rows):  # else the same in every layer
            self._distances.append(self._distances_in(arrangement, call))
        return self._measure(call, partial(self._backend.attend, arrangement))

    def sights(self) -> list[list[Sight]]:
        """Return for each reader how it sees each segment, after a forward pass."""
        attention = torch.stack(self._attention)
        shares, layers = attention.mean(dim=0).tolist(), (attention > 0).double().mean(dim=0).tolist()

        def sight(reader: int, segment: int) -> Sight:
            distances = chain.from_iterable(known[reader][segment] for known in self._distances)
            return Sight(shares[reader][segment], layers[reader][segment], tuple(distances))

        return [[sight(reader, each) for each in range(len(self._segments))] for reader in range(len(shares))]

    def _measure(self, call: AttentionCall, attend: Callable[[AttentionCall], torch.Tensor]) -> torch.Tensor:
        count, width = len(self._segments), call.values.shape[-1]
        owners = torch.full((call.keys.shape[1],), count, device=call.keys.device)
        for index, span in enumerate(self._segments):
            owners[span.start : span.stop] = index
        indicators = torch.nn.functional.one_hot(owners, count + 1)[:, :count].to(call.values)
        shares = []
        for some in indicators.split(width, dim=1):  # values of the layer's own width, which any kernel takes
            values = torch.nn.functional.pad(some, (0, width - some.shape[1])).expand(len(call.values), -1, -1)
            out = attend(replace(call, values=values.contiguous(), dropout=0.0, scratch={}))
            shares.append(out[..., : some.shape[1]].double().mean(dim=0))
        weights = torch.cat(shares, dim=-1)
        readers = [*self._segments, Span(self._layout.length - 1, call.keys.shape[1])]
        nothing = weights.new_zeros(count)
        means = [weights[span.start : span.stop].mean(dim=0) if len(span) else nothing for span in readers]
        self._attention.append(torch.stack(means).cpu())
        return attend(call)

    def _distances_in(self, arrangement: Arrangement, call: AttentionCall) -> Distances:
        """Return for each reader and each segment the distances; none where it is not seen."""
        positions, last = arrangement.positions, self._layout.length - 1
        numbers = {span: number for number, span in enumerate(self._segments) if len(span)}
        readers = [*((number, span.stop - 1) for span, number in numbers.items()), (len(self._segments), last)]
        found: Distances = [[[] for _ in self._segments] for _ in (*self._segments, None)]
        for row in arrangement.rows_from(0, call.keys.shape[1]):
            for reader, token in readers:
                if row.queries.start <= token < row.queries.stop:
                    runs = [*row.runs[:-1], row.part(row.queries.start, token + 1).runs[-1]]
                    for run, (span, number) in product(runs, numbers.items()):
                        if run.start < span.stop <= run.stop:
                            away = positions[token] - positions[span.stop - 1] - run.shift
                            found[reader][number].append(float(away))
            for part, shifts in ranked_parts(call, row) if row.ranked else ():
                is_segment = row.ranked[0].own is not None
                if not is_segment and part.queries.stop <= last:
                    continue  # a text before the answer
                reader, token = (numbers[row.queries], row.queries.stop - 1) if is_segment else readers[-1]
                asked = slice(None if is_segment else max(0, last - part.queries.start), None)
                for each, shift in zip(row.ranked, shifts, strict=True):
                    for index, span in enumerate(each.segments):
                        distances = token - (span.stop - 1) - shift[:, asked, index]
                        found[reader][numbers[span]] += [] if index == each.own else distances.flatten().tolist()
        return found
