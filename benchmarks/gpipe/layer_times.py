"""Measures the forward and backward seconds of every layer of a sequence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.model import TensorSpec
from slipstream.model.weight_gradients import add_weight_gradients_in_place
from slipstream.pipeline.pipeline_options import LossFunction
from slipstream.sequential import (
    BatchSlice,
    LayerBoundary,
    LayerValue,
    SequentialLayer,
    ShapeTrace,
    ShapeTracer,
    as_tuple,
    find_skip_routes,
    flatten_layers,
)
from slipstream.sequential.batch_norm import MiniBatchStatistics
from slipstream.sequential.layer_list import SkipPop, SkipStash


@dataclass(frozen=True)
class LayerTime:
    """A layer's seconds for one microbatch. The last layer's include the loss."""

    name: str
    forward: float  # seconds
    backward: float
    flops: int  # of the forward
    output_bytes: int  # of what it hands to the next layer
    num_parameters: int


@dataclass(frozen=True)
class SkipBytes:
    """A skip from one layer to a later one."""

    stash: int
    pop: int
    num_bytes: int


@dataclass(frozen=True)
class Times:
    """The seconds of all layers of a sequence."""

    layers: list[LayerTime]
    skips: list[SkipBytes]

    @property
    def forward(self) -> list[float]:
        return [layer.forward for layer in self.layers]

    @property
    def backward(self) -> list[float]:
        return [layer.backward for layer in self.layers]

    @property
    def costs(self) -> list[float]:
        """Returns the seconds of each layer's forward and backward together."""
        return [layer.forward + layer.backward for layer in self.layers]

    @property
    def flops_per_second(self) -> float:
        """Returns the rate over a whole microbatch, a backward counting twice the operations of the forward."""
        return 3 * sum(layer.flops for layer in self.layers) / sum(self.costs)

    def deepened(self, num_layers: int, each: int = 2) -> Times:
        """Returns times with the `each` layers after the first repeated until there are `num_layers` times as many."""
        first, *inside = self.layers[: 1 + each]
        names = [replace(layer, name=f"{layer.name} of {number}") for number in range(num_layers) for layer in inside]
        return Times([first, *names, self.layers[-1]], self.skips)


def trace_of(model: nn.Sequential, example: LayerValue) -> tuple[list[SequentialLayer], ShapeTrace, list[SkipBytes]]:
    """Traces the layers: what they pass on, and the skips between them."""
    layers = flatten_layers(model)
    routes = find_skip_routes(layers)
    trace = ShapeTracer(layers, torch.device("cpu")).trace(BatchSlice(example), training=True)
    skips = [SkipBytes(route.stash, route.pop, _num_bytes([trace.skips[route.name][0]])) for route in routes]
    return layers, trace, skips


def measure(model: nn.Sequential, example: LayerValue, targets: Tensor, loss: LossFunction, repeats: int) -> Times:
    """Returns medians over rounds through all layers in order, after one that pays for page faults, so that a layer
    finds its weights in caches only where a pipeline's would.

    A layer runs on random inputs of the shapes that it is given, but for the first one; the weights' gradients are
    added to those that are there.
    """
    layers, trace, skips = trace_of(model, example)
    add_weight_gradients_in_place(model)
    seen = MiniBatchStatistics([layer.module for layer in layers])
    seen.begin()
    modules: list[nn.Module] = [layer.module for layer in layers]
    modules[-1] = _WithLoss(modules[-1], targets, loss)
    runs = [_round(modules, trace, example, seen) for _ in range(1 + repeats)][1:]
    forwards, backwards = (
        [statistics.median(run[number][part] for run in runs) for number in range(len(layers))] for part in (0, 1)
    )
    sizes = [_num_bytes(boundary.specs) for boundary in trace.boundaries[1:-1]] + [0]  # the last hands on nothing
    return Times(
        [
            LayerTime(
                layer.name, forward, backward, work.flops, size, sum(p.numel() for p in layer.module.parameters())
            )
            for layer, forward, backward, work, size in zip(layers, forwards, backwards, trace.work, sizes, strict=True)
        ],
        skips,
    )


class _WithLoss(nn.Module):
    """The last layer, followed by the sum of the losses."""

    def __init__(self, layer: nn.Module, targets: Tensor, loss: LossFunction) -> None:
        super().__init__()
        self.layer, self.targets, self.loss = layer, targets, loss

    def forward(self, value: LayerValue) -> Tensor:
        return self.loss(self.layer(value), self.targets)[0]


def _round(
    modules: Sequence[nn.Module], trace: ShapeTrace, example: LayerValue, seen: MiniBatchStatistics
) -> list[tuple[float, float]]:
    """Returns the seconds of every layer's forward and backward; a skip's ends take none."""
    found = []
    for number, module in enumerate(modules):
        if isinstance(module, (SkipStash, SkipPop)):
            found.append((0.0, 0.0))
        else:
            found.append(_run(module, _random(trace.boundaries[number]) if number else example, seen))
    return found


def _run(module: nn.Module, value: LayerValue, seen: MiniBatchStatistics) -> tuple[float, float]:
    """Returns the seconds of a forward and of its backward."""
    with seen.seeing(microbatch=0):
        began = time.perf_counter()
        output = module(value)
        forward = time.perf_counter() - began
    roots = [tensor for tensor in as_tuple(output) if tensor.grad_fn is not None]
    gradients = [torch.randn_like(tensor) for tensor in roots]
    began = time.perf_counter()
    if roots:
        torch.autograd.backward(roots, gradients)
    return forward, time.perf_counter() - began


def _random(boundary: LayerBoundary) -> LayerValue:
    tensors = tuple(_draw(spec) for spec in boundary.specs)
    return tensors if boundary.is_tuple else tensors[0]


def _draw(spec: TensorSpec) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.ones(spec.shape, dtype=spec.dtype)
    return torch.randn(spec.shape, dtype=spec.dtype).requires_grad_(spec.needs_gradient)


def _num_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)
