"""Least squares with coefficients that are not negative (Lawson and Hanson, Solving Least Squares Problems, 1974)."""

from __future__ import annotations

import numpy as np

from slipstream.array_types import Flags, Floats

_TOLERANCE = 1e-12  # of the largest gradient at the start


def fit_nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """Returns the coefficients of the columns, none below 0, with the least squared error.

    Args:
        columns: (values, columns).
        wanted: (values,).
    """
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1
    scaled = columns / scale
    found, free = np.zeros(scaled.shape[1]), np.zeros(scaled.shape[1], np.bool_)
    least = _TOLERANCE * float(np.abs(scaled.T @ wanted).max(initial=0.0))
    for _ in range(3 * scaled.shape[1]):  # each column enters once or twice; never seen to end here
        gradient = np.where(free, -np.inf, scaled.T @ (wanted - scaled @ found))
        if not (gradient > least).any():
            break
        free[gradient.argmax()] = True
        found = _feasible(scaled, wanted, found, free)
    coefficients: Floats = found / scale
    return coefficients


def _feasible(columns: Floats, wanted: Floats, found: Floats, free: Flags) -> Floats:
    """Returns the best coefficients of the free columns, from which it takes those that would be below 0."""
    while True:
        best = np.zeros_like(found)
        best[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
        below = free & (best <= 0)
        if not below.any():
            return best
        way = (found[below] / (found[below] - best[below])).min()  # until the first of them is 0
        found = found + way * (best - found)
        free &= found > _TOLERANCE * found.max(initial=0.0)
        found[~free] = 0.0
