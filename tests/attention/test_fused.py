"""The private operator of PyTorch, and what stands in for it where a release has none."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel
from invariant_rag.attention import softmax
from invariant_rag.testing import random_prompt
from invariant_rag.testing.rounding import rounding


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    """The kernel is chosen once for each process: choose it anew in this test and after it."""
    softmax._kernel.cache_clear()
    yield
    softmax._kernel.cache_clear()


@pytest.mark.parametrize("kernel", dict.fromkeys([softmax._kernel(), softmax.ungrouped_kernel]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("count", "is_causal"), [(1, False), (5, True), (5, False)])
def test_matrix_products_compute_what_the_fused_operator_computes(
    kernel: softmax.Kernel, dtype: torch.dtype, count: int, is_causal: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, count, 16, generator=draw, dtype=torch.float64).to(dtype)
    keys, values = (torch.randn(3, 2, 5, 16, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    mask = torch.zeros(3, 1, count, 5, dtype=dtype)
    mask[..., 0] = float("-inf")
    for bias in (None, None if is_causal else mask):
        options: dict[str, Any] = {"is_causal": is_causal, "attn_mask": bias, "scale": 0.3}
        one, other = (each(queries, keys, values, **options) for each in (kernel, softmax.matmul_kernel))
        bound = rounding(partial(softmax.matmul_kernel, **options), queries, keys, values, dtype=dtype)
        for fast, slow in zip(one, other, strict=True):
            torch.testing.assert_close(fast, slow, atol=bound, rtol=0)


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("method", ["rotor", "pine"])
def test_a_pytorch_without_the_operator_gives_the_same_answers_and_says_so(
    llama: PreTrainedModel, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm, prompt = InvariantModel(llama, method=method), random_prompt(random.Random(0), (5, 1, 70, 3))
    with_operator = lm.logits(prompt)
    softmax._kernel.cache_clear()
    monkeypatch.setattr(softmax, "OPERATOR", "_an_operator_that_no_release_has")
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(lm.logits(prompt), with_operator, atol=rounding(lm.logits, prompt), rtol=0)
    assert sum("matrix products" in record.message for record in caplog.records) == 1
    for order in range(3):
        assert torch.equal(lm.logits(prompt.shuffled(random.Random(order))), lm.logits(prompt))


@pytest.mark.usefixtures("fresh_choice")
def test_an_operator_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "OPERATOR", "_scaled_dot_product_flash_attention_for_cpu_backward")
    assert softmax._kernel() is softmax.matmul_kernel
    softmax._kernel.cache_clear()
    monkeypatch.undo()
    assert softmax._kernel() is not softmax.matmul_kernel
