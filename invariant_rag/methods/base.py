"""The base classes of methods: what a method declares, and how rows of segments become an arrangement."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.arrangement import Arrangement, Layout, Slots, arrange_rows
from invariant_rag.read_only import ReadOnly


class Method(ReadOnly):
    """Which segments attend to which, and at which positions. Its attributes are read-only once it is built.

    Attributes:
        name: Registry key.
        paper: Its source.
        cost: Computation compared with the plain model, in a phrase.
        invariant: Whether the answer ignores the order of the segments, given an ordering by content.
        default_ordering: The ordering to use where none is chosen.
        fair: Whether accuracy cannot depend on which slot a segment lands in, because all slots are alike.
        context_free_segments: Whether a segment's keys and values depend on the prefix and on the segment alone, so
            that a cache can reuse them in any set after the same prefix.
        attends_to_later_positions: Whether tokens attend to keys at later positions than their own. Rotary embeddings
            represent these; the biases of ALiBi do not.
        stock_decoding: Whether the suffix and generated tokens attend to every key at its natural position, so that
            decoding after the prefill uses the model's own attention.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    cost: ClassVar[str]
    invariant: ClassVar[bool] = True
    fair: ClassVar[bool] = False
    context_free_segments: ClassVar[bool] = False
    default_ordering: ClassVar[str] = "lexical"
    attends_to_later_positions: ClassVar[bool] = False
    stock_decoding: ClassVar[bool] = True

    @property
    def shares_positions(self) -> bool:
        """Whether the segments of a set have the same positions, so that a set takes as many as its longest segment.

        Then the segments of a set may hold more tokens than the context window has positions.
        """
        return False

    @abstractmethod
    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout attends to."""


class RowMethod(Method):
    """A method with one rule for every layer, head and input: which segments a segment attends to, in which order.

    Attributes:
        slots: Positions of the segments in a row. `stacked`: one after the other. `natural`: their natural positions.
            `shared`: likewise, with all segments of a set at the same positions.
    """

    slots: ClassVar[Slots] = "stacked"

    @property
    def shares_positions(self) -> bool:
        """Whether the segments of a set have the same positions; see `Method`."""
        return self.slots == "shared"

    @abstractmethod
    def row(self, segment: int, count: int) -> Sequence[int]:
        """Return the segments that `segment` (of `count`, in physical order) attends to, far to near, itself last."""

    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout attends to."""
        orders = [[self.row(i, len(spans)) for i in range(len(spans))] for spans in layout.set_spans]
        return arrange_rows(layout, orders, slots=self.slots)
