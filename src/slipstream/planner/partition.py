"""Assigns layers to stages: the slowest rank as fast as possible, then all ranks as even as possible, within memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from slipstream.array_types import Floats, Ints
from slipstream.errors import SlipstreamError

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
    finds its level; partitions that can't be better than the best known are dropped. Where too many are left, those
    with the lowest bounds are kept, and the result need not be optimal.

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
    places = np.arange(len(counts)), bounds[:-1], bounds[1:]
    if (np.bincount(placement, stage_bytes[places]) > limits).any():
        return inf, inf
    costs = np.bincount(placement, stage_costs[places])
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


def partition_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    embedding: float = 0,
    head: float = 0,
    memory: ArrayLike | None = None,
    memory_limit: float | Sequence[float] | None = None,
    placement: Sequence[int] | None = None,
) -> list[int]:
    """Returns how many consecutive layers each stage takes, at least one each.

    The largest cost of a rank is minimal, and so is, among such partitions, the variance of the ranks' costs (GPipe
    section 2.2 minimises only the variance, which can leave a slower slowest stage). With one stage per rank that is
    exact. With several, a rank's cost is the sum over its stages, and of equally even ranks those with the evenest
    stages win; that is exact if the search has room for every state, as for 32 layers on 4 ranks of 2 stages, and
    otherwise the best that it finds.

    Args:
        costs: the cost of each layer in any unit, estimated or measured: GPipe's c_i.
        num_stages: at most as many as layers.
        embedding: the additional cost of the first stage, in the same unit.
        head: the additional cost of the last stage.
        memory: bytes of each layer, the first with the embedding and the last with the head; or one such row for each
            stage, where the microbatches in flight depend on the stage.
        memory_limit: bytes of every rank, or one number per rank.
        placement: the rank of each stage, as `Schedule.placement`; Default: one stage per rank.

    Raises:
        SlipstreamError: for inconsistent numbers, or where no partition fits the memory: which rank lacks how much.
    """
    placement = tuple(range(num_stages)) if placement is None else tuple(placement)
    _check([*costs, embedding, head], len(costs), num_stages, placement)
    alike = _stage_costs(np.array([costs], float))
    stage_costs = np.broadcast_to(alike, (num_stages, *alike.shape[1:]))
    if embedding or head:
        stage_costs = stage_costs.copy()
        stage_costs[0, 0] += embedding
        stage_costs[-1, :, -1] += head
    stage_bytes, limits = _memory(memory, memory_limit, len(costs), placement)
    allowed = stage_costs
    if memory is not None:
        allowed = np.where(stage_bytes <= limits[list(placement), None, None], stage_costs, inf)
    partition = _evenest_stages(allowed)
    if len(limits) < num_stages:
        partition = evenest_ranks(stage_costs, stage_bytes, limits, placement, partition)
    if partition is None:
        raise SlipstreamError(_explain_memory(stage_bytes, limits, placement))
    return partition


def _check(costs: Sequence[float], num_layers: int, num_stages: int, placement: tuple[int, ...]) -> None:
    if not 1 <= num_stages <= num_layers:
        raise SlipstreamError(
            f"{num_stages} stages for {num_layers} layers: every stage needs a layer. Use 1 to {num_layers} stages."
        )
    if min(costs) < 0 or not np.isfinite(costs).all():
        raise SlipstreamError(f"Layers, embedding and head cost {costs}: give finite numbers of 0 or more.")
    if len(placement) != num_stages or set(placement) != set(range(max(placement) + 1)):
        raise SlipstreamError(
            f"placement={list(placement)} for {num_stages} stages: give the rank of each stage, with ranks 0, 1, ... "
            "that all have a stage."
        )


def _stage_costs(per_layer: Floats) -> Floats:
    """Sums costs (num_stages, L) to (num_stages, L+1, L+1): [g, a, b] is that of layers a to b-1 on stage g (b > a)."""
    sums = np.concatenate([np.zeros((len(per_layer), 1)), np.cumsum(per_layer, axis=1)], axis=1)
    num_cuts = sums.shape[1]
    empty = np.tri(num_cuts, dtype=bool)
    return np.where(empty, inf, sums[:, None, :] - sums[:, :, None])


def _memory(
    memory: ArrayLike | None, memory_limit: float | Sequence[float] | None, num_layers: int, placement: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """Returns the bytes of layers a to b-1 on stage g at [g, a, b], and each rank's; without a limit all layers fit."""
    num_stages, num_ranks = len(placement), max(placement) + 1
    if (memory is None) != (memory_limit is None):
        raise SlipstreamError("give memory and memory_limit together: bytes of each layer, and bytes of a rank.")
    rows = np.asarray(np.zeros(num_layers) if memory is None else memory, float)
    if rows.shape not in ((num_layers,), (num_stages, num_layers)) or not (rows >= 0).all():
        raise SlipstreamError(
            f"memory has shape {rows.shape}: give bytes, 0 or more, for each of {num_layers} layers, or "
            f"{num_stages} such rows, one per stage."
        )
    limits = np.asarray(inf if memory_limit is None else memory_limit, float)
    if limits.shape not in ((), (num_ranks,)) or not (limits > 0).all():
        raise SlipstreamError(
            f"memory_limit={memory_limit!r}: give bytes, above 0, for all ranks, or one number for each of {num_ranks}."
        )
    if rows.ndim == 1:
        alike = _stage_costs(rows[None])
        return np.broadcast_to(alike, (num_stages, *alike.shape[1:])), np.broadcast_to(limits, (num_ranks,))
    return _stage_costs(rows), np.broadcast_to(limits, (num_ranks,))


