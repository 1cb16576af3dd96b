"""PINE's attention: every head ranks the segments by importance, for each segment and each text token (section 3.3).

Instead of rotating the keys of a segment to its ranked position, the queries are rotated by the opposite shift, once
per segment, so keys are never copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from invariant_rag.arrangement import Layout, Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.kernels import masked_softmax_values
from invariant_rag.attention.merge_states import AttentionState, can_split
from invariant_rag.attention.tiles import (
    Tiles,
    attend_block,
    attend_to_segments,
    attend_to_tiles,
    attend_token,
    is_short,
    make_tiles,
)

if TYPE_CHECKING:
    from invariant_rag.methods.pine import RankedArrangement

_QUERY_BLOCK = 128  # queries per call, to limit the memory of float32 scores against all keys of a set
_CPU_SCORES = 1 << 21  # scores per call on a CPU: more leave its cache, and fewer wait for the slowest thread


@dataclass(frozen=True)
class _Spans:
    """Where the segments of a set lie, as tensors: without them, N segments would take N² steps of Python.

    Attributes:
        starts: Memory index of the first token of each segment `[N]`.
        lengths: `[N]`.
        divisors: The same as floats, and 1 for empty segments `[N]`.
        are_short: Whether tiles are faster for them.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    divisors: torch.Tensor
    are_short: bool

    @classmethod
    def of(cls, layout: Layout, call: AttentionCall, number: int) -> _Spans:
        """Return those of one set, cached per prompt and layer."""
        spans, device = layout.set_spans[number], call.keys.device
        known: _Spans = _kept(
            call,
            f"spans {number}",
            lambda: cls(
                torch.tensor([span.start for span in spans], device=device),
                torch.tensor([len(span) for span in spans], device=device),
                torch.tensor([float(len(span) or 1) for span in spans], device=device),
                any(map(len, spans)) and is_short(spans),
            ),
        )
        return known

    def means(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the mean weight of each segment `[H, Q, N]` from weights of tokens `[H, Q, T]`; 0 for an empty one."""
        rows = weights.flatten(0, 1)
        lengths = self.lengths.expand(len(rows), -1)
        sums = torch.segment_reduce(rows, "sum", lengths=lengths, axis=1, unsafe=True)
        return sums.view(*weights.shape[:-1], -1) / self.divisors


@dataclass(frozen=True)
class RankedView:
    """The keys that a block of consecutive queries attends to, in addition to causal attention within the block.

    Attributes:
        block: The queries.
        texts: Spans of keys with a shift that is the same for all heads.
        sets: Index of each set, and the shifts of its segments `[H, Q or 1, N]`.
        own: If the block is a segment of the last set, its index; None for a block of a text.
    """

    block: Span
    texts: list[tuple[Span, int]] = field(default_factory=list)
    sets: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    own: int | None = None


def attend_ranked(arrangement: RankedArrangement, call: AttentionCall) -> torch.Tensor:
    """Return `[H, Q, D_v]`, where each segment and each text token sees the segments ranked by importance to it.

    Importance is computed from queries and keys as they are projected, without rotary positions and their attention
    factor, in float32, over the tokens of the other segments.
    """
    out = call.new_output()
    for view in ranked_views(arrangement, call):
        block = slice(view.block.start - call.query_start, view.block.stop - call.query_start)
        out[:, block] = _attend(arrangement.layout, call, view)
    return out


def ranked_views(arrangement: RankedArrangement, call: AttentionCall) -> Iterator[RankedView]:
    """Yield what every block of the call's queries sees: blocks of the texts, and each segment as a whole."""
    layout = arrangement.layout
    for number, text in enumerate(layout.text_spans):
        stop = call.keys.shape[1] if number == len(layout.sets) else text.stop  # with generated tokens
        for start in range(max(text.start, call.query_start), stop, _QUERY_BLOCK):
            yield _text_view(arrangement, call, Span(start, min(start + _QUERY_BLOCK, stop)), number)
        if number == len(layout.sets) or call.query_start > text.stop:
            continue
        for own, segment in enumerate(layout.set_spans[number]):
            if len(segment):
                yield _segment_view(arrangement, call, number, own)


def _text_view(arrangement: RankedArrangement, call: AttentionCall, block: Span, number: int) -> RankedView:
    """Return the view of tokens of the text after `number` sets: sets ranked per token, texts at their positions."""
    view, end = RankedView(block), 0
    for index, spans in enumerate(arrangement.layout.set_spans[:number]):
        if not spans:
            continue
        view.texts.append((Span(end, spans[0].start), 0))
        weights = torch.softmax(_unrotated_scores(arrangement.layout, call, block, index), dim=-1)
        places = _Spans.of(arrangement.layout, call, index)
        starts = _starts(arrangement, places, places.means(weights))
        view.sets.append((index, starts - places.starts))
        end = spans[-1].stop
    view.texts.append((Span(end, block.start), 0))
    return view


def _segment_view(arrangement: RankedArrangement, call: AttentionCall, number: int, own: int) -> RankedView:
    """Return the view of a segment: the other segments of its set, ranked for the whole segment, then itself."""
    spans = arrangement.layout.set_spans[number]
    segment, first = spans[own], spans[0].start
    places = _Spans.of(arrangement.layout, call, number)
    starts = _starts(arrangement, places, _importance_to(arrangement.layout, call, number, own), last=own)
    own_shift = spans[-1].stop - len(segment) - segment.start
    shifts = starts - places.starts - own_shift
    return RankedView(segment, [(Span(0, first), -own_shift)], [(number, shifts)], own)


@torch.no_grad()  # ranks have no gradient
def _importance_to(layout: Layout, call: AttentionCall, number: int, own: int) -> torch.Tensor:
    """Return the importance of each segment of a set to one of them `[H, 1, N]`; the entry of itself is undefined."""
    spans = layout.set_spans[number]
    segment, first = spans[own], spans[0].start
    keys = _unrotated_keys(layout, call)[:, first : spans[-1].stop]
    queries = _unrotated_queries(call, segment).unflatten(0, (len(keys), -1))
    key_heads, groups, count, _ = queries.shape
    total = keys.new_zeros(key_heads, groups, keys.shape[1])
    if count == keys.shape[1]:
        return _Spans.of(layout, call, number).means(total.flatten(0, 1)[:, None])  # the other segments are empty
    block = _QUERY_BLOCK
    if keys.device.type == "cpu":
        block = _even_share(count, max(8, _CPU_SCORES // (len(call.queries) * keys.shape[1])))
    buffer = keys.new_empty(len(call.queries) * min(block, count) * keys.shape[1])
    for start in range(0, count, block):
        reading = queries[:, :, start : start + block]
        shape = (*reading.shape[:3], keys.shape[1])
        weights = buffer[: math.prod(shape)].view(key_heads, -1, keys.shape[1])
        torch.bmm(reading.flatten(1, 2), keys.transpose(1, 2), out=weights)
        weights[..., segment.start - first : segment.stop - first] = float("-inf")
        torch.softmax(weights, dim=-1, out=weights)
        total += weights.view(shape).sum(dim=2)
    return _Spans.of(layout, call, number).means(total.flatten(0, 1)[:, None])


def _even_share(count: int, most: int) -> int:
    """Return how many of `count` to take at a time, at most `most` and as evenly as possible."""
    return math.ceil(count / math.ceil(count / most))


def _unrotated_keys(layout: Layout, call: AttentionCall) -> torch.Tensor:
    """Return the keys of everything before the last text as they are projected, in float32; cached per layer."""
    if "unrotated_keys" not in call.scratch:
        end = layout.text_spans[-1].start
        positions = torch.arange(end, device=call.keys.device)
        unrotated = call.rotation.rotate_each(call.keys[:, :end], -positions, _reach(call))
        call.scratch["unrotated_keys"] = call.rotation.unscaled(unrotated)
    keys: torch.Tensor = call.scratch["unrotated_keys"]
    return keys


def _unrotated_queries(call: AttentionCall, queries: Span) -> torch.Tensor:
    """Return queries `[H, Q, D]` as they are projected, times the factor on the scores, in float32."""
    rotated = call.queries[:, queries.start - call.query_start : queries.stop - call.query_start]
    positions = torch.arange(queries.start, queries.stop, device=rotated.device)
    unrotated = call.rotation.rotate_each(rotated, -positions, _reach(call))
    return call.rotation.unscaled(unrotated) * call.scaling


def _unrotated_scores(layout: Layout, call: AttentionCall, queries: Span, number: int) -> torch.Tensor:
    """Return scaled scores `[H, Q, T]` of queries against the tokens of a set, without rotary positions, in float32."""
    spans = layout.set_spans[number]
    keys = _unrotated_keys(layout, call)[:, spans[0].start : spans[-1].stop]
    unrotated = _unrotated_queries(call, queries)
    packed = unrotated.reshape(keys.shape[0], -1, keys.shape[-1])
    # For one token, keys are the left factor; see `attend_token`.
    scores = (keys @ packed.mT).mT if len(queries) == 1 else packed @ keys.mT
    return scores.reshape(*unrotated.shape[:2], -1)


def _starts(
    arrangement: RankedArrangement, places: _Spans, importance: torch.Tensor, last: int | None = None
) -> torch.Tensor:
    """Return the start position of each segment after ranking by importance; both `[H, Q, N]`."""
    rank = -importance if arrangement.reverse else importance.clone()
    if last is not None:
        rank[..., last] = float("inf")
    far_to_near = torch.sort(rank, dim=-1, stable=True).indices  # ties in physical order
    lengths = places.lengths[far_to_near]
    starts = lengths.cumsum(dim=-1) - lengths + places.starts[0]
    return torch.empty_like(starts).scatter_(-1, far_to_near, starts)


def _attend(layout: Layout, call: AttentionCall, view: RankedView) -> torch.Tensor:
    """Return the attention output of a view's block `[H, Q, D_v]`."""
    if not can_split(call, call.keys.shape[1]):
        return _attend_with_mask(layout, call, view)
    reach = _reach(call)
    sets = [(number, shifts) for number, shifts in view.sets if any(layout.sets[number])]
    can_be_one = len(sets) == len(view.sets) and not any(_Spans.of(layout, call, each).are_short for each, _ in sets)
    if can_be_one and _is_last_token(call, view):
        *texts, (last, _) = view.texts
        ranked = [(layout.set_spans[number], shifts) for number, shifts in sets]
        return attend_token(call, [*texts, (Span(last.start, view.block.stop), 0)], ranked, reach)
    alone = view.own is not None and sum(map(bool, layout.sets[sets[-1][0]])) == 1
    others = [] if alone else [_from_set(layout, call, number, shifts, reach, view.own) for number, shifts in sets]
    return attend_block(call, view.block, view.texts, others)


def _is_last_token(call: AttentionCall, view: RankedView) -> bool:
    """Return whether a view is that of the last token of all, in a precision in which scores may be rounded."""
    is_exact = call.queries.dtype in (torch.float32, torch.float64)
    return is_exact and view.own is None and view.block == Span(call.keys.shape[1] - 1, call.keys.shape[1])


def _from_set(
    layout: Layout, call: AttentionCall, number: int, shifts: torch.Tensor, reach: int, own: int | None
) -> Callable[[torch.Tensor, slice], AttentionState]:
    """Return a function of queries, and their slice of the block, that attends to a set.

    The shifts `[H, Q, N]` are those of each token of the block; `[H, 1, N]` are those of the segment `own`.
    """
    spans = layout.set_spans[number]

    def attend(queries: torch.Tensor, where: slice) -> AttentionState:
        part = shifts if own is not None else shifts[:, where]
        if not _Spans.of(layout, call, number).are_short:
            keys = _kept(
                call, f"paired {number}", lambda: call.rotation.pair(call.keys[:, spans[0].start : spans[-1].stop])
            )
            return attend_to_segments(call, queries, keys, spans, part, reach, own)
        tiles: Tiles = _kept(call, f"tiles {number}", lambda: make_tiles(call, spans))
        return attend_to_tiles(call, queries, tiles if own is None else tiles.without(own), part, reach)

    return attend


def _kept(call: AttentionCall, name: str, make: Callable[[], Any]) -> Any:
    """Return a value that is made once per prompt and layer."""
    if name not in call.scratch:
        call.scratch[name] = make()
    return call.scratch[name]


def _attend_with_mask(layout: Layout, call: AttentionCall, view: RankedView) -> torch.Tensor:
    """Return the attention output of a view's block with one masked softmax, for layers whose keys cannot be split."""
    queries = view.block
    block = call.queries[:, queries.start - call.query_start : queries.stop - call.query_start]
    parts: list[tuple[Span, torch.Tensor | int]] = [*view.texts]
    for number, shifts in view.sets:
        spans = enumerate(layout.set_spans[number])
        parts += [(span, shifts[..., j]) for j, span in spans if number != view.sets[-1][0] or j != view.own]
    query_index = torch.arange(queries.start, queries.stop, device=block.device)
    scores, masks, values = [], [], []
    for keys, shift in [*parts, (queries, 0)]:
        if not len(keys):
            continue
        if isinstance(shift, int):
            rotated = call.rotation.rotate(block, -shift)
        else:
            rotated = call.rotation.rotate_each(block, -shift.expand(block.shape[:2]), _reach(call)).to(block.dtype)
        key_states = call.keys[:, keys.start : keys.stop]
        packed = rotated.reshape(key_states.shape[0], -1, key_states.shape[-1])
        scores.append((packed @ key_states.transpose(1, 2)).reshape(*block.shape[:2], -1) * call.scaling)
        distance = query_index[:, None] - torch.arange(keys.start, keys.stop, device=block.device)
        distance = (distance - shift)[None] if isinstance(shift, int) else distance[None] - shift[..., None]
        mask = distance >= 0 if keys is queries else torch.ones_like(distance, dtype=torch.bool)
        mask = mask if call.sliding_window is None else mask & (distance < call.sliding_window)
        masks.append(mask.expand(block.shape[0], len(queries), -1))
        values.append(call.values[:, keys.start : keys.stop])
    return masked_softmax_values(call, torch.cat(scores, dim=-1), torch.cat(values, dim=1), torch.cat(masks, dim=-1))


def _reach(call: AttentionCall) -> int:
    """Return a bound on all shifts: twice the number of tokens, since queries and keys may both be shifted.

    Rounded up to a multiple of 512, so that the rotation tables are rarely rebuilt while decoding.
    """
    return 2 * 256 * -(-call.keys.shape[1] // 256)
