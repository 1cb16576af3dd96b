"""What the fast backends do beyond the laws: gradients, neighbouring rows, masks, and PyTorch's private operator."""

import logging
import random
from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers import masking_utils as masks

from invariant_rag import InvariantModel
from invariant_rag.attention import BACKENDS, resolve_backend, softmax
from invariant_rag.attention.hook import _sliding_window, active_attention, override_attention
from invariant_rag.attention.per_model import cache_keyword, forward_parameters
from invariant_rag.errors import UnknownName, UnsupportedModel
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding
from tests.comparing import assert_computes

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


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_another_text_with_the_same_arrangement_keeps_nothing_of_the_one_before(llama, backend):
    lm = InvariantModel(llama, method="pine", ordering="given", backend=backend)
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
    **{f"rows, {n} together": ("llama", {"attention.sdpa._BATCH": n}) for n in (0, 12, 10_000)},
    **{
        family: (family, {"attention.softmax._QUERY_BLOCK": 3, "attention.softmax._SCORE_BLOCK": 3})
        for family in ("mistral (sliding window)", "gemma2", "gpt_oss")
    },
}
"""How prompts are attended to in parts: neighbouring rows, and blocks of the queries of long rows."""


@pytest.mark.parametrize("name", PARTS)
def test_prompts_give_the_same_in_parts(name, monkeypatch):
    family, sizes = PARTS[name]
    model, draw = tiny_model(family, num_hidden_layers=2), random.Random(1)
    prompts = [random_prompt(draw, lengths, prefix=n) for lengths, n in (((20, 40, 7), 6), (RING, 0), (RING, 1))]
    models = [InvariantModel(model, method=each) for each in ("rotor", "pine", "isolated")]
    expected = [[lm.with_method(backend="reference").logits(each) for each in prompts] for lm in models]
    for place, size in sizes.items():
        monkeypatch.setattr(f"invariant_rag.{place}", size)
    for lm, of_lm in zip(models, expected, strict=True):
        for prompt, logits in zip(prompts, of_lm, strict=True):
            assert_computes(logits, lm.logits, prompt)


def test_the_window_is_read_off_the_mask_of_transformers_and_other_masks_are_refused():
    for window in (1, 2, 3, 16, 4095, 4096, 100_000):
        assert _sliding_window(masks.sliding_window_causal_mask_function(window)) == window
    assert _sliding_window(masks.causal_mask_function) is None
    chunked = masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    for mask in (chunked, masks.bidirectional_mask_function):
        with pytest.raises(UnsupportedModel):
            _sliding_window(mask)


def test_a_failure_leaves_the_model_and_the_thread_as_they_were():
    def failing(inputs):
        raise KeyError("inside")

    model = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(KeyError, match="inside"), override_attention(model, failing):
        model(torch.tensor([[3, 4]]))
    assert model.config._attn_implementation == "sdpa"
    assert active_attention() is None


# --- the private operator of PyTorch, and what stands in for it where a release has none ---


@pytest.fixture
def fresh_choice():
    """The kernel is chosen once for each process: choose it anew in this test and after it."""
    softmax._kernel.cache_clear()
    yield
    softmax._kernel.cache_clear()


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


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("method", ["rotor", "pine"])
def test_a_pytorch_without_the_operator_gives_the_same_answers_and_says_so(llama, method, monkeypatch, caplog):
    lm, prompt = InvariantModel(llama, method=method), random_prompt(random.Random(0), (5, 1, 70, 3))
    with_operator = lm.logits(prompt)
    softmax._kernel.cache_clear()
    monkeypatch.setattr(softmax, "OPERATOR", "_an_operator_that_no_release_has")
    with caplog.at_level(logging.WARNING):
        assert_computes(with_operator, lm.logits, prompt)
    assert sum("matrix products" in record.message for record in caplog.records) == 1
    assert torch.equal(lm.logits(prompt.shuffled(random.Random(1))), lm.logits(prompt))


@pytest.mark.usefixtures("fresh_choice")
def test_an_operator_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(softmax, "OPERATOR", "_scaled_dot_product_flash_attention_for_cpu_backward")
    assert softmax._kernel() is softmax.matmul_kernel
    softmax._kernel.cache_clear()
    monkeypatch.undo()
    assert softmax._kernel() is not softmax.matmul_kernel
