"""Assigns layers to stages where ranks hold several, so that the sums over a rank's stages are small and even."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Floats, Ints

_WORK = 20_000_000  # numbers written in one search: a few seconds at most


class _PartialPartitions(NamedTuple):
    """Ways to assign the first layers to the first stages, one per row."""

    layers: Ints  # how many layers are assigned
    costs: Floats  # (n, ranks)
    bytes: Floats  # (n, ranks)
    squares: Floats  # the sum of the squares of the stages' costs
    parent: Ints  # the row that it extends, of those of the previous stage

    def take(self, rows: Ints) -> _PartialPartitions:
        layers, costs, sizes, squares, parent = self
        return _PartialPartitions(layers[rows], costs[rows], sizes[rows], squares[rows], parent[rows])


def evenest_ranks(
    stage_costs: Floats,
    stage_bytes: Floats,
    limits: Floats,
    placement: tuple[int, ...],
    start: list[int] | None,
    offsets: Floats | None = None,
) -> list[int] | None:
    """Minimises the largest cost of a rank, then the ranks' sum of squares, then the stages' sum of squares.

    Stage by stage, every count of layers is tried; of those with equal sums on every rank the one with the evenest
    stages is kept. A lower bound distributes the remaining cost evenly over the ranks that still get a stage, as water
    finds its level; what can't be better than the best known is dropped. Where too many are left, those with the lowest
    bounds are kept, and the result need not be optimal.

    Args:
        stage_costs: the cost of layers a to b-1 on stage g at [g, a, b], (stages, L+1, L+1).
        stage_bytes: their bytes, of the same shape.
        limits: bytes per rank.
        placement: the rank of every stage.
        start: layers per stage; if they fit, the result is at least as good.
        offsets: costs that the ranks have already.

    Returns:
        Layers per stage, or None if no partition was found within the limits.
    """
    num_stages, num_layers, num_ranks = len(placement), stage_costs.shape[1] - 1, len(limits)
    costs = np.zeros((1, num_ranks)) if offsets is None else offsets[None]
    zero = np.zeros(1, np.int64)
    labels = _PartialPartitions(zero, costs, np.zeros((1, num_ranks)), np.zeros(1), zero)
    best = _value(start, stage_costs, stage_bytes, limits, placement)
    width = max(300, _WORK // (num_stages * num_layers * num_ranks))
    history = []
    for stage, rank in enumerate(placement):
        labels = _extend(labels, stage_costs[stage], stage_bytes[stage], rank, num_layers - (num_stages - 1 - stage))
        if stage == num_stages - 1:
            labels = labels.take(np.flatnonzero(labels.layers == num_layers))
        labels = labels.take(np.flatnonzero((labels.bytes <= limits).all(axis=1)))
        open_ranks = sorted(set(placement[stage + 1 :]))
        left = stage_costs[-1, :, -1][np.minimum(labels.layers, num_layers - 1)] * (labels.layers < num_layers)
        highest, squares = _bounds(labels.costs, open_ranks, left)
        evenness = labels.squares + left**2 / max(1, num_stages - 1 - stage)
        rows = _promising(labels, highest, squares, evenness, best)
        labels = labels.take(rows[:width])
        history.append(labels)
    if not len(labels.layers):
        return start if best[0] < inf else None
    row, bounds = 0, [0]
    for labels in reversed(history):
        bounds.insert(1, int(labels.layers[row]))
        row = int(labels.parent[row])
    return [b - a for a, b in pairwise(bounds)]


def _value(
    counts: list[int] | None, stage_costs: Floats, stage_bytes: Floats, limits: Floats, placement: tuple[int, ...]
) -> tuple[float, float]:
    """Returns the largest and the sum of squares of the ranks' costs; infinite where the layers don't fit."""
    if counts is None:
        return inf, inf
    bounds = np.cumsum([0, *counts])
    own = np.arange(len(counts)), bounds[:-1], bounds[1:]
    if (np.bincount(placement, stage_bytes[own]) > limits).any():
        return inf, inf
    costs = np.bincount(placement, stage_costs[own])
    return float(costs.max()), float((costs**2).sum())


def _extend(labels: _PartialPartitions, costs: Floats, sizes: Floats, rank: int, most: int) -> _PartialPartitions:
    """Extends every row by every count of layers for the next stage, up to `most` layers in all."""
    counts = np.maximum(most - labels.layers, 0)
    parent = np.repeat(np.arange(len(counts)), counts)
    first = labels.layers[parent]
    layers = first + 1 + np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
    added, total, held = costs[first, layers], labels.costs[parent], labels.bytes[parent]
    total[:, rank] += added
    held[:, rank] += sizes[first, layers]
    return _PartialPartitions(layers, total, held, labels.squares[parent] + added**2, parent)


def _bounds(costs: Floats, open_ranks: list[int], left: Floats) -> tuple[Floats, Floats]:
    """Returns lower bounds of the largest rank and the sum of squares, with `left` spread over the open ranks."""
    fixed = np.delete(costs, open_ranks, axis=1)
    highest, squares = fixed.max(axis=1, initial=-inf), (fixed**2).sum(axis=1)
    if not open_ranks:
        return highest, squares
    ranks = np.sort(costs[:, open_ranks], axis=1)
    levels = (np.cumsum(ranks, axis=1) + left[:, None]) / np.arange(1, ranks.shape[1] + 1)
    level = levels.min(axis=1)  # the level is lowest over the best number of lowest ranks
    filled = np.maximum(ranks, level[:, None])
    return np.maximum(highest, filled[:, -1]), squares + (filled**2).sum(axis=1)


def _promising(
    labels: _PartialPartitions, highest: Floats, squares: Floats, evenness: Floats, best: tuple[float, float]
) -> Ints:
    """Returns the rows that may lead to a better partition, the lowest bounds first, one for each state."""
    slack = 1 + 1e-12  # sums in another order may round differently
    below = highest * slack < best[0]
    level = (highest <= best[0] * slack) & (squares <= best[1] * slack)
    rows = np.flatnonzero(below | level)
    # bounds that differ only by rounding count as equal, so that the next criterion decides
    keys = [evenness[rows], _rounded(squares[rows]), _rounded(highest[rows])]
    rows = rows[np.lexsort(keys)]
    state = np.column_stack([labels.layers[rows], _rounded(labels.costs[rows]), _rounded(labels.bytes[rows])])
    _, first = np.unique(state, axis=0, return_index=True)
    return rows[np.sort(first)]


def _rounded(values: Floats) -> Floats:
    """Rounds to ten significant digits of the largest."""
    scale = np.abs(values).max(initial=0) * 1e-10
    rounded: Floats = np.round(values / scale) * scale if scale else values
    return rounded
