"""A quick lower bound of a step, from the busiest rank's work and what must come before and after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.joint.unit_costs import SlicedUnits
from slipstream.schedule import Op


def rank_bounds(units: SlicedUnits, bounds: Sequence[int], ranks: Ints, num_microbatches: int) -> Floats:
    """Returns, for each rank, seconds that no order of the step's actions beats.

    A rank begins once the first slice's forward has reached it. Its last input gradient has yet to travel through the
    stages before, while its weight gradients may follow at the very end.
    """
    forward, whole = units.stage_seconds(Op.F, bounds), units.stage_seconds(Op.B, bounds)
    inputs, weights = units.stage_seconds(Op.I, bounds), units.stage_seconds(Op.W, bounds)
    num_ranks = int(ranks.max()) + 1
    link = units.message_seconds[0] * (np.diff(ranks, prepend=ranks[0]) != 0)
    ahead = forward[:, 0] + link
    back = np.minimum(whole, inputs)
    # no gradient is sent to a stage without backwards
    behind = back[:, 0] + link * (np.arange(len(link)) > units.frozen_stages(bounds))
    head, tail = np.full(num_ranks, np.inf), np.full(num_ranks, np.inf)
    np.minimum.at(head, ranks, np.cumsum(ahead) - forward[:, 0])
    np.minimum.at(tail, ranks, np.cumsum(behind) - back[:, 0])
    before_weights = num_microbatches * np.bincount(ranks, (forward + back).sum(axis=1), minlength=num_ranks)
    work = forward + np.minimum(whole, inputs + weights)
    all_work = num_microbatches * np.bincount(ranks, work.sum(axis=1), minlength=num_ranks)
    total: Floats = head + np.maximum(all_work, before_weights + tail)
    return total
