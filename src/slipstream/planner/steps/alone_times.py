"""When the actions of each microbatch would start if it ran alone, compiled."""

from __future__ import annotations

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.simulator.numba_jit import compiled


@compiled
def alone_starts(forward: Floats, backward: Floats, travels: Floats, crosses: Flags, microbatch: Ints) -> Floats:
    """Returns the start of each slice's forward and backward on each stage, (2, stages, slices), if its microbatch had
    the pipeline to itself and each stage a rank.

    Args:
        forward: seconds, (stages, slices).
        backward: seconds, (stages, slices).
        travels: the seconds of each slice's messages, (slices,).
        crosses: whether the stage's input comes from another rank, (stages,).
        microbatch: of each slice; slices of one follow each other.
    """
    num_stages, num_slices = forward.shape
    start = np.zeros((2, num_stages, num_slices))
    for stage in range(num_stages):
        free = 0.0
        for k in range(num_slices):
            if k > 0 and microbatch[k] != microbatch[k - 1]:
                free = 0.0
            ready = 0.0
            if stage > 0:
                link = travels[k] if crosses[stage] else 0.0
                ready = start[0, stage - 1, k] + forward[stage - 1, k] + link
            start[0, stage, k] = max(free, ready)
            free = start[0, stage, k] + forward[stage, k]
    for stage in range(num_stages - 1, -1, -1):
        free = 0.0
        for k in range(num_slices - 1, -1, -1):
            if k == num_slices - 1 or microbatch[k] != microbatch[k + 1]:
                free = start[0, stage, k] + forward[stage, k]
            ready = 0.0
            if stage < num_stages - 1:
                link = travels[k] if crosses[stage + 1] else 0.0
                ready = start[1, stage + 1, k] + backward[stage + 1, k] + link
            start[1, stage, k] = max(free, ready)
            free = start[1, stage, k] + backward[stage, k]
    return start
