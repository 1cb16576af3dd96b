"""Tiny models and random prompts are those of their seed, and leave the state of others alone."""

from __future__ import annotations

import random

import torch

from invariant_rag.testing import random_prompt, tiny_model


def test_a_seed_gives_its_own_weights_and_prompts_and_leaks_nowhere():
    torch.manual_seed(5)
    before, state = torch.get_rng_state(), random.getstate()
    one, same, other = (tiny_model("llama", seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    prompts = [random_prompt(random.Random(seed), (2, 3)) for seed in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert torch.equal(torch.get_rng_state(), before), "torch's generator is as it was"
    assert random.getstate() == state
