"""The laws on CUDA: golden logits, invariance in half precision, kernels, batches, caches and memory."""

import copy
import random

import pytest
import torch

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.attention.varlen import TorchVarlen, difference, usable_kernel
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt, tiny_model
from tests.comparing import assert_computes
from tests.laws.test_contract import OURS, published_runs

CUDA = torch.device("cuda")
HALF = (torch.float16, torch.bfloat16)
INVARIANT = [name for name in METHODS if name != "sequential"]
SHAPES = ((30, 51, 20), (40, 11), (25, 25, 25, 25), (60, 35))


def prompts():
    return [random_prompt(random.Random(number), shape) for number, shape in enumerate(SHAPES)]


def bits(answers):
    return [(each.token_ids, each.logprobs) for each in answers]


@pytest.mark.parametrize("dtype", HALF)
def test_the_kernel_agrees_with_attention_in_float64(dtype):
    for size in (64, 128):
        assert not difference(TorchVarlen(), CUDA, dtype, size)
        assert isinstance(usable_kernel(CUDA, dtype, size), TorchVarlen)
    assert usable_kernel(CUDA, torch.float32) is None, "FlashAttention has half precision only"


@pytest.mark.parametrize("published", ["rotor_lexical", "pine", "sbp"])
def test_golden_logits(published, golden_model, golden_manifest, golden_arrays):
    (method, ordering), model = OURS[published], copy.deepcopy(golden_model).to(CUDA)
    lm, slow = (InvariantModel(each, method=method, ordering=ordering) for each in (model, golden_model))
    for _, prompt, expected, _ in published_runs(published, golden_manifest, golden_arrays):
        assert_computes(expected, lambda each: lm.logits(each).cpu(), prompt, bounded=slow.logits)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
@pytest.mark.parametrize("method", INVARIANT)
def test_no_order_changes_a_bit(method, backend, dtype):
    lm = InvariantModel(tiny_model("llama").to(CUDA, dtype), method=method, ordering="lexical", backend=backend)
    chance = random.Random(0)
    for prompt in prompts():
        expected, answer = lm.logits(prompt), lm.generate(prompt, max_new_tokens=8)
        for _ in range(5):
            other = prompt.shuffled(chance)
            assert torch.equal(lm.logits(other), expected)
            assert bits([lm.generate(other, max_new_tokens=8)]) == bits([answer])


@pytest.mark.parametrize("dtype", HALF)
def test_no_order_changes_a_bit_of_a_batch(dtype):
    lm, chance = InvariantModel(tiny_model("llama").to(CUDA, dtype)), random.Random(0)
    expected = bits(lm.generate(prompts(), max_new_tokens=8))
    for _ in range(10):
        assert bits(lm.generate([each.shuffled(chance) for each in prompts()], max_new_tokens=8)) == expected


@pytest.mark.parametrize("method", INVARIANT)
def test_a_batch_and_a_warm_cache_answer_as_a_single_call(method):
    lm = InvariantModel(tiny_model("llama").to(CUDA), method=method)
    alone = [lm.generate(each, max_new_tokens=6).token_ids for each in prompts()]
    assert [each.token_ids for each in lm.generate(prompts(), max_new_tokens=6)] == alone
    warm, cold = (lm.with_cache(KeyValueCache()) for _ in range(2))
    for _ in range(2):
        assert [warm.generate(each, max_new_tokens=6).token_ids for each in prompts()] == alone
    for cached in (warm, cold):
        assert [each.token_ids for each in cached.generate(prompts(), max_new_tokens=6)] == alone


def test_a_deterministic_model_answers_alike_in_every_batch():
    lm = InvariantModel(tiny_model("llama").to(CUDA, torch.bfloat16), deterministic=True)
    alone = [lm.generate(each, max_new_tokens=8) for each in prompts()]
    assert bits(lm.generate(prompts() * 2, max_new_tokens=8)) == bits(alone * 2)


def test_a_long_prompt_takes_no_more_memory_than_the_plain_model():
    sizes = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    model = tiny_model("llama", **sizes, num_key_value_heads=8, head_dim=64, max_position_embeddings=1 << 16)
    model = model.to(CUDA, torch.bfloat16)
    prompt = random_prompt(random.Random(0), (1600,) * 20)

    def peak(method):
        torch.cuda.reset_peak_memory_stats()
        InvariantModel(model, method=method).generate(prompt, max_new_tokens=1)
        return torch.cuda.max_memory_allocated()

    plain = peak("sequential")
    assert peak("rotor") <= 1.25 * plain
    assert peak("pine") <= 8 * plain
