"""Whether a set would be understood alike if its documents had been listed in another order.

A prompt shows one order. A line break may be that of a document or of the template, and only a document that begins or
ends otherwise tells. So the prompt is written anew with its documents in the orders that would tell, and recognised
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from invariant_rag.prompts.decorations import counts_up
from invariant_rag.prompts.known_documents import KnownDocument, occurrences
from invariant_rag.prompts.set_runs import Found, Gap, SetRun, understand
from invariant_rag.segments import Field, Segment, Slot, field_text, value_of


def is_order_free(members: Sequence[Found], understood: SetRun, documents: Sequence[KnownDocument]) -> bool:
    """Return whether the same documents in other orders, with the same text around them, give the same set.

    Args:
        members: The documents, in the order of the prompt.
        understood: What was understood of them.
        documents: All documents that are known.
    """
    turns = {each.turn for each in members}
    slots = understood.segments.slots
    if len(members) < 2 or len(turns) > 1 or slots is None or any(each.group for each in members):
        return True
    (turn,) = turns
    written = _Written(tuple(understood.segments), slots, _joined(understood.before), _joined(understood.after), turn)
    return all(written.gives(understood, members, order, documents) for order in _telling_orders(members))


class _Written:
    """The text of a set and around it, with its documents in any order."""

    def __init__(self, segments: Sequence[Segment], slots: Sequence[Slot], before: str, after: str, turn: int) -> None:
        self._segments = segments
        self._slots = slots
        self._before = before
        self._after = after
        self._turn = turn

    def gives(
        self, understood: SetRun, members: Sequence[Found], order: Sequence[int], documents: Sequence[KnownDocument]
    ) -> bool:
        """Return whether an order is understood as the given one was."""
        placed = [members[index] for index in order]
        gaps = [""]
        for slot, index, member in zip(self._slots, order, placed, strict=True):
            whole, text = self._segments[index].text, member.segment.text
            leading, _, trailing = whole.partition(text) if whole != text else ("", "", "")
            gaps[-1] += _rendered(slot.before, member.segment) + leading
            gaps.append(trailing + _rendered(slot.after, member.segment))
        gaps = [self._before + gaps[0], *gaps[1:-1], gaps[-1] + self._after]
        if all(each.document is not None for each in placed) and not _found_again(placed, gaps, documents):
            return False
        again = understand(placed, [[(self._turn, gap)] for gap in gaps])
        return (
            again is not None
            and not again.doubt
            and again.segments.slots == understood.segments.slots
            and again.segments == understood.segments
            and (_joined(again.before), _joined(again.after)) == (self._before, self._after)
        )


def _found_again(placed: Sequence[Found], gaps: Sequence[str], documents: Sequence[KnownDocument]) -> bool:
    """Return whether documents are found in the text where they were written."""
    text, places = gaps[0], []
    for member, gap in zip(placed, gaps[1:], strict=True):
        places.append((len(text), len(text) + len(member.segment.text)))
        text += member.segment.text + gap
    return places == [(each.start, each.stop) for each in occurrences(text, documents)]


def _telling_orders(members: Sequence[Found]) -> list[tuple[int, ...]]:
    """Return orders in which each kind of document comes first and last."""
    segments = [each.segment for each in members]
    by_content = sorted(range(len(members)), key=lambda index: segments[index].canonical_key)
    orders = []
    for ends in _representatives([_ends(each) for each in members]):
        others = [index for index in by_content if index != ends]
        orders += [order for rest in (others, others[::-1]) for order in ([ends, *rest], [*rest, ends])]
    return [each for each in dict.fromkeys(map(tuple, orders)) if not _may_be_numbered([segments[at] for at in each])]


def _may_be_numbered(segments: Sequence[Segment]) -> bool:
    """Return whether metadata could be running numbers, which is a doubt of that order alone."""
    keys = {"title", "score"}.union(*(each.metadata for each in segments))
    return any(counts_up([str(value_of(each, key)) for each in segments]) for key in keys)


def _ends(member: Found) -> tuple[str, ...]:
    """Return what tells how a document begins and ends: white space, letters or which other character."""
    text = member.origin
    stripped = text.strip()
    leading, trailing = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return leading, trailing, *("a" if each.isalnum() else each for each in (stripped[:1], stripped[-1:]))


def _representatives(kinds: Sequence[tuple[str, ...]]) -> Iterable[int]:
    """Return the index of one of each kind; nothing if all are of one kind."""
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    return first.values() if len(first) > 1 else ()


def _rendered(pieces: Iterable[str | Field], segment: Segment) -> str:
    return "".join(field_text(segment, each.key) if isinstance(each, Field) else each for each in pieces)


def _joined(gap: Gap) -> str:
    return "".join(text for _, text in gap)
