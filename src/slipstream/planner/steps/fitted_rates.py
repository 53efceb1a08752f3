"""The rates of a pipeline's stages from what the units of a model cost: a profile's, or any other's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

import numpy as np

from slipstream.array_types import Floats
from slipstream.planner.costs import OPS, WITH_MESSAGES, AttentionWindow, messages_of_stages
from slipstream.planner.joint import UnitCosts
from slipstream.planner.steps.stage_rates import StageRates
from slipstream.schedule import Op

_POINTS = 5  # of slice lengths, and of contexts


def fit_rates(
    units: UnitCosts,
    partition: Sequence[float],
    longest_slice: int,
    longest_sequence: int,
    shortest_slice: int = 64,
    windows: Sequence[AttentionWindow] = (AttentionWindow(),),
    recompute: bool = False,
) -> StageRates:
    """Returns the rates with the least squared relative error to the units' times; none is below 0. Stages of which
    nothing is trained have no backward.

    Args:
        units: what each unit of the model costs, for microbatches of one row.
        partition: layers of each stage, in halves where layers can be cut.
        longest_slice: the longest slice whose time is known.
        longest_sequence: where contexts end.
        shortest_slice: the shortest slice whose time is known.
        windows: of attention.
        recompute: whether forwards run again before their backwards.
    """
    shortest = min(shortest_slice, longest_slice)
    lengths = np.unique(np.geomspace(shortest, longest_slice, _POINTS).round().astype(np.int64))
    contexts = np.linspace(0, max(longest_sequence - longest_slice, 0), _POINTS).round().astype(np.int64)
    i, j = np.array([*product(lengths, np.unique(contexts))], np.int64).T
    bounds = _unit_bounds(units, partition)
    scores = [np.asarray(window.scores(i + j) - window.scores(j), float) for window in windows]
    features = np.stack([np.ones(len(i)), i.astype(float), *scores], axis=1)
    handled = np.outer(messages_of_stages(len(partition)), units.handling_seconds(i))
    computed = {op: _of_stages(*units.seconds(op, i, j), bounds) for op in OPS}
    if recompute:
        computed |= {op: computed[op] + computed[Op.F] for op in (Op.B, Op.I)}
    times = {op: each + (op in WITH_MESSAGES) * handled for op, each in computed.items()}
    num_frozen = sum(bound <= units.num_frozen_units for bound in bounds[1:])
    for op in (Op.B, Op.I, Op.W):
        times[op][:num_frozen] = 0.0
    seconds = {op: np.array([_least_squares(features, each) for each in stages]) for op, stages in times.items()}
    held = _of_stages(*units.activation_bytes(lengths), bounds)
    per_token = np.stack([np.ones(len(lengths)), lengths.astype(float)], axis=1)
    return StageRates(
        seconds=seconds,
        activation_bytes=np.array([_least_squares(per_token, each) for each in held]),
        message_bytes=float(units.message_bytes(lengths[-1:])[0] / lengths[-1]),
        latency=units.latency,
        bandwidth=units.bandwidth,
        windows=tuple(windows),
    )


def _unit_bounds(units: UnitCosts, partition: Sequence[float]) -> list[int]:
    """Returns the first unit of each stage, and the number of units: embedding, layers or their halves, head."""
    begins = [1 + round(units.units_per_layer * layers) for layers in accumulate(partition)]
    return [0, *begins[:-1], begins[-1] + 1]


def _of_stages(each: Floats, fixed: Floats, bounds: Sequence[int]) -> Floats:
    """Returns the sums of a quantity over the units of each stage, with what a stage has besides, (stages, points)."""
    sums: Floats = np.add.reduceat(each, bounds[:-1], axis=0) + fixed
    return sums


def _least_squares(features: Floats, values: Floats) -> Floats:
    """Returns coefficients of at least 0 with the least squared relative error; what would be below 0 is left out."""
    found = np.zeros(features.shape[1])
    if not values.any():
        return found
    relative = features / np.maximum(values, values.max() * 1e-6)[:, None]
    scale = np.linalg.norm(relative, axis=0)
    used = np.flatnonzero(scale)
    while len(used):
        solution = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(len(values)), rcond=1e-10)[0]
        if solution.min() >= 0:
            found[used] = solution / scale[used]
            break
        used = np.delete(used, solution.argmin())
    return found
