"""Law 1 over random prompts: every permutation gives the same tokens and arrangement, and so the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, permutations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.methods import METHODS

fixtures = [HealthCheck.function_scoped_fixture]
token = st.integers(3, 127)
text = st.lists(token, max_size=4)
segments = st.one_of(
    st.lists(st.lists(token, max_size=6), max_size=6),
    st.lists(st.sampled_from([[5], [5, 6], [7]]), min_size=2, max_size=6),  # duplicates and shared beginnings
)
FOUR = SegmentSet([[9, 4, 77], [30], [9, 4], [200, 201, 202, 203, 204]])
SINGLE, HALF = torch.float32, torch.bfloat16
INVARIANT = [name for name in METHODS if name != "sequential"]
BACKENDS = ("sdpa", "varlen", "reference")
PAIRS = [
    *((method, (SINGLE, HALF)[number % 2], BACKENDS[number % 2], 1) for number, method in enumerate(INVARIANT)),
    *((method, (HALF, SINGLE)[number % 2], BACKENDS[1 - number % 2], 5) for number, method in enumerate(INVARIANT)),
    *((method, (SINGLE, HALF)[number % 2], "reference", 11) for number, method in enumerate(INVARIANT[::3])),
]
"""Every method with both fast backends and both dtypes; every `step`-th permutation."""


@pytest.fixture(scope="module")
def models(golden_model: PreTrainedModel) -> dict[torch.dtype, PreTrainedModel]:
    """The golden Llama in two dtypes."""
    half = type(golden_model)(golden_model.config)
    half.load_state_dict(golden_model.state_dict())
    return {SINGLE: golden_model, HALF: half.to(HALF).eval()}


PREPARED = {
    "method": st.sampled_from(sorted(METHODS)),
    "ordering": st.sampled_from(["lexical", "lexical-reversed", "frequency"]),
    "prefix": text,
    "sets": st.lists(st.tuples(segments, text), min_size=1, max_size=3),
    "shuffle": st.randoms(),
}
ANSWERED = {
    **PREPARED,
    "dtype": st.sampled_from([SINGLE, HALF]),
    "backend": st.sampled_from(["sdpa", "varlen"]),
    "suffix": st.lists(token, min_size=1, max_size=4),
}


def prompt_of(case: dict[str, Any]) -> Prompt:
    *before, (last, _) = case["sets"]
    parts = chain.from_iterable((SegmentSet(each), between) for each, between in before)
    return Prompt.of(case["prefix"], *parts, SegmentSet(last), case.get("suffix", [4]))


@settings(max_examples=150, deadline=None, suppress_health_check=fixtures)
@given(case=st.fixed_dictionaries(PREPARED))
def test_every_order_is_prepared_alike(llama: PreTrainedModel, case: dict[str, Any]) -> None:
    """Without a forward pass: tokens and arrangement are all that a model computes with."""
    lm, prompt = InvariantModel(llama, method=case["method"], ordering=case["ordering"]), prompt_of(case)
    expected = lm.prepare(prompt)
    for other in (prompt.shuffled(case["shuffle"]), backwards(prompt)):
        found = lm.prepare(other)
        assert (found.input_ids, found.arrangement) == (expected.input_ids, expected.arrangement)
        assert [other.segments[i] for i in found.order] == [prompt.segments[i] for i in expected.order]


def backwards(prompt: Prompt) -> Prompt:
    """The prompt with the segments of every set in the opposite order."""
    return prompt.with_sets(each.permuted(range(len(each))[::-1]) for each in prompt.sets)


@settings(max_examples=40, deadline=None, suppress_health_check=fixtures)
@given(case=st.fixed_dictionaries(ANSWERED))
def test_logits_and_tokens_ignore_the_order_of_segments(
    models: dict[torch.dtype, PreTrainedModel], case: dict[str, Any]
) -> None:
    lm = InvariantModel(models[case["dtype"]], **{name: case[name] for name in ("method", "ordering", "backend")})
    prompt = prompt_of(case)
    other = prompt.shuffled(case["shuffle"])
    assert torch.equal(lm.logits(prompt), lm.logits(other))
    one, two = lm.generate(prompt, max_new_tokens=2), lm.generate(other, max_new_tokens=2)
    assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)
    assert [prompt.segments[i] for i in one.order] == [other.segments[i] for i in two.order]


@pytest.mark.parametrize(("method", "dtype", "backend", "step"), PAIRS)
def test_every_permutation_of_four_segments_gives_the_same_bits(
    models: dict[torch.dtype, PreTrainedModel], method: str, dtype: torch.dtype, backend: str, step: int
) -> None:
    lm = InvariantModel(models[dtype], method=method, backend=backend)
    prompt = Prompt([3, 8], FOUR, [11, 12])
    listed: Sequence[tuple[int, ...]] = list(permutations(range(4)))[::step]
    orders = [Prompt(prompt.prefix, prompt.segments.permuted(order), prompt.suffix) for order in listed]
    assert len({tuple(token for each in other.segments for token in each.token_ids or ()) for other in orders}) >= 3
    expected = lm.logits(prompt)
    assert all(torch.equal(lm.logits(other), expected) for other in orders)


@pytest.mark.parametrize("method", INVARIANT)
def test_many_segments_and_very_long_ones_in_other_orders_give_the_same_bits(
    models: dict[torch.dtype, PreTrainedModel], method: str
) -> None:
    """Shifts reach twice the length of the prompt: a reader moves one way and what it reads the other."""
    state = random.Random(7)
    many = INVARIANT.index(method) % 2 and method != "pine"
    dtype, lengths = (HALF, [state.randrange(1, 6) for _ in range(30)]) if many else (SINGLE, (300, 3, 250, 1))
    chosen = [[state.randrange(5, 500) for _ in range(length)] for length in lengths]
    lm, prompt = InvariantModel(models[dtype], method=method), Prompt([3, 4], chosen, [9])
    expected = lm.logits(prompt)
    assert torch.isfinite(expected).all()
    assert torch.equal(lm.logits(prompt.shuffled(state)), expected)
