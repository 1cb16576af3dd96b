"""Length-dependent rotary frequencies: what other threads run on the model meanwhile changes no bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Thread

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel
from invariant_rag.testing import random_prompt, tiny_model

PROMPT = random_prompt(random.Random(0), (9, 4, 11), suffix=5)
BEYOND = random_prompt(random.Random(0), (30, 4, 61), suffix=5)
"""Longer than the trained length (64)."""
EVEN_LONGER = torch.arange(3, 123)[None] % 90
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}


@cache
def model_of(kind: str) -> PreTrainedModel:
    if kind == "dynamic":
        return tiny_model("llama (dynamic scaling)", eos_token_id=None, num_hidden_layers=2)
    options = {"eos_token_id": None, "num_hidden_layers": 2, "max_position_embeddings": 256}
    return tiny_model("llama", rope_parameters=LONGROPE, **options)


@contextmanager
def another_thread_at_every_layer(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Around every rotation and in the middle of the layers, let another thread run the model to its end."""
    logits: list[torch.Tensor] = []
    busy = False

    def call() -> None:
        with torch.no_grad():
            logits.append(model(input_ids=ids, use_cache=False).logits)

    def intrude(*_: object) -> None:
        nonlocal busy
        if not busy:
            busy = True
            thread = Thread(target=call)
            thread.start()
            thread.join()
            busy = False

    rotary, layer = model.model.rotary_emb, model.model.layers[-1]
    hooks = [each.register_forward_pre_hook(intrude) for each in (rotary, layer)]
    hooks.append(rotary.register_forward_hook(intrude))
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("method", ["rotor", "pine", "sequential"])
def test_another_thread_in_the_middle_of_a_forward_pass_changes_no_bit(kind: str, method: str) -> None:
    model = model_of(kind)
    lm = InvariantModel(model, method=method)
    for prompt, other in ((PROMPT, EVEN_LONGER), (BEYOND, EVEN_LONGER[:, :5])):
        logits, answer = lm.logits(prompt), lm.generate(prompt, max_new_tokens=2)
        with another_thread_at_every_layer(model, other) as seen:
            assert torch.equal(lm.logits(prompt), logits)
            assert lm.generate(prompt, max_new_tokens=2).logprobs == answer.logprobs
        assert len(seen) >= 6


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_another_thread_gets_the_frequencies_of_its_own_prompt(kind: str) -> None:
    model, ids = copy.deepcopy(model_of(kind)), torch.tensor([[5, 6, 7, 8, 9]])
    expected = copy.deepcopy(model)(input_ids=ids, use_cache=False).logits
    with another_thread_at_every_layer(model, ids) as seen:
        InvariantModel(model).generate(BEYOND, max_new_tokens=2)
    assert len(seen) >= 6
    assert all(torch.equal(each, expected) for each in seen)
    assert "forward" not in vars(model.model.rotary_emb), "the model must be as it was"


def test_one_call_within_another_has_its_own_frequencies() -> None:
    model = model_of("dynamic")
    lm = InvariantModel(model)
    alone, prepared = lm.logits(PROMPT), lm.prepare(BEYOND)
    ids, positions = torch.tensor([prepared.input_ids]), torch.tensor([prepared.positions])
    with lm.arranged([prepared]), torch.no_grad():
        before = model(ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(lm.logits(PROMPT), alone)
        assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, before)
