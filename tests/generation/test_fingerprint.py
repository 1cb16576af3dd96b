"""The fingerprint of a model: every change in place is noticed, and nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag.generation import fingerprint as module
from invariant_rag.generation import shared_state
from invariant_rag.generation.fingerprint import fingerprint
from invariant_rag.generation.shared_state import SharedState
from invariant_rag.testing.families import FAMILIES, tiny_model


def _swapped(data: torch.Tensor, first: int, second: int) -> None:
    data[[first, second]] = data[[second, first]]


CHANGES: dict[str, Callable[[Any], object]] = {
    "one weight through .data": lambda model: model.lm_head.weight.data[3, 5].add_(1e-3),
    "the last bit of a weight": lambda model: model.lm_head.weight.data.view(torch.int32)[9, 1].bitwise_xor_(1),
    "two rows swapped": lambda model: _swapped(model.model.layers[1].mlp.up_proj.weight.data, 2, 7),
    "two columns swapped": lambda model: _swapped(model.model.layers[1].mlp.up_proj.weight.data.T, 2, 7),
    "a matrix negated": lambda model: model.model.layers[0].self_attn.k_proj.weight.data.neg_(),
    "two signs": lambda model: model.model.norm.weight.data[1:4:2].neg_(),
    "weights exchanged between layers": lambda model: setattr(
        model.model.layers[0].mlp, "up_proj", model.model.layers[1].mlp.up_proj
    ),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(1.01),
    "the epsilon of a norm": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-3),
    "training": lambda model: model.train(),
    "adapters": lambda model: setattr(model.model.layers[0].mlp.up_proj, "_active_adapter", ["one"]),
    "the scale of an adapter": lambda model: setattr(model.model.layers[0].mlp.up_proj, "scaling", {"one": 2.0}),
    "the config": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "another activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.ReLU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_in_place_is_noticed(change: str) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    before = fingerprint(model)
    assert fingerprint(model) == before == fingerprint(other)
    versions = [each._version for each in model.parameters()]
    CHANGES[change](model)
    assert fingerprint(model) != before
    assert "data" not in change or [each._version for each in model.parameters()] == versions


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_leaves_no_trace(family: str) -> None:
    model = tiny_model(family)
    before = fingerprint(model)
    with torch.no_grad():
        model(torch.tensor([list(range(1, 40))]), use_cache=False)
    assert fingerprint(model) == before


@pytest.mark.parametrize("read", [module._read_on_host, module._read_on_device])
@pytest.mark.parametrize("piece", [64, 1 << 24])
def test_random_changes_of_bytes_change_the_checksum_wherever_it_is_read(
    read: Callable[[list[torch.Tensor]], list[int]], piece: int
) -> None:
    source = random.Random(0)
    content = torch.tensor(list(source.randbytes(1001)), dtype=torch.uint8)
    expected = read([*content.split(piece)])
    for _ in range(300):
        changed = content.clone()
        for _ in range(source.randint(1, 3)):
            changed[source.randrange(1001)] ^= 1 << source.randrange(8)
        assert (read([*changed.split(piece)]) == expected) == torch.equal(changed, content)
    assert read([*content.clone()[1:].split(piece)]) == read([*content[1:].split(piece)]), "aligned or not"


def test_pieces_are_read_by_several_threads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [torch.full((100,), number, dtype=torch.uint8) for number in range(20)]
    one = module._read_on_host(pieces)
    monkeypatch.setattr(module, "_PIECE", 16)
    assert module._read_on_host(pieces) == one


def test_tied_weights_of_every_dtype_are_read() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = tiny_model("llama", tie_word_embeddings=True).to(dtype)
        before = fingerprint(model)
        model.get_input_embeddings().weight.data[1, 1] += 1
        assert fingerprint(model) != before


def test_threads_that_ask_at_the_same_time_share_a_digest_that_was_begun_after_they_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, begun = tiny_model("llama"), Semaphore(0)
    shared, calls = SharedState([]), []

    def slow(asked: PreTrainedModel) -> str:
        calls.append(fingerprint(asked))
        begun.release()
        time.sleep(0.3)
        return calls[-1]

    monkeypatch.setattr(shared_state, "fingerprint", slow)
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(shared.fingerprint, model)
        begun.acquire()
        model.lm_head.weight.data[0, 0] += 1  # after the first was begun, before the others ask
        others = [threads.submit(shared.fingerprint, model) for _ in range(8)]
        found = {each.result() for each in others}
    assert found == {fingerprint(model)} != {first.result()}
    asked = len(calls)
    assert asked <= 3
    shared.fingerprint(model)
    assert len(calls) == asked + 1, "nothing is remembered between calls"
