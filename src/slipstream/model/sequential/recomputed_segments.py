"""Recomputation in segments: a stage keeps what enters each of them, and computes the rest again in its backward.

Narayanan et al. 2021 (PTD-P), section 3.5: with c checkpoints in a stage of l layers, at most c A_input + l/c
A_intermediate is held, which is least at c = sqrt(l A_intermediate / A_input).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from itertools import accumulate, pairwise
from math import sqrt
from typing import TypeVar

import torch

from slipstream.model.saving import SavedTensors
from slipstream.model.saving.recomputation import OutputChecks, replay_checked
from slipstream.model.sequential.shape_trace import ShapeTrace
from slipstream.model.tensor_spec import Tensors
from slipstream.planner.partition import partition_layers

_Outputs = TypeVar("_Outputs")


@lru_cache(maxsize=256)
def choose_segments(owned: range, trace: ShapeTrace) -> list[range]:
    """Returns the best number of segments of a stage's layers, each with about as many bytes to recompute."""
    inputs = [sum(spec.num_bytes for spec in trace.boundaries[index].specs) for index in owned]
    intermediate = [float(trace.work[index].saved_bytes) for index in owned]
    ratio = len(owned) * sum(intermediate) / max(sum(inputs), 1)  # l A_intermediate / A_input, of the mean layer
    num_segments = min(max(round(sqrt(ratio)), 1), len(owned))
    bounds = accumulate(partition_layers(intermediate, num_segments), initial=owned.start)
    return [range(start, end) for start, end in pairwise(bounds)]


def recompute_in_backward(run: Callable[[Tensors, bool], _Outputs], inputs: Tensors, is_checked: bool) -> _Outputs:
    """Returns `run(inputs, False)`, keeping only the inputs; `run(inputs, True)` computes the rest again in the
    backward, and it is compared where that `is_checked`.

    The backward uses the same autocast. `run` is responsible for its random state.
    """
    saved, kept, checks = SavedTensors(set()), [inputs], OutputChecks() if is_checked else None
    device = inputs[0].device.type
    autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def refill() -> None:
        again = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in kept.pop())
        with torch.enable_grad(), torch.autocast(*autocast):
            replay_checked(saved, lambda: run(again, True), checks)

    with checks.keeping() if checks else nullcontext(), saved.saving(lambda tensor: False, refill):
        return run(inputs, False)
