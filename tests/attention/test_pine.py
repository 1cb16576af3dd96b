"""PINE by fused calls, tiles and single softmaxes: whichever is chosen computes what the reference says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from invariant_rag.arrangement import Layout
from invariant_rag.attention import tiles
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.reference import Reference
from invariant_rag.attention.rope import Rotation
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.methods import resolve_method
from invariant_rag.testing.rounding import rounding

HEADS, KEY_HEADS, SIZE = 4, 2, 8
LAYOUTS = {
    "short": Layout((2, 3), ((4, 1, 3),)),
    "long": Layout((2, 3), ((9, 12, 7),)),
    "a long one among short ones": Layout((2, 2), ((2, 1, 17, 3, 0, 4),)),
    "empty segments": Layout((0, 2), ((9, 0, 7, 0),)),
    "an empty set": Layout((2, 1, 3), ((0, 0), (8, 9))),
    "a short and a long set": Layout((2, 0, 3), ((4, 1), (9, 10))),
    "two long sets": Layout((2, 2, 1), ((8, 9), (7, 9, 8))),
    "one segment": Layout((1, 1), ((9,),)),
}


class _Frequencies(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10_000.0 ** -(torch.arange(0, size, 2).double() / size))


@pytest.mark.parametrize("rotary", [SIZE, SIZE - 4], ids=["all rotary", "some rotary"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_prompt_and_its_answer_get_what_the_reference_says(
    layout: Layout, interleaved: bool, rotary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_SHORT", 6)
    torch.manual_seed(0)
    generated = 2
    total = layout.length + generated
    queries = torch.randn(HEADS, total, SIZE)
    keys, values = (torch.randn(KEY_HEADS, total, SIZE) for _ in range(2))
    rotation = Rotation(_Frequencies(rotary), "inv_freq", interleaved)
    arrangement, scratch = resolve_method("pine").arrange(layout), dict[str, object]()
    for start, stop in [(0, layout.length), *((at, at + 1) for at in range(layout.length, total))]:
        tensors = queries[:, start:stop], keys[:, :stop], values[:, :stop]
        call = AttentionCall(*tensors, rotation, SIZE**-0.5)
        with torch.no_grad():
            found = arrangement.attend(SDPA(), replace(call, scratch=scratch))
            expected = arrangement.attend(Reference(), call)
        bound = rounding(arrangement.attend, Reference(), call)
        torch.testing.assert_close(found, expected.to(found), atol=bound, rtol=0)
