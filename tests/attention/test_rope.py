"""Rotations are found by observation, and turn as the model's own do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from invariant_rag.attention.positions import Rotation, candidates, identify
from invariant_rag.attention.probe import probe
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike


class _Frequencies(nn.Module):
    def __init__(self, *frequencies: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(frequencies))


@pytest.fixture(params=[False, True], ids=["half-split", "interleaved"])
def rotation(request: pytest.FixtureRequest) -> Rotation:
    return Rotation(_Frequencies(1.0, 0.3, 0.05), "inv_freq", request.param)


def test_rotations_add_up_and_undo_each_other(rotation: Rotation) -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    turned = rotation.rotate(rotation.rotate(x, 700), -3)
    assert_rounded_alike(turned, rotation.rotate(x, 697), 3 * 700)  # angles of up to 700 radians, three times
    assert_rounded_alike(rotation.rotate(turned, -697), x, 3 * 700)
    assert torch.equal(rotation.rotate(x, 0), x)


def test_dimensions_beyond_the_rotary_ones_do_not_turn(rotation: Rotation) -> None:
    x = torch.randn(4, 8)
    assert torch.equal(rotation.rotate(x, 9)[:, 6:], x[:, 6:])
    assert not torch.equal(rotation.rotate(x, 9)[:, :6], x[:, :6])


def test_rotating_each_by_its_own_shift_is_rotating_one_by_one(rotation: Rotation) -> None:
    x, shifts = torch.randn(2, 3, 8), torch.tensor([[5, -2, 0], [40, 1, -40]])
    together = rotation.rotate_each(x, shifts, 40)
    for head in range(2):
        for token in range(3):
            one = rotation.rotate(x[head, token].double(), int(shifts[head, token])).float()
            assert_rounded_alike(together[head, token], one)


def test_turning_what_is_laid_out_in_pairs_gives_the_products_of_rotating(rotation: Rotation) -> None:
    queries, keys, shifts = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.tensor([[5], [-40]])
    turned = rotation.turn(rotation.pair(queries), shifts, 40)
    expected = rotation.rotate_each(queries, shifts, 40) @ keys.transpose(1, 2)
    assert_rounded_alike(turned @ rotation.pair(keys).transpose(1, 2), expected)


def test_the_table_of_angles_follows_the_frequencies(rotation: Rotation) -> None:
    x, shift = torch.randn(1, 8), torch.tensor([3])
    before = rotation.rotate_each(x, shift, 10)
    rotation.module.inv_freq = torch.tensor([0.7, 0.2, 0.01])
    after = rotation.rotate_each(x, shift, 10)
    assert not torch.equal(before, after)
    assert_rounded_alike(after, rotation.rotate(x, 3))
    rotation.module.inv_freq *= 2  # the same tensor, with other numbers
    assert_rounded_alike(rotation.rotate_each(x, shift, 10), rotation.rotate(x, 3))
    assert not torch.equal(rotation.rotate_each(x, shift, 10), after)


def test_a_layer_without_rotation_leaves_everything_as_it_is() -> None:
    x = torch.randn(2, 3, 8)
    still = Rotation(None)
    assert torch.equal(still.rotate(x, 5), x)
    assert torch.equal(still.rotate_each(x, torch.tensor([[1], [2]]), 5), x)
    assert torch.equal(still.turn(still.pair(x), torch.tensor([[1], [2]]), 5), x)


def test_what_no_candidate_explains_is_not_explained() -> None:
    positions = torch.tensor([0, 1, 5])
    noise = torch.randn(2, 3, 8)
    candidates = [Rotation(None), Rotation(_Frequencies(1.0, 0.3, 0.05), "inv_freq")]
    assert identify(candidates, positions, [noise], tolerance=1e-3) is None
    constant = noise[:, :1].expand(2, 3, 8)
    assert identify(candidates, positions, [constant], tolerance=1e-3) is candidates[0]


def test_two_bases_in_one_model_are_told_apart() -> None:
    names = [rotation.buffer for rotation in probe(tiny_model("gemma3_text", num_hidden_layers=6))]
    assert names == ["sliding_attention_inv_freq"] * 5 + ["full_attention_inv_freq"]


def test_a_model_in_bfloat16_is_probed_alike() -> None:
    single = probe(tiny_model("glm4"))
    half = probe(tiny_model("glm4").to(torch.bfloat16))
    assert [each.interleaved for each in half] == [each.interleaved for each in single] == [True] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_of_a_table_of_sines_are_exact_in_half_precision_too(dtype: torch.dtype) -> None:
    """GPT-J keeps a table `[positions, R]` in each layer. The angles of its last position are nearly exact."""
    model = tiny_model("gptj", max_position_embeddings=2048).to(dtype)
    found = [each.frequencies() for each in candidates(model) if each.module is not None]
    exact = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert len(found) == 2, "one for each layout, from the first layer"
    angles = torch.finfo(dtype).eps + 2047 * torch.finfo(torch.float32).eps  # of the table, and of 2047 radians in it
    torch.testing.assert_close(found[0], exact, atol=angles / 2047, rtol=0)
