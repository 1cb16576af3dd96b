"""Batches whose prompts are read in one padded forward pass give what each prompt gets by itself."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.interventions.ms_poe import MsPoE
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

SHAPES = ((3, 5, 2), (4, 1), (2, 2, 2, 2), (6, 3))
SUFFIXES = (4, 4, 7, 5)


def prompts() -> list[Prompt]:
    sizes = zip(SHAPES, SUFFIXES, strict=True)
    return [random_prompt(random.Random(index), shape, suffix=suffix) for index, (shape, suffix) in enumerate(sizes)]


class ForwardPasses(TorchDispatchMode):
    """Notes the rows and tokens of every forward pass. A hook would keep the cache from being used."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            self.shapes.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_is_read_together_answers_as_each_prompt_alone(method: str, llama: PreTrainedModel) -> None:
    lm = InvariantModel(llama, method=method, backend="varlen")
    together = lm.generate(prompts(), max_new_tokens=6)
    alone = [lm.generate(each, max_new_tokens=6) for each in prompts()]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    bound = rounding(lm.generate, prompts(), max_new_tokens=6)
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=bound)
        assert one.order == other.order


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_neox", "mistral", "phi3"])
def test_so_it_is_in_other_families(family: str) -> None:
    lm = InvariantModel(tiny_model(family), backend="varlen")
    together = lm.generate(prompts(), max_new_tokens=4)
    assert [each.token_ids for each in together] == [
        lm.generate(each, max_new_tokens=4).token_ids for each in prompts()
    ]


def test_one_forward_pass_reads_all_prompts_of_a_batch() -> None:
    lm = InvariantModel(tiny_model("llama"), backend="varlen")
    longest = max(len(lm.prepare(each).input_ids) for each in prompts())
    with ForwardPasses() as passes:
        lm.generate(prompts(), max_new_tokens=3)
    assert passes.shapes == [(4, longest), (4, 1), (4, 1)]


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_answers_alike_without_a_cache_with_a_cold_and_with_a_warm_one(
    method: str, llama: PreTrainedModel
) -> None:
    plain = InvariantModel(llama, method=method, backend="varlen")
    lm = plain.with_cache(KeyValueCache())
    expected = plain.generate(prompts(), max_new_tokens=6)
    cold, warm = (lm.generate(prompts(), max_new_tokens=6) for _ in range(2))
    bound = rounding(plain.generate, prompts(), max_new_tokens=6)
    for found in (cold, warm):
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=bound)
    assert [each.usage.cached_tokens for each in warm] == [
        len(each.input_ids) - each.suffix_length for each in map(lm.prepare, prompts())
    ]
    alone = [lm.generate(each, max_new_tokens=6) for each in prompts()]
    assert [each.usage.cached_tokens for each in alone] == [each.usage.cached_tokens for each in warm]
    fresh = plain.with_cache(KeyValueCache())
    assert [fresh.generate(each, max_new_tokens=6).token_ids for each in prompts()] == [
        each.token_ids for each in expected
    ]


def test_with_a_cache_one_forward_pass_reads_all_sets_and_one_all_questions() -> None:
    lm = InvariantModel(tiny_model("llama"), backend="varlen", cache=KeyValueCache())
    lm.generate(random_prompt(random.Random(9), (1, 1)), max_new_tokens=1)  # measures, once, how large a token is
    prepared = [lm.prepare(each) for each in prompts()]
    sets = max(len(each.input_ids) - each.suffix_length for each in prepared)
    questions = max(each.suffix_length for each in prepared)
    with ForwardPasses() as passes:
        lm.generate(prompts(), max_new_tokens=2)
        lm.generate(prompts()[::-1], max_new_tokens=2)
    assert passes.shapes == [(4, sets), (4, questions), (4, 1), (4, 1), (4, questions), (4, 1), (4, 1)]


def test_a_prompt_without_segments_answers_alike_beside_others_and_a_cache(llama: PreTrainedModel) -> None:
    lm = InvariantModel(llama, backend="varlen", cache=KeyValueCache())
    mixed = [prompts()[0], Prompt(prefix=[], segments=[], suffix=[5, 9, 33, 40]), prompts()[1]]
    for _ in range(2):
        assert [each.token_ids for each in lm.generate(mixed, max_new_tokens=4)] == [
            InvariantModel(llama, backend="varlen").generate(each, max_new_tokens=4).token_ids for each in mixed
        ]


