"""Recomputation in segments: a stage keeps what enters each of them, and computes the rest again in its backward.

Narayanan et al. 2021 (PTD-P), section 3.5: with c checkpoints in a stage of l layers, at most c A_input + l/c
A_intermediate is held, which is least at c = sqrt(l A_intermediate / A_input).
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Generic, TypeVar

import torch
from torch import Tensor

from slipstream.model.saving import SavedTensors
from slipstream.model.sequential.shape_trace import ShapeTrace
from slipstream.model.tensor_spec import Tensors
from slipstream.planner.partition import partition_layers

_Outputs = TypeVar("_Outputs")


def choose_segments(owned: range, trace: ShapeTrace) -> list[range]:
    """Returns the best number of segments of a stage's layers, each with about as many bytes to recompute."""
    inputs = [sum(spec.num_bytes for spec in trace.boundaries[index].specs) for index in owned]
    intermediate = [float(trace.work[index].saved_bytes) for index in owned]
    ratio = len(owned) * sum(intermediate) / max(sum(inputs), 1)  # l A_intermediate / A_input, of the mean layer
    num_segments = min(max(round(sqrt(ratio)), 1), len(owned))
    segments, start = [], owned.start
    for count in partition_layers(intermediate, num_segments):
        segments.append(range(start, start + count))
        start += count
    return segments


def recompute_in_backward(run: Callable[[Tensors, bool], _Outputs], inputs: Tensors) -> _Outputs:
    """Returns `run(inputs, False)`, keeping only the inputs; `run(inputs, True)` computes the rest again in the
    backward.

    The backward uses the same autocast. `run` is responsible for its random state.
    """
    return _Segment(run, inputs).forward()


class _Segment(Generic[_Outputs]):
    """Lives as long as the graph of its forward."""

    def __init__(self, run: Callable[[Tensors, bool], _Outputs], inputs: Tensors) -> None:
        self._run, self._inputs = run, inputs
        self._saved = SavedTensors(set())
        device = inputs[0].device.type
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def forward(self) -> _Outputs:
        with self._saved.saving(lambda tensor: False, self._refill):
            return self._run(self._inputs, False)

    def _refill(self) -> None:
        inputs, self._inputs = tuple(map(_leaf, self._inputs)), ()
        with torch.enable_grad(), torch.autocast(*self._autocast):
            self._saved.refill(lambda: self._run(inputs, True))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
