"""ALiBi as four dimensions of queries and keys, which move as those of rotary embeddings turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.positions import Alibi, find_slopes
from invariant_rag.testing.rounding import assert_rounded_alike, rounding

SLOPES = torch.tensor([0.5, 0.125], dtype=torch.float64)
ALIBI = Alibi(SLOPES)


def at(*positions: int) -> Arrangement:
    """A prompt of one text whose tokens have these positions."""
    return Arrangement(Layout((len(positions),), ()), (), positions)


def call(dtype: torch.dtype = torch.float64, queries: int = 3, keys: int = 7) -> AttentionCall:
    """Two heads of queries that share one of keys; scores are scaled by 0.25."""
    shapes = (2, queries, 8), (1, keys, 8), (1, keys, 8)
    return AttentionCall(*(torch.randn(shape).to(dtype) for shape in shapes), rotation=ALIBI, scaling=0.25)


def scores(given: AttentionCall) -> torch.Tensor:
    return given.queries @ given.keys.transpose(1, 2) * given.scaling


def test_scores_lose_slope_times_distance() -> None:
    plain = call()
    positions = torch.tensor([0, 1, 2, 2, 3, 9, 10])
    distance = positions[-3:, None] - positions
    expected = scores(plain) - SLOPES[:, None, None] * distance
    assert_rounded_alike(scores(ALIBI.encoded(plain, at(*positions.tolist()))), expected)


def test_tokens_after_the_prompt_count_on_from_its_last_position() -> None:
    plain = call()
    wanted = scores(ALIBI.encoded(plain, at(0, 1, 2, 2, 9, 10, 11)))
    for positions in ((0, 1, 2, 2, 9), (0, 1, 2, 2, 9, 10, 11, 12, 13)):
        assert_rounded_alike(scores(ALIBI.encoded(replace(plain, scratch={}), at(*positions))), wanted)


def test_a_moved_key_is_farther_or_nearer_and_a_moved_query_the_other_way_round() -> None:
    plain = call()
    encoded = ALIBI.encoded(plain, at(*range(7)))
    nearer = encoded.queries @ ALIBI.rotate(encoded.keys, 5).transpose(1, 2) * 0.25
    assert_rounded_alike(nearer, scores(encoded) + 5 * SLOPES[:, None, None])
    farther = ALIBI.rotate(encoded.queries, 5) @ encoded.keys.transpose(1, 2) * 0.25
    assert_rounded_alike(farther, scores(encoded) - 5 * SLOPES[:, None, None])


def test_shifts_add_up_undo_each_other_and_keep_the_score_of_both() -> None:
    encoded = ALIBI.encoded(call(), at(*range(7)))
    for x in (encoded.queries, encoded.keys):
        moved = ALIBI.rotate(ALIBI.rotate(x, 700), -3)
        assert_rounded_alike(moved, ALIBI.rotate(x, 697), magnitude=700)
        assert_rounded_alike(ALIBI.rotate(moved, -697), x, magnitude=700)
        each = ALIBI.rotate_each(x, torch.tensor([[4], [-2]]), 10)
        assert_rounded_alike(each[1], ALIBI.rotate(x[-1], -2).float())
    together = ALIBI.rotate(encoded.queries, 8) @ ALIBI.rotate(encoded.keys, 8).transpose(1, 2) * 0.25
    assert_rounded_alike(together, scores(encoded))


def test_without_positions_nothing_is_left_of_the_bias() -> None:
    plain = call(queries=7)
    encoded, back = ALIBI.encoded(plain, at(*range(7))), -torch.arange(7)
    keys, queries = ALIBI.rotate_by(encoded.keys, back), ALIBI.rotate_by(encoded.queries, back)
    assert_rounded_alike(queries @ keys.transpose(1, 2) * 0.25, scores(plain))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_so_that_every_position_fits(dtype: torch.dtype) -> None:
    plain = call(dtype)
    encoded = ALIBI.encoded(plain, at(*range(4000, 4007)))
    assert encoded.keys.dtype == encoded.values.dtype == torch.float32
    expected = plain.queries.double() @ plain.keys.double().transpose(1, 2) * 0.25
    distance = torch.arange(4, 7)[:, None] - torch.arange(7)
    expected -= SLOPES[:, None, None] * distance
    torch.testing.assert_close(scores(encoded).double(), expected, atol=rounding(scores, encoded), rtol=0)


def test_slopes_are_found_up_to_a_constant_and_only_on_lines() -> None:
    positions = torch.arange(9)
    found = find_slopes(SLOPES[:, None] * (positions - 4), 1e-3)
    assert found is not None
    assert_rounded_alike(found, SLOPES)
    assert find_slopes(SLOPES[:, None] * positions**2, 1e-3) is None