@pytest.mark.parametrize("cache", [None, KeyValueCache()], ids=["uncached", "cached"])
def test_prompts_with_beams_are_read_together(cache: KeyValueCache | None, llama: PreTrainedModel) -> None:
    lm = InvariantModel(llama, backend="varlen", cache=cache)
    with ForwardPasses() as passes:
        together = lm.generate(prompts(), max_new_tokens=3, num_beams=2)
    assert {rows for rows, tokens in passes.shapes if tokens > 1} == {4}
    assert [each.token_ids for each in together] == [
        lm.generate(each, max_new_tokens=3, num_beams=2).token_ids for each in prompts()
    ]


def test_a_set_that_several_prompts_of_a_batch_share_is_read_once() -> None:
    lm = InvariantModel(tiny_model("llama"), backend="varlen", cache=KeyValueCache())
    first, other, *_ = prompts()
    same = Prompt(first.prefix, first.segments[::-1], first.suffix)
    lm.generate(other, max_new_tokens=1)
    with ForwardPasses() as passes:
        found = lm.generate([first, other, same], max_new_tokens=1)
    assert [rows for rows, _ in passes.shapes] == [1, 3, 3]  # a set; three questions; the first token of three answers
    assert [bool(each.usage.cached_tokens) for each in found] == [False, True, True]
    bound = rounding(lm.generate, first, max_new_tokens=1)  # they are two rows of one product
    assert found[0].logprobs == pytest.approx(found[2].logprobs, abs=bound)


def test_no_order_of_segments_changes_a_bit_of_a_batch(llama: PreTrainedModel) -> None:
    chance = random.Random(0)
    for dtype, cache in itertools.product((torch.float32, torch.bfloat16), (None, KeyValueCache())):
        lm = InvariantModel(tiny_model("llama").to(dtype), backend="varlen", cache=cache)
        expected = [(each.token_ids, each.logprobs) for each in lm.generate(prompts(), max_new_tokens=4)]
        for _ in range(5):
            shuffled = [
                Prompt(each.prefix, chance.sample(each.segments, len(each.segments)), each.suffix) for each in prompts()
            ]
            found = [(each.token_ids, each.logprobs) for each in lm.generate(shuffled, max_new_tokens=4)]
            assert found == expected


@pytest.mark.parametrize(
    "choice",
    [{"deterministic": True}, {"backend": "sdpa"}, {"method": "sequential", "intervention": MsPoE(first_layer=0)}],
)
def test_what_does_not_pay_or_would_change_answers_is_read_one_by_one(
    choice: dict[str, Any], llama: PreTrainedModel
) -> None:
    lm = InvariantModel(llama, **{"backend": "varlen", **choice})
    lengths = [len(lm.prepare(each).input_ids) for each in prompts()]
    assert not lm.prefiller.shares_prefill(lengths)
    assert InvariantModel(llama, backend="varlen").prefiller.shares_prefill(lengths)


@pytest.mark.parametrize("family", ["bloom", "dynamic"])
def test_a_prompt_means_the_same_in_a_batch(family: str) -> None:
    scaled = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}
    model = tiny_model("bloom") if family == "bloom" else tiny_model("llama", max_position_embeddings=16, **scaled)
    lm = InvariantModel(model, backend="varlen", method="set-based" if family == "bloom" else "rotor")
    together = lm.generate(prompts(), max_new_tokens=1)
    assert [each.logprobs for each in together] == [
        pytest.approx(lm.generate(each, max_new_tokens=1).logprobs, abs=rounding(lm.generate, each, max_new_tokens=1))
        for each in prompts()
    ]


def test_a_batch_that_would_be_padding_for_the_most_part_is_read_one_by_one() -> None:
    lm = InvariantModel(tiny_model("llama"), backend="varlen")
    with ForwardPasses() as passes:
        lm.generate([random_prompt(random.Random(0), (40, 40)), prompts()[1], prompts()[2]], max_new_tokens=1)
    assert {rows for rows, tokens in passes.shapes if tokens > 1} == {1}


def test_with_deterministic_a_batch_changes_no_bit_of_an_answer() -> None:
    lm = InvariantModel(tiny_model("llama").to(torch.bfloat16), deterministic=True)
    alone = [lm.generate(each, max_new_tokens=8) for each in prompts() * 2]
    together = lm.generate(prompts() * 2, max_new_tokens=8)
    assert [(each.token_ids, each.logprobs) for each in together] == [(each.token_ids, each.logprobs) for each in alone]
    assert lm.generate([], max_new_tokens=8) == []
    assert not lm.with_method(deterministic=False).deterministic