def _evenest_stages(stage_costs: Floats) -> list[int] | None:
    """Returns the partition of least sum of squares, hence variance, among those with the least largest stage."""
    slowest = stage_costs[-1, :, -1]  # the least possible largest cost of a stage for the layers from a on
    for costs in stage_costs[-2::-1]:
        slowest = np.maximum(costs, slowest).min(axis=1)
    limit = slowest[0] * (1 + 1e-12)  # sums in another order may round differently
    if limit == inf:
        return None
    if stage_costs.strides[0]:
        squares = np.where(stage_costs <= limit, stage_costs, inf) ** 2
    else:  # all stages cost the same
        squares = np.broadcast_to(np.where(stage_costs[0] <= limit, stage_costs[0], inf) ** 2, stage_costs.shape)
    rest = squares[-1, :, -1]
    cuts: list[Ints] = []
    for last_squares in squares[-2::-1]:
        sums = last_squares + rest
        cuts.append(sums.argmin(axis=1))
        rest = sums.min(axis=1)
    bounds = [0]
    for cut in reversed(cuts):
        bounds.append(int(cut[bounds[-1]]))
    return [b - a for a, b in pairwise([*bounds, stage_costs.shape[1] - 1])]


def _explain_memory(stage_bytes: Floats, limits: Floats, placement: tuple[int, ...]) -> str:
    """Says which rank lacks how much in the partition whose worst lack is smallest."""
    of_stage = limits[list(placement)]
    num_stages, num_layers = len(placement), stage_bytes.shape[1] - 1
    lack = stage_bytes - of_stage[:, None, None]
    one_layer = np.diagonal(lack, offset=1, axis1=1, axis2=2).min(axis=0)  # on the stage with the most room for it
    if one_layer.max() > 0:
        layer = int(one_layer.argmax())
        stage = int(lack[:, layer, layer + 1].argmin())
        return (
            f"Layer {layer} alone needs {stage_bytes[stage, layer, layer + 1]:.6g} bytes, but there are "
            f"{of_stage[stage]:.6g}: {one_layer[layer]:.6g} too few on any stage. Give ranks more memory, or recompute "
            "or offload more."
        )
    if len(limits) == num_stages:
        counts = _evenest_stages(np.maximum(lack, 0)) or []
    else:
        free, nothing = np.full_like(limits, inf), np.zeros_like(stage_bytes)
        counts = evenest_ranks(stage_bytes, nothing, free, placement, None, offsets=-limits) or []
    bounds = np.cumsum([0, *counts])
    totals = np.bincount(placement, stage_bytes[np.arange(num_stages), bounds[:-1], bounds[1:]])
    rank = int((totals - limits).argmax())
    stages = [g for g in range(num_stages) if placement[g] == rank]
    layers = " and ".join(f"layers {bounds[g]} to {bounds[g + 1] - 1}" for g in stages)
    names = " and ".join(map(str, stages))
    return (
        f"No partition of {num_layers} layers into {num_stages} stages fits in memory. At best rank {rank} (stage "
        f"{names}: {layers}) needs {totals[rank]:.6g} bytes and has {limits[rank]:.6g}: "
        f"{totals[rank] - limits[rank]:.6g} too few. Use more ranks, or recompute or offload more."
    )
