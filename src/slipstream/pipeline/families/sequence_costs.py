"""The costs of a sequence's layers here: measured on an example, so that a plan can be made before the first step.

Copies of the layers run one after the other, each on the output of the layer before: whole, and after CutTokens on
slices of a few lengths after a few contexts, to which times are fitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.array_types import Floats
from slipstream.cost import NO_LINK, OPS, Costs, LinkTime, MeasuredLink, Work
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import kept_random_states
from slipstream.model import Tensors, add_weight_gradients_in_place, copy_modules, defer_weight_gradients
from slipstream.model.hooks import active_forward
from slipstream.pipeline.planning import LayerUnits
from slipstream.pipeline.planning.observed_steps import fit_slice_times
from slipstream.planner.cuts import Cuts
from slipstream.profile.measurement_run import make_short_grid
from slipstream.profile.stage_bench import PrefilledStore, seconds_of
from slipstream.schedule import Op
from slipstream.sequential import BatchSlice, SequentialLayer, ShapeTrace, as_value
from slipstream.sequential.layer_list import LayerContext, SkipPop, SkipStash, as_tuple

_REPEATS = 3  # runs of every op, the shortest one counted
_Points = list[tuple[int, int]]  # tokens of a slice, and before it
_Times = dict[Op, list[float]]  # seconds at each point


@dataclass(frozen=True)
class MeasuredLayers:
    """The seconds of a sequence's layers.

    Args:
        times: of each layer, by op, at each of `points`; of those before CutTokens, and of all where nothing is cut, at
            the first alone.
        points: tokens of slices, and before them.
        cut: the number of the first layer whose tokens are cut.
    """

    times: tuple[_Times, ...]
    points: _Points
    cut: int


def measure_layers(
    layers: Sequence[SequentialLayer],
    piece: BatchSlice,
    trace: ShapeTrace,
    cut: int | None,
    device: torch.device,
    budget: float = 60.0,
) -> MeasuredLayers:
    """Returns the layers' times on a microbatch, with tokens that are cut from the layer `cut` on. None: not at all.

    Once the budget, in seconds, is spent, nothing is repeated any more. Raises SlipstreamError where it is spent before
    all has been measured once.
    """
    begins = time.perf_counter()
    first = len(layers) if cut is None else cut
    points = [(piece.length, 0)]
    if cut is not None and piece.length > 1:
        step = Cuts.of_rows(piece.length).granularity
        longest = max(step, piece.length // 2 // step * step)
        points += [point for point in make_short_grid(piece.length, longest, step).points if point not in points]
    inputs: list[Tensors] = [tuple(tensor.to(device) for tensor in piece.tensors)]
    skips: list[dict[str, Tensor]] = [{}]
    times: list[_Times] = []
    fork = torch.random.fork_rng() if device.type == "cuda" else nullcontext()
    with kept_random_states(), fork:
        for index, layer in enumerate(layers):
            # CutTokens is done: from here on each layer gets one slice.
            if index == first + 1:
                hidden, *others = inputs[0]
                inputs = [(hidden[:, j : j + i], *others) for i, j in points]
                skips = [{} for _ in points]
            bench = _LayerBench(layer, index, piece, device, trace.boundaries[index].is_tuple)
            tokens = [range(j, j + i) for i, j in points] if index > first else [None]
            found = bench.run(inputs, tokens, skips, lambda: time.perf_counter() - begins > budget)
            if found is None:
                raise SlipstreamError(
                    f"measuring the layers took longer than {budget:.0f} s by {layer}, the {index + 1}th of "
                    f"{len(layers)}. Give slipstream.Layers(costs=[...]), with which nothing is measured."
                )
            times.append(found)
    return MeasuredLayers(tuple(times), points, first + 1)


class _LayerBench:
    """Times the ops of a copy of one layer."""

    def __init__(
        self, layer: SequentialLayer, index: int, piece: BatchSlice, device: torch.device, is_tuple: bool
    ) -> None:
        self._original = layer.module
        self._index = index
        self._piece = piece
        self._device = device
        self._is_tuple = is_tuple
        self._store = PrefilledStore(piece.length)

    def run(
        self,
        given: list[Tensors],
        tokens: Sequence[range | None],
        skips: list[dict[str, Tensor]],
        is_late: Callable[[], bool],
    ) -> _Times | None:
        """Returns the seconds of each op on the given inputs, and replaces them by the layer's outputs; None where it
        was late before each had run."""
        times: _Times = {op: [0.0] * len(given) for op in OPS}
        if isinstance(self._original, SkipStash):
            for inputs, left in zip(given, skips, strict=True):
                left[self._original.skip.name] = inputs[self._original.index]
            return times
        if isinstance(self._original, SkipPop):
            given[:] = [(*inputs, left[self._original.skip.name]) for inputs, left in zip(given, skips, strict=True)]
            return times
        self._module = nn.ModuleList(copy_modules([self._original], {}, partial(_copied, self._device))).train()
        add_weight_gradients_in_place(self._module)
        with torch.no_grad():  # keys and values of all tokens
            outputs = [as_tuple(self._call(inputs, span)) for inputs, span in zip(given, tokens, strict=True)]
        for place, (inputs, span) in enumerate(zip(given, tokens, strict=True)):
            if is_late():
                return None
            for op, seconds in self._shortest(inputs, span, is_late).items():
                times[op][place] = seconds
        given[:] = outputs
        return times

    def _shortest(self, given: Tensors, tokens: range | None, is_late: Callable[[], bool]) -> dict[Op, float]:
        runs = [self._ops(given, tokens)]
        while len(runs) < _REPEATS and not is_late():
            runs.append(self._ops(given, tokens))
        return {op: min(run[op] for run in runs) for op in OPS}

    def _ops(self, given: Tensors, tokens: range | None) -> dict[Op, float]:
        """Returns the seconds of F and B, then of F, I and W."""
        first, backward = self._forward(given, tokens)
        seconds = {Op.B: seconds_of(backward, self._device)}
        second, backward = self._forward(given, tokens)
        with defer_weight_gradients() as work:
            seconds[Op.I] = seconds_of(backward, self._device)
        seconds[Op.W] = seconds_of(lambda: [add() for add in work], self._device)
        return {Op.F: min(first, second)} | seconds

    def _forward(self, given: Tensors, tokens: range | None) -> tuple[float, Callable[[], object]]:
        """Returns the seconds of F, and its backward."""
        entered = [t.detach().requires_grad_(t.is_floating_point() and self._index > 0).clone() for t in given]
        outputs: list[Tensors] = []
        seconds = seconds_of(lambda: outputs.append(as_tuple(self._call(tuple(entered), tokens))), self._device)
        roots = [output for output in outputs[0] if output.requires_grad]
        if not roots:
            return seconds, lambda: None
        return seconds, partial(torch.autograd.backward, roots, [torch.ones_like(root) for root in roots])

    def _call(self, given: Tensors, tokens: range | None) -> Tensor | Tensors:
        if tokens is not None:
            self._store.rewind(tokens.start)
        context = LayerContext(self._piece, self._store, tokens, self._index)
        with active_forward(context):
            output: Tensor | Tensors = self._module[0](as_value(given, self._is_tuple))
        return output


def _copied(device: torch.device, tensor: Tensor) -> Tensor:
    clone = tensor.detach().to(device, copy=True)
    return nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone


@dataclass(frozen=True)
class SequenceCosts(Costs):
    """The measured costs of a sequence of layers, whose parts are runs of layers between which it may be cut.

    The first part is where the embedding is for a causal LM, and the last where its head is, so that of n parts n - 2
    are layers. Memory isn't known.

    Args:
        measured: the seconds of the layers.
        runs: the layers of each part.
        bytes_per_token: of a message between stages; of a whole microbatch where nothing is cut.
        measured_link: between two ranks. None: messages take no time.
    """

    measured: MeasuredLayers
    runs: tuple[range, ...]
    bytes_per_token: float
    measured_link: MeasuredLink | None = None

    @cached_property
    def parts(self) -> Sequence[int]:
        return range(len(self.runs))

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        link = self.measured_link
        return LinkTime(link.latency, link.bandwidth) if link else NO_LINK

    def each_seconds(self, work: Work) -> Floats:
        """Returns the seconds of each part, (parts, slices). The first slice takes a whole microbatch through the
        layers before the cut."""
        op, lengths, contexts = work
        features = np.stack([np.ones(len(lengths)), lengths, lengths * contexts + lengths * (lengths + 1) / 2])
        whole, sliced = self._fits[op]
        by_layer = np.outer(whole, contexts == 0) + sliced @ features
        seconds: Floats = np.add.reduceat(by_layer, [run.start for run in self.runs], axis=0)
        return seconds

    @cached_property
    def _fits(self) -> dict[Op, tuple[Floats, Floats]]:
        """The seconds of each layer that isn't cut, and the rates of those that are."""
        fits = {}
        cut = self.measured.cut
        for op in OPS:
            times = [of_layer[op] for of_layer in self.measured.times]
            whole = np.array([seconds[0] if index < cut else 0.0 for index, seconds in enumerate(times)])
            sliced = [np.zeros(3)] * min(cut, len(times))
            for seconds in times[cut:]:
                sliced.append(fit_slice_times([(*p, s) for p, s in zip(self.measured.points, seconds, strict=True)]))
            fits[op] = whole, np.array(sliced)
        return fits

    def message_bytes(self, length: Any) -> Any:
        return self.bytes_per_token * np.asarray(length, float)

    def handling_seconds(self, length: Any) -> Any:
        if self.measured_link is None:
            return super().handling_seconds(length)
        return self.measured_link.handling_seconds(self.message_bytes(length))

    def layers_of(self, partition: Sequence[float]) -> tuple[float, ...]:
        """Returns the layers of each stage, given the parts between the first and the last."""
        return LayerUnits([len(run) for run in self.runs]).layers_of(partition)


def runs_between(num_layers: int, may_cut: Callable[[int], bool]) -> tuple[range, ...]:
    """Returns the runs of layers between the places where a sequence may be cut."""
    places = [0, *filter(may_cut, range(1, num_layers)), num_layers]
    return tuple(range(a, b) for a, b in pairwise(places))


def bytes_between(trace: ShapeTrace, cut: int | None) -> float:
    """Returns the mean bytes of a message between two layers: of a microbatch, or of its cut part after the cut."""
    inner = trace.boundaries[1:-1] if cut is None else trace.boundaries[cut + 1 : -1]
    sizes = [
        sum(
            float(np.prod(spec.shape)) * spec.dtype.itemsize
            for spec, is_shared in zip(boundary.specs, boundary.is_shared, strict=True)
            if cut is None or not is_shared
        )
        for boundary in inner
    ]
    return sum(sizes) / max(len(sizes), 1)
