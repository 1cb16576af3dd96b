"""Bounds of rounding are larger than what rounding does on any machine, and smaller than what a mistake does."""

import math
import random

import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike, rounding


def test_sums_in_any_order_are_within_the_bound():
    draw = torch.Generator().manual_seed(0)
    left, right = torch.randn(8, 1000, generator=draw), torch.randn(1000, 8, generator=draw)
    exact, bound = left.double() @ right.double(), rounding(torch.mm, left, right)
    for seed in range(50):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
        one_by_one = (left[:, order, None] * right[order]).cumsum(dim=1)[:, -1]
        for found in (left[:, order] @ right[order], one_by_one):
            assert float((found - exact).abs().max()) <= bound
    assert bound < 1e-5 * float((left.abs() @ right.abs()).max()), "a term that is missing moves a sum by a thousandth"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bound_is_of_the_precision_that_is_computed_in(dtype):
    x = torch.linspace(-3, 3, 64).to(dtype)[None]
    eps = torch.finfo(dtype).eps
    largest = float(torch.softmax(x, -1).max())
    assert eps < rounding(torch.softmax, x, -1, dtype=dtype) / largest < 16 * eps


@pytest.mark.parametrize("method", ["rotor", "pine", "set-based"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2", "bloom"])
def test_a_token_that_is_read_one_position_late_is_found(family, method):
    lm = InvariantModel(tiny_model(family), method=method)
    prompt = random_prompt(random.Random(0), (9, 2, 11), suffix=5)
    first, *others = (list(map(int, each.token_ids)) for each in prompt.segments)
    late = Prompt(prompt.prefix, [[first[1], first[0], *first[2:]], *others], prompt.suffix)
    assert float((lm.logits(late) - lm.logits(prompt)).abs().max()) > 10 * rounding(lm.logits, prompt)


def test_the_same_arithmetic_is_rounded_alike_and_other_arithmetic_is_not():
    numbers = [0.1 * each for each in range(1, 30)]
    assert_rounded_alike(sum(numbers), math.fsum(numbers), len(numbers))
    for eps, one in ((2**-52, 1.0), (2**-23, torch.tensor(1.0)), (2**-7, torch.tensor(1.0).bfloat16())):
        assert_rounded_alike(one, 1 + 8 * eps, 8)
        with pytest.raises(AssertionError):
            assert_rounded_alike(one, 1 + 9 * eps, 8)
    with pytest.raises(AssertionError):
        assert_rounded_alike([1.0], [1.0, 1.0])


def test_where_rounding_decides_there_is_no_bound():
    tie = torch.tensor([[1.0, 1.0 + 2**-23]])
    with pytest.raises(AssertionError, match="rounding decides here"):
        rounding(lambda: (tie @ torch.eye(2)).argmax() + 1.0)
