"""Which hidden dimensions follow the position: monotone in enough layers, and smooth (arXiv 2406.02536, algorithm 1).

Both functions take mean hidden values `[layers, positions, dimensions]`, one entry per layer's output.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = np.ndarray[Any, Any]

POSITIONS = 1000
"""Number of positions that the published code measures."""
_SKIPPED_FOR_MONOTONICITY = 300
_SKIPPED_FOR_SMOOTHNESS = 200
FEWEST_LAYERS = 5
"""With fewer layers, those that count for the published code cannot be more than a quarter of all."""
_WINDOW, _DEGREE = 10, 3  # of the Savitzky-Golay filter


def published_dimensions(values: Values) -> list[int]:
    """Return the positional dimensions as the published code ranks them, smoothest first.

    Source: `experiments/search_dimension/seach_dim_by_statistic.py` of PositionalHidden/PositionalHidden at f3bcd55. A
    dimension is monotone in a layer if the cubic through its values is, without the first 300 of 1000 positions. The
    outputs of the first two layers and of the last one do not count. Dimensions that are monotone in one direction in
    more than a quarter of the layers are kept; where both directions are equally frequent, the falling ones count. They
    are ranked by the smallest roughness over these layers: the sum of squared second differences of the values, without
    the first 200 positions, scaled to a range of one and smoothed by a Savitzky-Golay filter.

    With fewer than 1000 positions, the same fractions of them are skipped. That code keeps the input embeddings for
    models with an odd number of layers; they are never an entry here.
    """
    layers, positions = values.shape[:2]
    middle = values[2 : layers - 1]
    rising, falling = monotone_layers(middle[:, positions * _SKIPPED_FOR_MONOTONICITY // POSITIONS :])
    monotone = np.where(rising.sum(axis=0) > falling.sum(axis=0), rising, falling)
    kept = np.flatnonzero(monotone.sum(axis=0) > layers // 4)
    if not len(kept):
        return []
    from scipy.signal import savgol_filter

    curves = _scale_to_one(middle[:, positions * _SKIPPED_FOR_SMOOTHNESS // POSITIONS :][:, :, kept])
    smooth = savgol_filter(curves, window_length=_WINDOW, polyorder=_DEGREE, axis=1)
    roughness = np.where(monotone[:, kept], _roughness(smooth), np.inf).min(axis=0, initial=np.inf)
    return [int(dimension) for dimension in kept[np.argsort(roughness, kind="stable")]]


def averaged_dimensions(values: Values, skip: int) -> list[int]:
    """Return the positional dimensions as this library ranks them for models with few layers, smoothest first.

    All layers but the last count, also in a model of one layer. Values are not smoothed, and the roughness is averaged
    over the monotone layers: a minimum favours a dimension that is smooth in a single layer.

    Args:
        values: Mean hidden values.
        skip: Number of positions at the start to ignore; they are often outliers.
    """
    curves = (values[:-1] if len(values) > 1 else values)[:, skip:]
    rising, falling = monotone_layers(curves)
    monotone = np.where(rising.sum(axis=0) >= falling.sum(axis=0), rising, falling)
    counts = monotone.sum(axis=0)
    mean = np.where(monotone, _roughness(_scale_to_one(curves)), 0).sum(axis=0) / np.maximum(counts, 1)
    kept = np.flatnonzero(4 * counts > len(values))
    return [int(dimension) for dimension in kept[np.argsort(mean[kept], kind="stable")]]


def monotone_layers(curves: Values) -> tuple[Values, Values]:
    """Return in which layers the least-squares cubic through each dimension rises, and in which it falls."""
    powers = np.vander(np.linspace(-1, 1, curves.shape[1]), _DEGREE + 1)
    rising, falling = np.zeros((2, curves.shape[0], curves.shape[2]), bool)
    for layer, curve in enumerate(_scale_to_one(curves)):
        slopes = np.diff(powers @ np.linalg.lstsq(powers, curve, rcond=None)[0], axis=0)
        moves = np.ptp(curve, axis=0) > 0
        rising[layer], falling[layer] = (slopes >= 0).all(axis=0) & moves, (slopes <= 0).all(axis=0) & moves
    return rising, falling


def _scale_to_one(curves: Values) -> Values:
    span = np.ptp(curves, axis=1, keepdims=True)
    scaled: Values = (curves - curves.min(axis=1, keepdims=True)) / np.where(span > 0, span, 1)
    return scaled


def _roughness(curves: Values) -> Values:
    """Return the sum of squared second differences over positions (equation 3)."""
    squares: Values = (np.diff(curves, n=2, axis=1) ** 2).sum(axis=1)
    return squares
