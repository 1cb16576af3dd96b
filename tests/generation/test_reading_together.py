"""Batches whose prompts are read in one padded forward pass give what each prompt gets by itself."""

import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.interventions.ms_poe import MsPoE
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

SHAPES = ((3, 5, 2), (4, 1), (2, 2, 2, 2), (6, 3))
SUFFIXES = (4, 4, 7, 5)


PROMPTS = [random_prompt(random.Random(index), SHAPES[index], suffix=SUFFIXES[index]) for index in range(len(SHAPES))]


def tokens(generations):
    return [each.token_ids for each in generations]


def bits(generations):
    return [(each.token_ids, each.logprobs) for each in generations]


def check_near(found, expected, bound):
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=bound)
        assert one.order == other.order


class ForwardPasses(TorchDispatchMode):
    """Notes the rows and tokens of every forward pass. A hook would keep the cache from being used."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding.default:
            self.shapes.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_answers_alike_without_a_cache_with_a_cold_and_with_a_warm_one_and_one_by_one(method, llama):
    plain = InvariantModel(llama, method=method, backend="varlen")
    lm, fresh = (plain.with_cache(KeyValueCache()) for _ in range(2))
    options = {"max_new_tokens": 5}
    expected = [plain.generate(each, **options) for each in PROMPTS]
    together, cold, warm = (each.generate(PROMPTS, **options) for each in (plain, lm, lm))
    bound = rounding(plain.generate, PROMPTS, **options) if method in ("rotor", "pine", "structured") else math.inf
    for found in (together, cold, warm):
        check_near(found, expected, bound)
    sizes = [len(each.input_ids) - each.suffix_length for each in map(lm.prepare, PROMPTS)]
    alone = [lm.generate(each, **options) for each in PROMPTS]
    for found in (warm, alone):
        assert [each.usage.cached_tokens for each in found] == sizes
    check_near([fresh.generate(each, **options) for each in PROMPTS], expected, bound)


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma2", "gpt_neox", "mistral", "phi3", "bloom", "llama (dynamic scaling)"]
)
def test_so_it_is_in_other_families(family):
    window = {"max_position_embeddings": 16} if "dynamic" in family else {}  # prompts are longer
    method = "set-based" if family == "bloom" else "rotor"
    lm = InvariantModel(tiny_model(family, **window), backend="varlen", method=method)
    expected, options = [lm.generate(each, max_new_tokens=4) for each in PROMPTS], {"max_new_tokens": 4}
    bound = max(rounding(lm.generate, each, **options) for each in PROMPTS)
    check_near(lm.generate(PROMPTS, **options), expected, bound)


def test_one_forward_pass_reads_all_prompts_of_a_batch_and_with_a_cache_all_sets_and_all_questions(llama):
    lm = InvariantModel(llama, backend="varlen")
    prepared = [lm.prepare(each) for each in PROMPTS]
    longest = max(len(each.input_ids) for each in prepared)
    sets = max(len(each.input_ids) - each.suffix_length for each in prepared)
    questions = max(each.suffix_length for each in prepared)
    with ForwardPasses() as passes:
        lm.generate(PROMPTS, max_new_tokens=3)
    assert passes.shapes == [(4, longest), (4, 1), (4, 1)]
    lm = lm.with_cache(KeyValueCache())
    lm.generate(random_prompt(random.Random(9), (1, 1)), max_new_tokens=1)  # measures, once, how large a token is
    with ForwardPasses() as passes:
        lm.generate(PROMPTS, max_new_tokens=2)
        lm.generate(PROMPTS[::-1], max_new_tokens=2)
    assert passes.shapes == [(4, sets), (4, questions), (4, 1), (4, 1), (4, questions), (4, 1), (4, 1)]


@pytest.mark.parametrize("cache", [None, KeyValueCache()], ids=["uncached", "cached"])
def test_prompts_with_beams_or_without_segments_are_read_together(cache, llama):
    lm = InvariantModel(llama, backend="varlen", cache=cache)
    mixed = [PROMPTS[0], Prompt(prefix=[], segments=[], suffix=[5, 9, 33, 40]), PROMPTS[1]]
    for batch, beams in ((PROMPTS, 2), (mixed, 1), (mixed, 1)):  # the last one with what is cached by then
        expected = tokens([lm.with_cache(None).generate(each, max_new_tokens=4, num_beams=beams) for each in batch])
        with ForwardPasses() as passes:
            assert tokens(lm.generate(batch, max_new_tokens=4, num_beams=beams)) == expected
        assert beams == 1 or {rows for rows, count in passes.shapes if count > 1} == {len(batch)}


def test_a_set_that_several_prompts_of_a_batch_share_is_read_once(llama):
    lm = InvariantModel(llama, backend="varlen", cache=KeyValueCache())
    first, other, *_ = PROMPTS
    same = Prompt(first.prefix, first.segments[::-1], first.suffix)
    lm.generate(other, max_new_tokens=1)
    with ForwardPasses() as passes:
        found = lm.generate([first, other, same], max_new_tokens=1)
    assert [rows for rows, _ in passes.shapes] == [1, 3, 3]  # a set; three questions; the first token of three answers
    assert [bool(each.usage.cached_tokens) for each in found] == [False, True, True]
    bound = rounding(lm.generate, first, max_new_tokens=1)  # they are two rows of one product
    assert found[0].logprobs == pytest.approx(found[2].logprobs, abs=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_order_of_segments_changes_a_bit_of_a_batch(dtype):
    chance, model = random.Random(0), tiny_model("llama", num_hidden_layers=2).to(dtype)
    for cache in (None, KeyValueCache()):
        lm = InvariantModel(model, backend="varlen", cache=cache)
        expected = bits(lm.generate(PROMPTS, max_new_tokens=4))
        for _ in range(4):
            assert bits(lm.generate([each.shuffled(chance) for each in PROMPTS], max_new_tokens=4)) == expected


@pytest.mark.parametrize(
    "choice",
    [{"deterministic": True}, {"backend": "sdpa"}, {"method": "sequential", "intervention": MsPoE(first_layer=0)}, {}],
)
def test_what_does_not_pay_or_would_change_answers_is_read_one_by_one(choice, llama):
    lm = InvariantModel(llama, **{"backend": "varlen", **choice})
    batch = PROMPTS if choice else [random_prompt(random.Random(0), (40, 40)), *PROMPTS[1:3]]  # mostly padding
    with ForwardPasses() as passes:
        lm.generate(batch, max_new_tokens=1)
    assert {shape[0] for shape in passes.shapes if len(shape) == 2 and shape[1] > 1} == {1}


def test_with_deterministic_a_batch_changes_no_bit_of_an_answer():
    lm = InvariantModel(tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16), deterministic=True)
    alone = bits([lm.generate(each, max_new_tokens=8) for each in PROMPTS]) * 2
    assert bits(lm.generate(PROMPTS * 2, max_new_tokens=8)) == alone
    assert lm.generate([], max_new_tokens=8) == []
    assert not lm.with_method(deterministic=False).deterministic
