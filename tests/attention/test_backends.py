"""Attention beyond the laws: gradients, parts, masks, the private operator; and positions, which move as a model's."""

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from transformers import DynamicCache
from transformers import masking_utils as masks

from invariant_rag import InvariantModel
from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.attention import BACKENDS, resolve_backend, softmax
from invariant_rag.attention.base import AttentionCall
from invariant_rag.attention.hook import _sliding_window
from invariant_rag.attention.per_model import cache_keyword, forward_parameters
from invariant_rag.attention.positions import Alibi, Rotation, candidates
from invariant_rag.errors import UnknownName, UnsupportedModel
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike, rounding
from tests.comparing import another_thread_at, assert_computes, frequencies

RING = (5, 1, 7, 3, 3, 1, 2, 9, 4)


def test_backends_have_names_and_auto_chooses_by_the_device():
    assert [resolve_backend(name).name for name in BACKENDS] == list(BACKENDS)
    assert resolve_backend("auto", torch.device("cuda")).name == "varlen"
    assert resolve_backend("auto", torch.device("cpu")).name == resolve_backend("auto").name == "sdpa"
    assert InvariantModel(tiny_model("llama")).with_method(backend="auto").backend.name == "sdpa"
    with pytest.raises(UnknownName, match=r"'auto'.*'reference'.*'sdpa'.*'varlen'"):
        resolve_backend("flex")


@pytest.mark.parametrize(("method", "trained"), [("rotor", "q_proj"), ("pine", "v_proj"), ("pine-in-place", "q_proj")])
def test_gradients_flow_and_are_the_same_where_some_projections_are_trained_alone(method, trained):
    model, prompt = tiny_model("llama"), random_prompt(random.Random(0), (3, 5, 2))
    lm, weight = InvariantModel(model, method=method), getattr(model.model.layers[0].self_attn, trained).weight
    prepared = lm.prepare(prompt)

    def logits():
        with lm.arranged([prepared]):
            return model(torch.tensor([prepared.input_ids]), use_cache=False).logits[0, -4:]

    def gradient(others):
        model.requires_grad_(others)
        weight.requires_grad_(True)
        model.zero_grad(set_to_none=True)
        logits().logsumexp(dim=-1).sum().backward()
        return weight.grad.clone()

    assert_computes(logits().detach(), lm.logits, prompt)
    bound, among_all = rounding(gradient, True), gradient(True)
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in model.parameters())
    torch.testing.assert_close(gradient(False), among_all, atol=bound, rtol=0)


@pytest.mark.parametrize(("method", "backend"), [("pine", "sdpa"), ("pine", "varlen"), ("rotor", "varlen")])
def test_another_text_with_the_same_arrangement_keeps_nothing_of_the_one_before(llama, method, backend):
    lm = InvariantModel(llama, method=method, ordering="given", backend=backend)
    one, other = (lm.prepare(random_prompt(random.Random(seed), (3, 5, 2))) for seed in (0, 1))
    assert one.arrangement == other.arrangement

    def logits_of(prepared):
        """Logits of the prompt and of a decoded token."""
        cache = {cache_keyword(forward_parameters(llama)): DynamicCache()}
        steps = (prepared.input_ids, [9])
        return torch.cat([llama(torch.tensor([ids]), use_cache=True, **cache).logits for ids in steps], dim=1)

    with torch.no_grad():
        with lm.arranged([other]):
            expected = logits_of(other)
        with lm.arranged([one]):
            assert not torch.equal(logits_of(one), expected)
            assert torch.equal(logits_of(other), expected)


PARTS = {
    **{f"rows, {n} together": ("llama", "sdpa", {"sdpa._BATCH": n}) for n in (0, 12, 10_000)},
    **{
        family: (family, "sdpa", {"softmax._QUERY_BLOCK": 3, "softmax._SCORE_BLOCK": 3})
        for family in ("mistral (sliding window)", "gemma2", "gpt_oss")
    },
    "packed queries": ("llama", "varlen", {"varlen.packing._BLOCK": 5}),
}
"""How prompts are attended to in parts: neighbouring rows, and blocks of the queries of long rows, or of all rows."""


@pytest.mark.parametrize("name", PARTS)
def test_prompts_give_the_same_in_parts(name, monkeypatch):
    family, backend, sizes = PARTS[name]
    model, draw = tiny_model(family, num_hidden_layers=2), random.Random(1)
    prompts = [random_prompt(draw, lengths, prefix=n) for lengths, n in (((20, 40, 7), 6), (RING, 0), (RING, 1))]
    for place, size in sizes.items():
        monkeypatch.setattr(f"invariant_rag.attention.{place}", size)
    for method, prompt in product(("rotor", "pine", "isolated", "ape"), prompts):
        exact, lm = (InvariantModel(model, method=method, backend=each) for each in ("reference", backend))
        assert_computes(exact.logits(prompt), lm.logits, prompt)


