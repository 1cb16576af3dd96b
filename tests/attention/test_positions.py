"""Rotations are found by observation, and turn as the model's own do; ALiBi moves in four dimensions, as these turn."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from threading import Thread

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from invariant_rag import InvariantModel
from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.positions import Alibi, Rotation, candidates, find_slopes
from invariant_rag.attention.probe import probe
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike

# --- rotary embeddings ---


class _Frequencies(nn.Module):
    def __init__(self, *frequencies: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(frequencies))


@pytest.fixture(params=[False, True], ids=["half-split", "interleaved"])
def rotation(request: pytest.FixtureRequest) -> Rotation:
    return Rotation(_Frequencies(1.0, 0.3, 0.05), "inv_freq", request.param)


def test_rotations_add_up_undo_each_other_and_leave_other_dimensions_alone(rotation: Rotation) -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    turned = rotation.rotate_by(rotation.rotate_by(x, 700), -3)
    assert_rounded_alike(turned, rotation.rotate_by(x, 697), 3 * 700)  # angles of up to 700 radians, three times
    assert_rounded_alike(rotation.rotate_by(turned, -697), x, 3 * 700)
    assert torch.equal(rotation.rotate_by(x, 0), x)
    assert torch.equal(rotation.rotate_by(x, 9)[..., 6:], x[..., 6:])
    assert not torch.equal(rotation.rotate_by(x, 9)[..., :6], x[..., :6])


def test_rotating_each_by_its_own_shift_is_rotating_one_by_one_whatever_the_layout(rotation: Rotation) -> None:
    x, shifts = torch.randn(2, 3, 8), torch.tensor([[5, -2, 0], [40, 1, -40]])
    together = rotation.rotate_each(x, shifts, 40)
    for head in range(2):
        for token in range(3):
            one = rotation.rotate_by(x[head, token].double(), int(shifts[head, token])).float()
            assert_rounded_alike(together[head, token], one)
    keys = torch.randn(2, 5, 8)
    turned = rotation.turn(rotation.pair(x), shifts, 40) @ rotation.pair(keys).mT
    assert_rounded_alike(turned, together @ keys.mT)


def test_the_table_of_angles_follows_the_frequencies(rotation: Rotation) -> None:
    x, shift = torch.randn(1, 8), torch.tensor([3])
    before = rotation.rotate_each(x, shift, 10)
    rotation.module.inv_freq = torch.tensor([0.7, 0.2, 0.01])
    after = rotation.rotate_each(x, shift, 10)
    assert not torch.equal(before, after)
    assert_rounded_alike(after, rotation.rotate_by(x, 3))
    rotation.module.inv_freq *= 2  # the same tensor, with other numbers
    assert_rounded_alike(rotation.rotate_each(x, shift, 10), rotation.rotate_by(x, 3))
    assert not torch.equal(rotation.rotate_each(x, shift, 10), after)


def test_two_bases_in_one_model_are_told_apart_and_half_precision_is_probed_alike() -> None:
    names = [rotation.buffer for rotation in probe(tiny_model("gemma3_text", num_hidden_layers=6))]
    assert names == ["sliding_attention_inv_freq"] * 5 + ["full_attention_inv_freq"]
    for dtype in (torch.float32, torch.bfloat16):
        assert [each.interleaved for each in probe(tiny_model("glm4").to(dtype))] == [True] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_of_a_table_of_sines_are_exact_in_half_precision_too(dtype: torch.dtype) -> None:
    """GPT-J keeps a table `[positions, R]` in each layer. The angles of its last position are nearly exact."""
    model = tiny_model("gptj", max_position_embeddings=2048).to(dtype)
    found = [each.frequencies() for each in candidates(model) if each.module is not None]
    exact = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert len(found) == 2, "one for each layout, from the first layer"
    angles = torch.finfo(dtype).eps + 2047 * torch.finfo(torch.float32).eps  # of the table, and of 2047 radians in it
    torch.testing.assert_close(found[0], exact, atol=angles / 2047, rtol=0)


# --- ALiBi ---

SLOPES = torch.tensor([0.5, 0.125], dtype=torch.float64)
ALIBI = Alibi(SLOPES)


def encoded(given: AttentionCall, *positions: int) -> AttentionCall:
    """The call for a prompt of one text whose tokens have these positions."""
    return ALIBI.encoded(given, Arrangement(Layout((len(positions),), ()), (), positions))


def call(dtype: torch.dtype = torch.float64, queries: int = 3) -> AttentionCall:
    """Two heads of queries that share one of keys, of seven tokens; scores are scaled by 0.25."""
    shapes = (2, queries, 8), (1, 7, 8), (1, 7, 8)
    return AttentionCall(*(torch.randn(shape).to(dtype) for shape in shapes), rotation=ALIBI, scaling=0.25)


def scores(given: AttentionCall) -> torch.Tensor:
    return given.queries @ given.keys.mT * given.scaling


def test_scores_lose_slope_times_distance_also_behind_the_prompt() -> None:
    plain, positions = call(), torch.tensor([0, 1, 2, 2, 3, 9, 10])
    expected = scores(plain) - SLOPES[:, None, None] * (positions[-3:, None] - positions)
    assert_rounded_alike(scores(encoded(plain, *positions.tolist())), expected)
    wanted = scores(encoded(replace(plain, scratch={}), 0, 1, 2, 2, 9, 10, 11))
    for known in ((0, 1, 2, 2, 9), (0, 1, 2, 2, 9, 10, 11, 12, 13)):
        assert_rounded_alike(scores(encoded(replace(plain, scratch={}), *known)), wanted)


def test_a_moved_key_is_farther_or_nearer_and_a_moved_query_the_other_way_round() -> None:
    known = encoded(call(), *range(7))
    for moved, sign in (
        (replace(known, keys=ALIBI.rotate_by(known.keys, 5)), 1),
        (replace(known, queries=ALIBI.rotate_by(known.queries, 5)), -1),
        (replace(known, queries=ALIBI.rotate_by(known.queries, 8), keys=ALIBI.rotate_by(known.keys, 8)), 0),
    ):
        assert_rounded_alike(scores(moved), scores(known) + sign * 5 * SLOPES[:, None, None])
    for x in (known.queries, known.keys):
        moved = ALIBI.rotate_by(ALIBI.rotate_by(x, 700), -3)
        assert_rounded_alike(moved, ALIBI.rotate_by(x, 697), magnitude=700)
        assert_rounded_alike(ALIBI.rotate_by(moved, -697), x, magnitude=700)
        each = ALIBI.rotate_each(x, torch.tensor([[4], [-2]]), 10)
        assert_rounded_alike(each[1], ALIBI.rotate_by(x[-1], -2).float())


def test_slopes_are_found_up_to_a_constant_and_only_on_lines() -> None:
    positions = torch.arange(9)
    assert_rounded_alike(find_slopes(SLOPES[:, None] * (positions - 4), 1e-3), SLOPES)
    assert find_slopes(SLOPES[:, None] * positions**2, 1e-3) is None


# --- frequencies that depend on the length: what other threads run on the model meanwhile changes no bit ---

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
