"""Positions move as the model's own do, whatever encodes them; and frequencies of a length are those of one call."""

import copy
import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from invariant_rag import InvariantModel
from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.positions import Alibi, Rotation, candidates
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike
from tests.comparing import another_thread_at, frequencies

SLOPES = torch.tensor([0.5, 0.125], dtype=torch.float64)


ENCODINGS = {
    "half-split": Rotation(frequencies([1.0, 0.3, 0.05]), "inv_freq", interleaved=False),
    "interleaved": Rotation(frequencies([1.0, 0.3, 0.05]), "inv_freq", interleaved=True),
    "ALiBi": Alibi(SLOPES),
}


@pytest.fixture(params=ENCODINGS.values(), ids=ENCODINGS)
def encoding(request):
    return request.param


def test_shifts_add_up_undo_each_other_and_are_the_same_one_by_one_in_any_layout(encoding):
    x, shifts = torch.randn(2, 3, 8), torch.tensor([[5, -2, 0], [40, 1, -40]])
    turned = encoding.rotate_by(encoding.rotate_by(x.double(), 700), -3)
    assert_rounded_alike(turned, encoding.rotate_by(x.double(), 697), 3 * 700, magnitude=700)  # positions of up to 700
    assert_rounded_alike(encoding.rotate_by(turned, -697), x.double(), 3 * 700, magnitude=700)
    together = encoding.rotate_each(x, shifts, 40)
    for head, token in ((head, token) for head in range(2) for token in range(3)):
        one = encoding.rotate_by(x[head, token].double(), int(shifts[head, token])).float()
        assert_rounded_alike(together[head, token], one)
    assert torch.equal(together[..., 6:], x[..., 6:])  # what no position moves
    if isinstance(encoding, Rotation):  # a turn is a complex number for each pair of dimensions
        turns = torch.exp(1j * shifts[0, :, None] * encoding.frequencies().double())
        expected = encoding.rotate_by(x.double(), shifts[0].double())
        assert_rounded_alike(encoding.rotate_with(x.double(), turns), expected, magnitude=40)
    keys = torch.randn(2, 5, 8)
    turned = encoding.turn(encoding.pair(x), shifts, 40) @ encoding.pair(keys).mT
    assert_rounded_alike(turned, together @ keys.mT, magnitude=40)


def test_scores_of_alibi_lose_slope_times_distance_also_behind_the_prompt_and_where_a_key_is_moved():
    alibi = ENCODINGS["ALiBi"]
    shapes = (2, 3, 8), (1, 7, 8), (1, 7, 8)
    call = AttentionCall(*(torch.randn(shape).double() for shape in shapes), rotation=alibi, scaling=0.25)

    def scores(call):
        return call.queries @ call.keys.mT * call.scaling

    for at, known in (((0, 1, 2, 2, 3, 9, 10), 7), ((0, 1, 2, 2, 9, 10, 11), 5), ((0, 1, 2, 2, 9, 10, 11, 12), 8)):
        prompt = Arrangement(Layout((known,), ()), (), at[:known])
        encoded, positions = alibi.encoded(replace(call, scratch={}), prompt), torch.tensor(at[:7])
        expected = scores(call) - SLOPES[:, None, None] * (positions[-3:, None] - positions)
        assert_rounded_alike(scores(encoded), expected)
    moved = replace(encoded, keys=alibi.rotate_by(encoded.keys, 5))
    assert_rounded_alike(scores(moved), scores(encoded) + 5 * SLOPES[:, None, None])


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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
KINDS = {
    "dynamic": {"family": "llama (dynamic scaling)"},
    "longrope": {"family": "llama", "rope_parameters": LONGROPE, "max_position_embeddings": 256},
}


@cache
def model_of(kind):
    return tiny_model(**KINDS[kind], eos_token_id=None, num_hidden_layers=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["rotor", "pine", "sequential"])
def test_another_thread_in_the_middle_of_a_forward_pass_changes_no_bit_and_gets_its_own_frequencies(kind, method):
    """Around every rotation and in the middle of the layers, another thread runs the model to its end."""
    model = copy.deepcopy(model_of(kind))
    lm, rotary = InvariantModel(model, method=method), model.model.rotary_emb
    for prompt, other in ((PROMPT, EVEN_LONGER), (BEYOND, EVEN_LONGER[:, :5])):
        logits, answer = lm.logits(prompt), lm.generate(prompt, max_new_tokens=2)
        expected = copy.deepcopy(model_of(kind))(input_ids=other, use_cache=False).logits
        places = [rotary, model.model.layers[-1]]
        call = partial(model, input_ids=other, use_cache=False)
        with another_thread_at(places, lambda call=call: call().logits, after=[rotary]) as seen:
            assert torch.equal(lm.logits(prompt), logits)
            assert lm.generate(prompt, max_new_tokens=2).logprobs == answer.logprobs
        assert len(seen) >= 6
        assert all(torch.equal(each, expected) for each in seen)
    assert "forward" not in vars(rotary), "the model must be as it was"


def test_one_call_within_another_has_its_own_frequencies():
    model = model_of("dynamic")
    lm = InvariantModel(model)
    alone, prepared = lm.logits(PROMPT), lm.prepare(BEYOND)
    ids, positions = torch.tensor([prepared.input_ids]), torch.tensor([prepared.positions])
    with lm.arranged([prepared]), torch.no_grad():
        before = model(ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(lm.logits(PROMPT), alone)
        assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, before)
