"""Ms-PoE against a float64 loop written from the paper, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.interventions import MsPoE
from invariant_rag.interventions.ms_poe import rank_heads
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import rounding


def _from_the_paper(layer: int, weights: list[list[float]]) -> list[float]:
    """Equations 1 and 2, from the third layer on."""
    if layer < 2:
        return [1.0] * len(weights)
    aware = []
    for head in weights:
        mean = sum(head) / len(head)
        aware.append(sum(weight > 3 * mean for weight in head) / len(head))
    ranked = sorted(range(len(weights)), key=lambda head: -aware[head])
    return [1.2 + ranked.index(head) * (1.8 - 1.2) / (len(weights) - 1) for head in range(len(weights))]


def test_logits_and_decoding_equal_a_float64_loop_written_from_the_paper(
    llama_logits: Callable[..., torch.Tensor],
) -> None:
    seed = 4
    model: Any = tiny_model("llama", seed, eos_token_id=None).double()
    lm = InvariantModel(model, method="sequential", intervention="ms-poe")
    prompt = random_prompt(random.Random(seed), (4, 12, 7))
    plain = lm.with_method("sequential")  # for bounds: which head ranks first has none
    ids, written = list(lm.prepare(prompt).input_ids), lm.generate(prompt, max_new_tokens=3)
    assigned = []

    def ratios(layer: int, weights: list[list[float]]) -> list[float]:
        assigned.append(_from_the_paper(layer, weights))
        return assigned[-1]

    exact = llama_logits(model, [*ids, *written.token_ids], ratios=ratios, last=len(ids) - 1)
    assert any(each != sorted(each) for each in assigned), "ranks must differ from the order of the heads"
    suffix = exact[len(ids) - len(prompt.suffix) : len(ids)]
    torch.testing.assert_close(lm.logits(prompt), suffix.float(), atol=rounding(plain.logits, prompt), rtol=0)
    logprobs = torch.log_softmax(exact[len(ids) - 1 : -1], dim=1)
    assert tuple(logprobs.argmax(dim=1).tolist()) == written.token_ids
    assert written.logprobs == pytest.approx(
        logprobs.amax(dim=1).tolist(), abs=rounding(plain.generate, prompt, max_new_tokens=len(written.token_ids))
    )
    assert lm.score(prompt, [written.token_ids])[0] == pytest.approx(
        float(logprobs.amax(dim=1).sum()), abs=rounding(plain.score, prompt, [written.token_ids])
    )


@pytest.mark.parametrize(
    ("seed", "ranked"),
    [(1, [1, 7, 3, 5, 2, 4, 0, 6]), (7, [7, 0, 3, 1, 6, 5, 4, 2]), (20, [4, 0, 1, 6, 7, 2, 3, 5])],
)
def test_heads_are_ranked_as_by_the_published_code(seed: int, ranked: list[int]) -> None:
    """The expected ranks are what `_calculate_outlier` at commit a46c3d1 returns, with its threshold of 3."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(8, 1, 400, generator=generator, dtype=torch.float64)
    sharpness = torch.linspace(0.8, 3.0, 8, dtype=torch.float64)[torch.randperm(8, generator=generator)]
    weights = torch.softmax(scores * sharpness[:, None, None], dim=-1)[:, 0]
    assert rank_heads(weights, MsPoE().threshold).tolist() == ranked
    assert rank_heads(weights, 4.0).tolist() != ranked
    even = torch.tensor([[0.75, 0.25, 0.0, 0.0], [0.76, 0.24, 0.0, 0.0]])
    assert rank_heads(even, 3.0).tolist() == [1, 0], "three times the mean is not more than that"


def test_parameters_without_a_meaning_and_models_that_end_before_the_first_layer_are_refused(
    llama: PreTrainedModel,
) -> None:
    options: list[dict[str, Any]] = [{"smallest": 0.0}, {"smallest": 2.0}, {"largest": -1.0}, {"first_layer": -1}]
    for each in options:
        with pytest.raises(InvalidChoice):
            MsPoE(**each)
    with pytest.raises(UnsupportedCombination, match="less than 2, the layers of llama"):
        InvariantModel(llama, method="sequential", intervention="ms-poe")
    InvariantModel(llama, method="sequential", intervention=MsPoE(first_layer=1))
