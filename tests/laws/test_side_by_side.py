"""Methods whose segments do not attend to each other: decoding in beams and batches, and choices that mean nothing."""

from __future__ import annotations

import random

import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods import APE
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

PROMPT = random_prompt(random.Random(0), (3, 5, 1, 2), prefix=4, suffix=3)


@pytest.mark.parametrize("method", ["set-based", "parallel-windows", "structured", "ape"])
def test_positions_go_on_behind_the_longest_segment_while_decoding(method: str) -> None:
    """Beams and a batch of different prompts; by single steps, decoding is compared in the contract."""
    lm = InvariantModel(tiny_model("llama", eos_token_id=None), method=method)
    other = random_prompt(random.Random(5), (7, 7, 2), suffix=2)
    beams = lm.generate([PROMPT, other], max_new_tokens=6, num_beams=3)
    assert [each.token_ids for each in beams] == [
        lm.generate(each, max_new_tokens=6, num_beams=3).token_ids for each in (PROMPT, other)
    ]
    for prompt in (PROMPT, other):
        candidate = [9, 8, 7]
        longer = Prompt(prompt.prefix, prompt.segments, [*prompt.suffix, *candidate])
        logprobs = torch.log_softmax(lm.logits(longer), dim=-1)[len(prompt.suffix) - 1 : -1]
        expected = sum(float(logprobs[step, token]) for step, token in enumerate(candidate))
        bound = rounding(lm.score, prompt, [candidate, [3]])
        assert lm.score(prompt, [candidate, [3]])[0] == pytest.approx(expected, abs=bound)


def test_ape_refuses_what_is_not_positive() -> None:
    for bad in ((0.0, 0.9), (0.9, -1.0)):
        with pytest.raises(InvalidChoice, match="above 0"):
            APE(*bad)