def test_the_window_is_read_off_the_mask_of_transformers_and_other_masks_are_refused():
    for window in (1, 2, 3, 16, 4095, 4096, 100_000):
        assert _sliding_window(masks.sliding_window_causal_mask_function(window)) == window
    assert _sliding_window(masks.causal_mask_function) is None
    chunked = masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    for mask in (chunked, masks.bidirectional_mask_function):
        with pytest.raises(UnsupportedModel):
            _sliding_window(mask)


# --- the private operator of PyTorch, and what stands in for it where a release has none ---


@pytest.mark.parametrize("kernel", dict.fromkeys([softmax._kernel(), softmax.ungrouped_kernel]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("count", "is_causal"), [(1, False), (5, True), (5, False)])
def test_matrix_products_compute_what_the_fused_operator_computes(kernel, dtype, count, is_causal):
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, count, 16, generator=draw, dtype=torch.float64).to(dtype)
    keys, values = (torch.randn(3, 2, 5, 16, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    mask = torch.zeros(3, 1, count, 5, dtype=dtype)
    mask[..., 0] = float("-inf")
    for bias in (None, None if is_causal else mask):
        options = {"is_causal": is_causal, "attn_mask": bias, "scale": 0.3}
        one, other = (each(queries, keys, values, **options) for each in (kernel, softmax.matmul_kernel))
        bound = rounding(partial(softmax.matmul_kernel, **options), queries, keys, values, dtype=dtype)
        for fast, slow in zip(one, other, strict=True):
            torch.testing.assert_close(fast, slow, atol=bound, rtol=0)


@pytest.mark.parametrize("method", ["rotor", "pine"])
@pytest.mark.parametrize("named", ["_an_operator_that_no_release_has", f"{softmax.OPERATOR}_backward"])
def test_an_operator_that_is_missing_or_computes_something_else_is_not_used_and_answers_are_the_same(
    named, method, llama, monkeypatch, caplog, request
):
    """The kernel is chosen once for each process: it is chosen anew in this test and after it."""
    request.addfinalizer(softmax._kernel.cache_clear)
    lm, prompt = InvariantModel(llama, method=method), random_prompt(random.Random(0), (5, 1, 70, 3))
    with_operator = lm.logits(prompt)
    assert softmax._kernel() is not softmax.matmul_kernel
    softmax._kernel.cache_clear()
    monkeypatch.setattr(softmax, "OPERATOR", named)
    assert_computes(with_operator, lm.logits, prompt)
    assert softmax._kernel() is softmax.matmul_kernel
    assert sum("matrix products" in record.message for record in caplog.records) == 1
    assert "not those" in softmax._difference(lambda q, k, v, **options: softmax.matmul_kernel(q, k, 2 * v, **options))
    assert torch.equal(lm.logits(prompt.shuffled(random.Random(1))), lm.logits(prompt))


# --- positions ---

ENCODINGS = {
    "half-split": Rotation(frequencies([1.0, 0.3, 0.05]), "inv_freq", interleaved=False),
    "interleaved": Rotation(frequencies([1.0, 0.3, 0.05]), "inv_freq", interleaved=True),
    "ALiBi": Alibi(torch.tensor([0.5, 0.125], dtype=torch.float64)),
}


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
def test_shifts_add_up_and_undo_each_other_and_are_complex_factors_or_looked_up_in_a_table_to_its_ends(encoding):
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    turned = encoding.rotate_by(encoding.rotate_by(x, 700), -3)
    assert_rounded_alike(turned, encoding.rotate_by(x, 697), 3 * 700, magnitude=700)  # positions of up to 700
    assert_rounded_alike(encoding.rotate_by(turned, -697), x, 3 * 700, magnitude=700)
    shifts = torch.tensor([[5, -2, 0], [40, 1, -40]])
    assert_rounded_alike(encoding.rotate_each(x, shifts, 40), encoding.rotate_by(x, shifts))
    if isinstance(encoding, Rotation):  # one factor for each pair of dimensions
        turns = torch.exp(1j * shifts[..., None] * encoding.frequencies().double())
        assert_rounded_alike(encoding.rotate_with(x, turns), encoding.rotate_by(x, shifts), magnitude=40)


def test_scores_of_alibi_lose_slope_times_distance_whether_keys_are_a_part_of_the_prompt_or_more():
    alibi, shapes = ENCODINGS["ALiBi"], ((2, 3, 8), (1, 7, 8), (1, 7, 8))
    call = AttentionCall(*(torch.randn(shape).double() for shape in shapes), rotation=alibi, scaling=0.25)
    for at, known in (((0, 1, 2, 2, 3, 9, 10), 7), ((0, 1, 2, 2, 9, 10, 11), 5), ((0, 1, 2, 2, 9, 10, 11, 12), 8)):
        prompt, positions = Arrangement(Layout((known,), ()), (), at[:known]), torch.tensor(at[:7])
        encoded = alibi.encoded(replace(call, scratch={}), prompt)
        biases = alibi.slopes[:, None, None] * (positions[-3:, None] - positions)
        expected = call.queries @ call.keys.mT * call.scaling - biases
        assert_rounded_alike(encoded.queries @ encoded.keys.mT * call.scaling, expected)


def test_the_table_of_angles_follows_the_frequencies():
    rotation = Rotation(frequencies([1.0, 0.3, 0.05]), "inv_freq")
    x, shift = torch.randn(1, 8), torch.tensor([3])
    before = rotation.rotate_each(x, shift, 10)
    rotation.module.inv_freq = torch.tensor([0.7, 0.2, 0.01])
    after = rotation.rotate_each(x, shift, 10)
    assert not torch.equal(before, after)
    assert_rounded_alike(after, rotation.rotate_by(x, 3))
    rotation.module.inv_freq *= 2  # the same tensor, with other numbers
    assert_rounded_alike(rotation.rotate_each(x, shift, 10), rotation.rotate_by(x, 3))
    assert not torch.equal(rotation.rotate_each(x, shift, 10), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_of_a_table_of_sines_are_exact_in_half_precision_too(dtype):
    """GPT-J keeps a table `[positions, R]` in each layer. The angles of its last position are nearly exact."""
    model = tiny_model("gptj", max_position_embeddings=2048).to(dtype)
    found = [each.frequencies() for each in candidates(model) if each.module is not None]
    exact = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert len(found) == 2, "one for each layout, from the first layer"
    angles = torch.finfo(dtype).eps + 2047 * torch.finfo(torch.float32).eps  # of the table, and of 2047 radians in it
    torch.testing.assert_close(found[0], exact, atol=angles / 2047, rtol=0)


# --- frequencies that depend on the length: what other threads run on the model meanwhile changes no bit ---

PROMPT = random_prompt(random.Random(0), (9, 4, 11), suffix=5)
BEYOND = random_prompt(random.Random(0), (30, 4, 61), suffix=5)
"""Longer than the trained length (64)."""
EVEN_LONGER = torch.arange(3, 123)[None] % 90
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 4.0}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0 + index for index in range(8)]}
KINDS = {
    "dynamic": {"family": "llama (dynamic scaling)"},
    "longrope": {"family": "llama", "rope_parameters": LONGROPE, "max_position_embeddings": 256},
}


