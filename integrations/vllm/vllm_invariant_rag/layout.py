"""How the keys and values of an arranged prompt lie in vLLM, whose decoding knows plain causal attention only.

There, a token attends to every key before it with the same weight, and lies at the position of its index. What a
method's last text attends to is brought into this form: keys that count n times lie there n times, hidden ones are left
away, and all keys are rotated by one constant, so that the last text lies at its index. Attention depends on
differences of positions only, so nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from invariant_rag.arrangement import Arrangement, HidingArrangement, Layout, RowArrangement, Span, WeightedArrangement
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.methods import Method


def key_copies(method: Method, arrangement: Arrangement) -> list[int]:
    """Return how often each token before the last text counts for the last text, and for tokens generated after it.

    Raises:
        UnsupportedCombination: No number of copies says what the last text attends to; the message gives the reason.
    """
    copies = [1] * arrangement.layout.text_spans[-1].start
    if isinstance(arrangement, WeightedArrangement):
        for span, weighting in arrangement.weighted[-1]:
            count = round(exp(weighting.offset))
            if weighting.temperature != 1 or weighting.factor != 1 or abs(exp(weighting.offset) - count) > 1e-6:
                raise _refusal(method, "weighs the keys of segments by other than whole numbers")
            if span.stop > len(copies):
                raise _refusal(method, "weighs the keys of the last text and of the answer")
            _fill(copies, span, count)
    elif isinstance(arrangement, HidingArrangement):
        for span in arrangement.hidden:
            _fill(copies, span, 0)
    elif not isinstance(arrangement, RowArrangement):
        raise _refusal(method, "ranks the segments anew for each layer, head and token")
    elif type(arrangement) is not RowArrangement and not method.stock_decoding:
        raise _refusal(method, "has an attention of its own")
    return copies


def check_method(method: Method) -> None:
    """Raise UnsupportedCombination if vLLM cannot decode with a method, whatever the prompt."""
    drafts = tuple(method.drafts(((), ())))
    layout = Layout((2, 1), ((1, 1),), drafts=(drafts,) if drafts else ())
    key_copies(method, method.arrange(layout))


def token_indices(copies: Sequence[int]) -> list[int]:
    """Return the prompt's token that lies at each index in vLLM.

    >>> token_indices([1, 2, 2, 0, 1])
    [0, 1, 1, 2, 2, 4]
    """
    return [index for index, count in enumerate(copies) for _ in range(count)]


def _fill(copies: list[int], span: Span, count: int) -> None:
    copies[span.start : span.stop] = [count] * len(span)


def _refusal(method: Method, reason: str) -> UnsupportedCombination:
    return UnsupportedCombination(
        f"expected a method whose decoding is plain attention, got {method.name!r}, which {reason} while it decodes: "
        "vLLM has no such attention",
        hint="Use rotor, isolated, pine-in-place, set-based or parallel-windows, or run this method without vLLM.",
    )
