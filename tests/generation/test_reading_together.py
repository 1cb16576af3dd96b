"""Batches whose prompts are read in one padded forward pass give what each prompt gets by itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.generation.padding import left_pad
from invariant_rag.interventions.ms_poe import MsPoE
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model

SHAPES = ((3, 5, 2), (4, 1), (2, 2, 2, 2), (6, 3))


def prompts() -> list[Prompt]:
    return [random_prompt(random.Random(number), shape) for number, shape in enumerate(SHAPES)]


def forward_passes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return a list that grows by the rows and tokens of every forward pass."""
    shapes: list[tuple[int, int]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    return shapes


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_is_read_together_answers_as_each_prompt_alone(method: str, llama: PreTrainedModel) -> None:
    lm = InvariantModel(llama, method=method, backend="varlen")
    together = lm.generate(prompts(), max_new_tokens=6)
    alone = [lm.generate(each, max_new_tokens=6) for each in prompts()]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.order == other.order


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_neox", "mistral", "phi3"])
def test_so_it_is_in_other_families(family: str) -> None:
    lm = InvariantModel(tiny_model(family), backend="varlen")
    together = lm.generate(prompts(), max_new_tokens=4)
    assert [each.token_ids for each in together] == [
        lm.generate(each, max_new_tokens=4).token_ids for each in prompts()
    ]


def test_one_forward_pass_reads_all_prompts_of_a_batch() -> None:
    model = tiny_model("llama")
    lm = InvariantModel(model, backend="varlen")
    shapes = forward_passes(model)
    longest = max(len(lm.prepare(each).input_ids) for each in prompts())
    lm.generate(prompts(), max_new_tokens=3)
    assert shapes == [(4, longest), (4, 1), (4, 1)]


def test_no_order_of_segments_changes_a_bit_of_a_batch(llama: PreTrainedModel) -> None:
    chance = random.Random(0)
    for dtype in (torch.float32, torch.bfloat16):
        lm = InvariantModel(tiny_model("llama").to(dtype), backend="varlen")
        expected = [(each.token_ids, each.logprobs) for each in lm.generate(prompts(), max_new_tokens=4)]
        for _ in range(5):
            shuffled = [
                Prompt(each.prefix, chance.sample(each.segments, len(each.segments)), each.suffix) for each in prompts()
            ]
            found = [(each.token_ids, each.logprobs) for each in lm.generate(shuffled, max_new_tokens=4)]
            assert found == expected


@pytest.mark.parametrize(
    "choice",
    [{"cache": KeyValueCache()}, {"backend": "sdpa"}, {"method": "sequential", "intervention": MsPoE(first_layer=0)}],
)
def test_what_does_not_pay_or_would_change_answers_is_read_one_by_one(
    choice: dict[str, Any], llama: PreTrainedModel
) -> None:
    lm = InvariantModel(llama, **{"backend": "varlen", **choice})
    batch = left_pad([lm.prepare(each) for each in prompts()], 0, lm.device)
    assert not lm.prefiller.can_read_together(batch)
    assert InvariantModel(llama, backend="varlen").prefiller.can_read_together(batch)


@pytest.mark.parametrize("family", ["bloom", "dynamic"])
def test_a_prompt_means_the_same_in_a_batch(family: str) -> None:
    scaled = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}
    model = tiny_model("bloom") if family == "bloom" else tiny_model("llama", max_position_embeddings=16, **scaled)
    lm = InvariantModel(model, backend="varlen", method="set-based" if family == "bloom" else "rotor")
    together = lm.generate(prompts(), max_new_tokens=1)
    assert [each.logprobs for each in together] == [
        pytest.approx(lm.generate(each, max_new_tokens=1).logprobs, abs=1e-4) for each in prompts()
    ]


def test_a_batch_that_would_be_padding_for_the_most_part_is_read_one_by_one() -> None:
    model = tiny_model("llama")
    lm = InvariantModel(model, backend="varlen")
    shapes = forward_passes(model)
    lm.generate([random_prompt(random.Random(0), (40, 40)), prompts()[1], prompts()[2]], max_new_tokens=1)
    assert {rows for rows, tokens in shapes if tokens > 1} == {1}


def test_with_deterministic_a_batch_changes_no_bit_of_an_answer() -> None:
    lm = InvariantModel(tiny_model("llama").to(torch.bfloat16), deterministic=True)
    alone = [lm.generate(each, max_new_tokens=8) for each in prompts() * 2]
    together = lm.generate(prompts() * 2, max_new_tokens=8)
    assert [(each.token_ids, each.logprobs) for each in together] == [(each.token_ids, each.logprobs) for each in alone]
    assert lm.generate([], max_new_tokens=8) == []
    assert not lm.with_method(deterministic=False).deterministic