def model_of(kind):
    return tiny_model(**KINDS[kind], eos_token_id=None, num_hidden_layers=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["rotor", "pine", "sequential"])
def test_another_thread_in_the_middle_of_a_forward_pass_changes_no_bit_and_gets_its_own_frequencies(kind, method):
    """Around every rotation and in the middle of the layers, another thread runs the model to its end."""
    model = model_of(kind)
    lm, rotary = InvariantModel(model, method=method), model.model.rotary_emb
    for prompt, other in ((PROMPT, EVEN_LONGER), (BEYOND, EVEN_LONGER[:, :5])):
        logits, answer = lm.logits(prompt), lm.generate(prompt, max_new_tokens=2)
        expected = model_of(kind)(input_ids=other, use_cache=False).logits
        places = [rotary, model.model.layers[-1]]
        call = partial(model, input_ids=other, use_cache=False)
        with another_thread_at(places, lambda call=call: call().logits, after=[rotary]) as seen:
            assert torch.equal(lm.logits(prompt), logits)
            assert lm.generate(prompt, max_new_tokens=2).logprobs == answer.logprobs
        assert len(seen) >= 6
        assert all(torch.equal(each, expected) for each in seen)
    assert "forward" not in vars(rotary), "the model must be as it was"


def test_one_call_within_another_or_after_it_has_its_own_frequencies():
    """The plain model remembers no prompt beyond the trained length either."""
    model = model_of("dynamic")
    lm = InvariantModel(model)
    alone, prepared = lm.logits(PROMPT), lm.prepare(BEYOND)
    ids, positions = torch.tensor([prepared.input_ids]), torch.tensor([prepared.positions])
    with lm.arranged([prepared]), torch.no_grad():
        before = model(ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(lm.logits(PROMPT), alone)
        assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, before)
    lm.generate(BEYOND, max_new_tokens=4)
    assert torch.equal(lm.logits(PROMPT), alone)
    assert model.model.rotary_emb.max_seq_len_cached == 64
