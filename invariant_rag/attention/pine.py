"""PINE's attention: every head and every reader ranks the segments by importance (PINE, section 3.3).

Keys stay where they lie. A segment that a reader sees elsewhere is a constant rotation away, and it is the query that
is turned, once per segment, so no reader has a copy of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from invariant_rag.arrangement import Layout, Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.kernels import weigh
from invariant_rag.attention.merge_states import Part, can_split
from invariant_rag.attention.tiles import Tiles, attend_ranked, attend_to_others, attend_to_tiles, cut

if TYPE_CHECKING:
    from invariant_rag.methods.pine import ImportanceArrangement

_BLOCK = 128  # tokens at a time: each holds scores against every key of a set in float32
_CACHED = 128  # the same, over the heads that share keys, where the scores are to stay in a processor's cache


@dataclass(frozen=True)
class _View:
    """What neighbouring tokens see before themselves; themselves they see causally, where they lie.

    Attributes:
        block: The tokens.
        texts: Keys that all heads see alike, and at which shift.
        sets: Number of a set, and how far later than they lie its segments are seen: `[H, Q or 1, N]`.
        own: The segment of the last set that the tokens are; None for tokens of a text.
    """

    block: Span
    texts: list[tuple[Span, int]] = field(default_factory=list)
    sets: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    own: int | None = None


def attend_by_importance(arrangement: ImportanceArrangement, call: AttentionCall) -> torch.Tensor:
    """Return `[H, Q, D_v]`: who reads, a segment or a single token of a text, sees segments by importance to it.

    Importance is computed without rotary position, in float32, over the tokens of the other segments.
    """
    layout = arrangement.layout
    out = call.empty()

    def fill(view: _View) -> None:
        block = view.block
        out[:, block.start - call.first : block.stop - call.first] = _attend(layout, call, view)

    for number, text in enumerate(layout.text_spans):
        stop = call.keys.shape[1] if number == len(layout.sets) else text.stop  # generated tokens join the last text
        for start in range(max(text.start, call.first), stop, _BLOCK):
            fill(_text_view(arrangement, call, Span(start, min(start + _BLOCK, stop)), number))
        if number == len(layout.sets) or call.first > text.stop:
            continue
        for own, segment in enumerate(layout.set_spans[number]):
            if len(segment):
                fill(_segment_view(arrangement, call, number, own))
    return out


def _text_view(arrangement: ImportanceArrangement, call: AttentionCall, block: Span, number: int) -> _View:
    """What tokens of the text behind `number` sets see: every set ranked for each token, texts where they lie."""
    view, reached = _View(block), 0
    for index, spans in enumerate(arrangement.layout.set_spans[:number]):
        if not spans:
            continue
        view.texts.append((Span(reached, spans[0].start), 0))
        weights = torch.softmax(_bare_scores(arrangement.layout, call, block, index), dim=-1)
        starts = _starts(arrangement, spans, _per_segment(weights, spans))
        view.sets.append((index, starts - _naturally(spans, starts)))
        reached = spans[-1].stop
    view.texts.append((Span(reached, block.start), 0))
    return view


def _segment_view(arrangement: ImportanceArrangement, call: AttentionCall, number: int, own: int) -> _View:
    """What a segment sees: the other segments of its set ranked for the whole segment, itself last."""
    spans = arrangement.layout.set_spans[number]
    segment, first = spans[own], spans[0].start
    starts = _starts(arrangement, spans, _importance_to(arrangement.layout, call, number, own), last=own)
    moved = spans[-1].stop - len(segment) - segment.start
    shifts = starts - _naturally(spans, starts) - moved
    return _View(segment, [(Span(0, first), -moved)], [(number, shifts)], own)


def _importance_to(layout: Layout, call: AttentionCall, number: int, own: int) -> torch.Tensor:
    """Importance of every segment of a set to one of them: `[H, 1, N]`, its own without meaning."""
    spans = layout.set_spans[number]
    segment, first = spans[own], spans[0].start
    total = call.queries.new_zeros(call.queries.shape[0], 1, spans[-1].stop - first, dtype=torch.float32)
    if len(segment) == total.shape[-1]:
        return _per_segment(total, spans)  # with no other token there is nothing to share out
    on_cpu = total.device.type == "cpu"
    together = call.groups if on_cpu else total.shape[0]  # heads; few scores at a time stay in a processor's cache
    block = max(8, _CACHED // call.groups) if on_cpu else _BLOCK
    for start in range(segment.start, segment.stop, block):
        asking = Span(start, min(start + block, segment.stop))
        for head in range(0, total.shape[0], together):
            heads = slice(head, head + together)
            scores = _bare_scores(layout, call, asking, number, heads)
            scores[..., segment.start - first : segment.stop - first] = float("-inf")
            total[heads] += torch.softmax(scores, dim=-1).sum(dim=1, keepdim=True)
    return _per_segment(total, spans)


def _bare_keys(layout: Layout, call: AttentionCall) -> torch.Tensor:
    """Keys of everything before the last text, without rotary position, in float32."""
    if "bare_keys" not in call.memory:
        end = layout.text_spans[-1].start
        positions = torch.arange(end, device=call.keys.device)
        call.memory["bare_keys"] = call.rotation.rotate_each(call.keys[:, :end], -positions, _reach(call))
    keys: torch.Tensor = call.memory["bare_keys"]
    return keys


def _bare_scores(
    layout: Layout, call: AttentionCall, queries: Span, number: int, heads: slice = slice(None)
) -> torch.Tensor:
    """Scaled scores `[H, Q, T]` of the queries against every token of a set, without rotary position, in float32.

    The heads are all, or some with all that share their keys.
    """
    spans, first, last = layout.set_spans[number], *heads.indices(call.queries.shape[0])[:2]
    kept = slice(first // call.groups, last // call.groups)
    keys = _bare_keys(layout, call)[kept, spans[0].start : spans[-1].stop]
    positions = torch.arange(queries.start, queries.stop, device=keys.device)
    asked = call.queries[heads, queries.start - call.first : queries.stop - call.first]
    bare = call.rotation.rotate_each(asked, -positions, _reach(call)) * call.scaling
    return (bare.reshape(keys.shape[0], -1, keys.shape[-1]) @ keys.transpose(1, 2)).reshape(*bare.shape[:2], -1)


def _per_segment(weights: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
    """Mean of the weights `[H, Q, T]` over the tokens of each segment: `[H, Q, N]`. An empty segment has none."""
    parts = weights.split([len(span) for span in spans], dim=-1)
    return torch.stack([part.sum(dim=-1) / max(part.shape[-1], 1) for part in parts], dim=-1)


def _naturally(spans: tuple[Span, ...], like: torch.Tensor) -> torch.Tensor:
    """Where the segments lie `[N]`."""
    return torch.tensor([span.start for span in spans], device=like.device)


def _starts(
    arrangement: ImportanceArrangement, spans: tuple[Span, ...], importance: torch.Tensor, last: int | None = None
) -> torch.Tensor:
    """Positions `[H, Q, N]` at which the segments start once they are ranked by importance `[H, Q, N]`."""
    rank = -importance if arrangement.reverse else importance.clone()
    if last is not None:
        rank[..., last] = float("inf")
    far_to_near = torch.sort(rank, dim=-1, stable=True).indices  # ties stay in physical order
    lengths = torch.tensor([len(span) for span in spans], device=rank.device)[far_to_near]
    starts = lengths.cumsum(dim=-1) - lengths + spans[0].start
    return torch.empty_like(starts).scatter_(-1, far_to_near, starts)


def _attend(layout: Layout, call: AttentionCall, view: _View) -> torch.Tensor:
    """Return `[H, Q, D_v]` for the tokens of a view."""
    if not can_split(call, call.keys.shape[1]):
        return _attend_at_once(layout, call, view)
    reach, sets = _reach(call), []
    for number, shifts in view.sets:
        if not any(layout.sets[number]):
            continue
        if view.own is None:
            sets.append(_from_tokens(call, _tiles(layout, call, number), shifts, reach))
        elif sum(map(bool, layout.sets[number])) > 1:
            sets.append(
                _from_segment(call, layout.set_spans[number], _tiles(layout, call, number), shifts, reach, view.own)
            )
    return attend_ranked(call, view.block, view.texts, sets)


def _from_tokens(
    call: AttentionCall, tiles: Tiles, shifts: torch.Tensor, reach: int
) -> Callable[[torch.Tensor, slice], Part]:
    return lambda queries, where: attend_to_tiles(call, queries, tiles, shifts[:, where], reach)


def _from_segment(
    call: AttentionCall, spans: tuple[Span, ...], tiles: Tiles, shifts: torch.Tensor, reach: int, own: int
) -> Callable[[torch.Tensor, slice], Part]:
    return lambda queries, _: attend_to_others(call, queries, spans, tiles, shifts, reach, own)


def _tiles(layout: Layout, call: AttentionCall, number: int) -> Tiles:
    """The tiles of a set, cut once per prompt and layer."""
    name = f"tiles {number}"
    if name not in call.memory:
        call.memory[name] = cut(call, layout.set_spans[number])
    tiles: Tiles = call.memory[name]
    return tiles


def _attend_at_once(layout: Layout, call: AttentionCall, view: _View) -> torch.Tensor:
    """Attend with a score for every key, for layers that do more to scores than a softmax."""
    queries = view.block
    own = call.queries[:, queries.start - call.first : queries.stop - call.first]
    pieces: list[tuple[Span, torch.Tensor | int]] = [*view.texts]
    for number, shifts in view.sets:
        spans = enumerate(layout.set_spans[number])
        pieces += [(span, shifts[..., j]) for j, span in spans if number != view.sets[-1][0] or j != view.own]
    query_index = torch.arange(queries.start, queries.stop, device=own.device)
    scores, seen, values = [], [], []
    for keys, shift in [*pieces, (queries, 0)]:
        if not len(keys):
            continue
        if isinstance(shift, int):
            turned = call.rotation.rotate(own, -shift)
        else:
            turned = call.rotation.rotate_each(own, -shift.expand(own.shape[:2]), _reach(call)).to(own.dtype)
        group = call.keys[:, keys.start : keys.stop]
        packed = turned.reshape(group.shape[0], -1, group.shape[-1])
        scores.append((packed @ group.transpose(1, 2)).reshape(*own.shape[:2], -1) * call.scaling)
        away = query_index[:, None] - torch.arange(keys.start, keys.stop, device=own.device)
        away = (away - shift)[None] if isinstance(shift, int) else away[None] - shift[..., None]
        mask = away >= 0 if keys is queries else torch.ones_like(away, dtype=torch.bool)
        mask = mask if call.window is None else mask & (away < call.window)
        seen.append(mask.expand(own.shape[0], len(queries), -1))
        values.append(call.values[:, keys.start : keys.stop])
    return weigh(call, torch.cat(scores, dim=-1), torch.cat(values, dim=1), torch.cat(seen, dim=-1))


def _reach(call: AttentionCall) -> int:
    """Bound on every shift: reader and segment may both move, each by no more than there are tokens.

    Rounded up, so that the table of angles is rebuilt rarely while decoding.
    """
    return 2 * 256 * -(-call.keys.shape[1] // 256)
