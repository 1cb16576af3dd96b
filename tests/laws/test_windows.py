"""PCW and Structured Prompting against the outputs of their published code."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt
from invariant_rag.arrangement import Layout
from invariant_rag.methods import Structured
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

GOLDEN = Path(__file__).parents[1] / "golden" / "windows.npz"


def test_windows_of_a_single_common_token_are_set_based_prompting() -> None:
    for prefix in (0, 1):
        prompt = random_prompt(random.Random(3), (3, 1, 4), prefix=prefix)
        lm = InvariantModel(tiny_model("llama"), method="parallel-windows")
        expected = lm.with_method("set-based").logits(prompt)
        torch.testing.assert_close(lm.logits(prompt), expected, atol=rounding(lm.logits, prompt), rtol=0)
    longer = random_prompt(random.Random(3), (3, 1, 4), prefix=2)
    assert float((lm.logits(longer) - lm.with_method("set-based").logits(longer)).abs().max()) > 1e-2


def test_logits_and_greedy_tokens_are_those_of_the_published_functions(
    golden_model: PreTrainedModel, golden_manifest: dict[str, Any]
) -> None:
    """The last logits and 8 greedy tokens, in float32, of two golden cases in `windows.npz`.

    PCW: `combine_past_key_values` and `generate_pcw_position_ids` of AI21Labs/Parallel-Context-Windows (e6d3100) with
    transformers' Llama. Structured Prompting: `make_positions` and the rescaling of `MultiheadAttention.forward` of
    microsoft/LMOps (4f2a9de) in that Llama; there, the prefix is the first token, as in all of its prompts.
    """
    with np.load(GOLDEN) as arrays:
        golden = dict(arrays)
    names = {tuple(key.split("/")[:2]) for key in golden}
    assert len(names) == 4
    for method, name in names:
        case = golden_manifest["cases"][name]
        prefix = case["prefix"][:1] if method == "structured" else case["prefix"]
        prompt = Prompt(prefix, case["segs"], case["suffix"])
        lm = InvariantModel(golden_model, method=method)
        expected = torch.from_numpy(golden[f"{method}/{name}/last_logits"])
        torch.testing.assert_close(lm.logits(prompt)[-1], expected, atol=rounding(lm.logits, prompt), rtol=0)
        written = lm.generate(prompt, max_new_tokens=8).token_ids
        assert written == tuple(golden[f"{method}/{name}/greedy"].tolist())


def test_positions_of_groups_are_the_published_ones() -> None:
    """`make_positions` of microsoft/LMOps for groups of 4, 6 and 2 tokens, the first of which is common, and a test."""
    published = [0, *(3, 4, 5), *(1, 2, 3, 4, 5), 5, *(6, 7, 8)]
    assert Structured().arrange(Layout((1, 3), ((3, 5, 1),))).positions == tuple(published)
