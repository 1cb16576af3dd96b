"""The test kit: its inputs; bounds of rounding; `assert_order_invariant`, which fails for the order, never for chance.

Bounds are larger than what rounding does on any machine, and smaller than what a mistake does.
"""

import contextlib
import math
import random

import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import AuditFailed, InvalidChoice, NoiseWarning
from invariant_rag.testing import assert_order_invariant, random_prompt, tiny_model, toy_tokenizer
from invariant_rag.testing.order_invariance import rounds
from invariant_rag.testing.ordinary_prompts import KINDS, ORDINARY
from invariant_rag.testing.rounding import assert_rounded_alike, rounding
from tests.audit.known import first, noisy, records, symmetric, where_first


def test_a_seed_gives_its_own_weights_and_prompts_and_leaks_nowhere():
    torch.manual_seed(5)
    before, state = torch.get_rng_state(), random.getstate()
    one, same, other = (tiny_model("llama", seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    prompts = [random_prompt(random.Random(seed), (2, 3)) for seed in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert torch.equal(torch.get_rng_state(), before), "torch's generator is as it was"
    assert random.getstate() == state


def test_there_are_200_different_conversations_of_many_kinds_that_a_chat_template_takes():
    assert len(ORDINARY) == len(set(map(repr, ORDINARY))) == 200
    assert len(KINDS) >= 10
    assert all(KINDS.values())
    tokenizer = toy_tokenizer()
    for conversation in ORDINARY:
        assert conversation[-1]["role"] == "user"
        assert all(message["content"].strip() for message in conversation)
        assert tokenizer.apply_chat_template(list(conversation), tokenize=False)
    text = "\n".join(message["content"] for conversation in ORDINARY for message in conversation)
    for alarm in ("[1] ", "\n2. ", "\n- ", "Source:", "context", "Document(", r"\ue200", "\n---\n", "<item id="):
        assert alarm in text, alarm  # some hold what a careless check takes for documents


def test_a_system_that_follows_the_order_fails_with_the_order_that_came_back_also_in_noise_which_is_warned_of():
    with pytest.raises(AssertionError, match=r"changes the outcome of \d+ of 8 questions, again and again") as failed:
        assert_order_invariant(first, records(8))
    assert "with the documents in the order" in str(failed.value)
    assert_order_invariant(first, records(8), allowed=1.0)
    assert_order_invariant(symmetric, records(8))
    with pytest.raises(InvalidChoice, match="allowed"):
        assert_order_invariant(first, records(2), allowed=2)
    assert rounds(1) < rounds(20) < rounds(2000)
    with pytest.raises(AssertionError):
        assert_order_invariant(noisy(first, 0.1), records(40))
    with pytest.warns(NoiseWarning, match="changes by chance"):
        assert_order_invariant(noisy(symmetric, 0.5), records(40))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("noise", [0.01, 0.5])
@pytest.mark.filterwarnings("ignore::invariant_rag.errors.NoiseWarning")
def test_chance_fails_no_run(noise, cached):
    passed = 0
    for run in range(12):
        with contextlib.suppress(AssertionError):
            assert_order_invariant(noisy(symmetric, noise, cached=cached, seed=run), records(20), seed=run)
            passed += 1
    assert passed >= 11


def test_an_order_that_always_fails_is_an_outcome_and_a_system_that_always_does_is_none():
    with pytest.raises(AssertionError, match="no answer"):
        assert_order_invariant(where_first(lambda: 1 / 0, symmetric), records(8), retries=0)
    with pytest.raises(AuditFailed, match="the same with other texts in the documents"):
        assert_order_invariant(lambda question, segments: question, records(8))
    tried = []
    with pytest.raises(AuditFailed, match="every call failed: ZeroDivisionError"):
        assert_order_invariant(lambda *_: tried.append(1) or 1 / 0, records(40), retries=0)
    assert len(tried) == 10


# --- bounds of rounding ---


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


def test_the_bound_is_of_the_precision_that_is_computed_in_and_where_rounding_decides_there_is_none():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, eps = torch.linspace(-3, 3, 64).to(dtype)[None], torch.finfo(dtype).eps
        assert eps < rounding(torch.softmax, x, -1, dtype=dtype) / float(torch.softmax(x, -1).max()) < 16 * eps
    tie = torch.tensor([[1.0, 1.0 + 2**-23]])
    with pytest.raises(AssertionError, match="rounding decides here"):
        rounding(lambda: (tie @ torch.eye(2)).argmax() + 1.0)


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
