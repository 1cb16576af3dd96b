"""The base classes of methods: what a method declares, and how rows of segments become an arrangement."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from invariant_rag.arrangement import Arrangement, Layout, RowArrangement, Slots, arrange_rows
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.read_only import ReadOnly

if TYPE_CHECKING:
    from invariant_rag.attention.call import AttentionCall


class Method(ReadOnly):
    """How segments see each other. Its attributes are read-only once it is built.

    Attributes:
        name: Registry key, and the name of the file.
        paper: Its source.
        cost: Computation compared with the plain model, in a phrase.
        training_free: Whether it works with a model's own weights, without training.
        invariant: Whether the answer ignores the order of the segments, given an ordering by content.
        default_ordering: The ordering to use where none is chosen.
        fair: Whether accuracy cannot depend on which slot a segment lands in, because all slots are alike.
        context_free_segments: Whether a segment's keys and values depend on the prefix and on the segment alone, so
            that a cache can reuse them in any set after the same prefix.
        reads_ahead: Whether what a token of the prompt sees depends on later ones. Then a prompt without sets may not
            be what the plain model reads, and nothing of a prompt can be reused before another suffix.
        reads_later_positions: Whether tokens see keys at later positions than their own. Rotary embeddings tell these
            apart; the biases of ALiBi are for keys that lie before.
        stock_decoding: Whether the suffix and generated tokens see every key at its natural position, so that decoding
            after the prefill uses the model's own attention.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    cost: ClassVar[str]
    training_free: ClassVar[bool] = True
    invariant: ClassVar[bool] = True
    fair: ClassVar[bool] = False
    context_free_segments: ClassVar[bool] = False
    default_ordering: ClassVar[str] = "lexical"
    reads_ahead: ClassVar[bool] = False
    reads_later_positions: ClassVar[bool] = False
    stock_decoding: ClassVar[bool] = True

    def drafts(self, sources: Sequence[Sequence[int]]) -> Sequence[int]:
        """Return the segments of a set that are laid out once more in front of it; see `Layout.drafts`.

        Args:
            sources: For each segment of the set, the segments that it builds on.
        """
        return ()

    @abstractmethod
    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout sees."""


def refuse_sliding_window(call: AttentionCall, method: str, unsaid: str) -> None:
    """Refuse a layer with a sliding window, for a method that leaves open what one means.

    Args:
        call: The layer's attention.
        method: Name of the method.
        unsaid: What the method does not say.

    Raises:
        UnsupportedCombination: The layer has a sliding window.
    """
    if call.sliding_window is not None:
        raise UnsupportedCombination(
            f"expected layers without a sliding window for {method!r}, got one of {call.sliding_window} tokens: the "
            f"method does not say {unsaid}",
            hint="Use a model without sliding windows, or another method, such as 'set-based'.",
        )


class RowMethod(Method):
    """A method with one rule for every layer, head and input: which segments a segment sees, in which order.

    Attributes:
        slots: Where a row sees its segments. `stacked`: one after the other. `natural`: at their natural positions.
            `shared`: likewise, with all segments of a set at the same positions.
    """

    slots: ClassVar[Slots] = "stacked"

    @abstractmethod
    def row(self, segment: int, count: int) -> Sequence[int]:
        """Return the segments that `segment` (of `count`, in physical order) sees, far to near, itself last."""

    def arrange(self, layout: Layout) -> RowArrangement:
        """Return which keys every token of a prompt with this layout sees."""
        orders = [[self.row(i, len(spans)) for i in range(len(spans))] for spans in layout.set_spans]
        return arrange_rows(layout, orders, slots=self.slots)
