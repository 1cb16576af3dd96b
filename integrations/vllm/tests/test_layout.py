"""What a method's last text attends to, as plain causal attention: copies, hidden keys, one rotation."""

from __future__ import annotations

import pytest
from invariant_rag.arrangement import Layout
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.methods import resolve_method

from vllm_invariant_rag.layout import check_method, key_copies, token_indices

LAYOUT = Layout((3, 2), ((2, 1, 4),))


@pytest.mark.parametrize("method", ["sequential", "rotor", "isolated", "pine-in-place", "set-based", "graph-kv"])
def test_keys_that_count_once_lie_once(method: str) -> None:
    chosen = resolve_method(method)
    assert key_copies(chosen, chosen.arrange(LAYOUT)) == [1] * 10


def test_parallel_windows_sees_the_prefix_of_every_window_but_its_first_token_once() -> None:
    chosen = resolve_method("parallel-windows")
    copies = key_copies(chosen, chosen.arrange(LAYOUT))
    assert copies == [1, 3, 3, 1, 1, 1, 1, 1, 1, 1]
    assert token_indices(copies) == [0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9]


def test_drafts_are_left_away() -> None:
    chosen = resolve_method("invicl")
    layout = Layout((3, 2), ((2, 1),), drafts=((0, 1),))
    assert key_copies(chosen, chosen.arrange(layout)) == [1, 1, 1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("method", "why"),
    [("pine", "ranks"), ("pine-reverse", "ranks"), ("structured", "answer"), ("ape", "whole numbers")],
)
def test_a_refusal_gives_the_reason_of_its_method(method: str, why: str) -> None:
    with pytest.raises(UnsupportedCombination, match=why):
        check_method(resolve_method(method))
