"""Law 1 over random prompts: every permutation gives the same bits, at the public entry."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.methods import METHODS

quick = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
token = st.integers(3, 127)
segment = st.lists(token, min_size=0, max_size=6)
segments = st.one_of(
    st.lists(segment, min_size=0, max_size=6),
    st.lists(st.sampled_from([[5], [5, 6], [7]]), min_size=2, max_size=6),  # duplicates and shared beginnings
)


@pytest.fixture(scope="module")
def models(golden_model: PreTrainedModel) -> dict[torch.dtype, PreTrainedModel]:
    """The golden Llama in two dtypes."""
    half = type(golden_model)(golden_model.config)
    half.load_state_dict(golden_model.state_dict())
    return {torch.float32: golden_model, torch.bfloat16: half.to(torch.bfloat16).eval()}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, models: dict[torch.dtype, PreTrainedModel]) -> PreTrainedModel:
    """The golden Llama in one dtype."""
    return models[request.param]


@pytest.mark.parametrize(
    ("method", "ordering"),
    [*((method, "lexical") for method in METHODS), ("rotor", "lexical-reversed"), ("pine", "frequency")],
)
@quick
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    prefix=segment,
    chosen=segments,
    suffix=st.lists(token, min_size=1, max_size=4),
    shuffle=st.randoms(),
)
def test_logits_and_tokens_ignore_the_order_of_segments(
    models: dict[torch.dtype, PreTrainedModel],
    method: str,
    ordering: str,
    dtype: torch.dtype,
    prefix: list[int],
    chosen: list[list[int]],
    suffix: list[int],
    shuffle: random.Random,
) -> None:
    lm = InvariantModel(models[dtype], method=method, ordering=ordering)
    prompt = Prompt(prefix, chosen, suffix)
    other = prompt.shuffled(shuffle)
    assert torch.equal(lm.logits(prompt), lm.logits(other))
    one, two = lm.generate(prompt, max_new_tokens=3), lm.generate(other, max_new_tokens=3)
    assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)
    assert [prompt.segments[i] for i in one.order] == [other.segments[i] for i in two.order]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "sequential"])
def test_every_permutation_of_four_segments_gives_the_same_bits(model: PreTrainedModel, method: str) -> None:
    lm = InvariantModel(model, method=method)
    chosen = [[9, 4, 77], [30], [9, 4], [200, 201, 202, 203, 204]]
    expected = lm.logits(Prompt([3, 8], chosen, [11, 12]))
    for order in itertools.permutations(range(4)):
        assert torch.equal(lm.logits(Prompt([3, 8], [chosen[i] for i in order], [11, 12])), expected)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "sequential"])
def test_thirty_segments_in_five_orders_give_the_same_bits(model: PreTrainedModel, method: str) -> None:
    lm, state = InvariantModel(model, method=method), random.Random(7)
    prompt = Prompt([3, 4], [[state.randrange(5, 500) for _ in range(state.randrange(1, 6))] for _ in range(30)], [9])
    expected = lm.logits(prompt)
    for _ in range(5):
        assert torch.equal(lm.logits(prompt.shuffled(state)), expected)


@pytest.mark.parametrize("method", METHODS)
def test_several_sets_are_invariant_each_on_its_own(model: PreTrainedModel, method: str) -> None:
    lm = InvariantModel(model, method=method, ordering="lexical")
    first, second = SegmentSet([[5, 6], [7], [8, 9, 10]]), SegmentSet([[20], [21, 22, 23]])
    expected = lm.logits(Prompt.of([3], first, [4, 4], second, [11, 12]))
    shuffled = Prompt.of([3], first.permuted([2, 0, 1]), [4, 4], second.permuted([1, 0]), [11, 12])
    assert torch.equal(lm.logits(shuffled), expected)
    swapped = Prompt.of([3], second, [4, 4], first, [11, 12])
    assert not torch.equal(lm.logits(swapped), expected), "the order of the sets themselves does carry meaning"


def test_a_set_sees_another_as_plain_text_before_it(model: PreTrainedModel) -> None:
    """With one segment in the first set, a prompt of two sets is a prompt of one with a longer prefix."""
    lm = InvariantModel(model)
    second = SegmentSet([[20], [21, 22, 23], [24, 25]])
    several = lm.logits(Prompt.of([3], SegmentSet([[5, 6]]), [4], second, [11, 12]))
    assert torch.equal(several, lm.logits(Prompt([3, 5, 6, 4], second, [11, 12])))


def test_the_reference_is_invariant_too(model: PreTrainedModel) -> None:
    for method in METHODS:
        lm = InvariantModel(model, method=method, ordering="lexical", backend="reference")
        prompt = Prompt([3], [[5, 6], [7], [8, 9]], [11])
        assert torch.equal(lm.logits(prompt), lm.logits(Prompt([3], [[8, 9], [5, 6], [7]], [11])))


@pytest.mark.parametrize("method", METHODS)
def test_long_segments_of_very_different_lengths_are_arranged_too(golden_model: PreTrainedModel, method: str) -> None:
    """Shifts reach twice the length of the prompt: a reader moves one way and what it reads the other."""
    state = random.Random(2)
    chosen = [[state.randrange(5, 500) for _ in range(length)] for length in (700, 3, 650, 1)]
    lm, prompt = InvariantModel(golden_model, method=method, ordering="lexical"), Prompt([3], chosen, [9, 8])
    expected = lm.logits(prompt)
    assert torch.isfinite(expected).all()
    assert torch.equal(lm.logits(prompt.shuffled(state)), expected)
