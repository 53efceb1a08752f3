"""Runs one stage of an nn.Sequential, some consecutive layers, on a microbatch or a token slice at a time.

Where it recomputes, a stage keeps the inputs of some segments of its layers, and computes the rest again in its
backward. Narayanan et al. 2021 (PTD-P), section 3.5: with c checkpoints in a stage of l layers, at most c A_input + l/c
A_intermediate is held, which is least at c = sqrt(l A_intermediate / A_input).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.attention import ContextError, ContextStore
from slipstream.autograd_calls import with_backward
from slipstream.model import (
    PipelineStage,
    RecomputePolicy,
    Tensors,
    TensorSpec,
    add_weight_gradients_in_place,
    copied_from_messages,
    left_to_autograd,
    recompute_in_backward,
    without_saved_tensors_hooks,
)
from slipstream.model.hooks import active_forward, note_output
from slipstream.planner.partition import partition_layers
from slipstream.sequential.batch_norm import MiniBatchStatistics
from slipstream.sequential.cut_tokens import find_cut
from slipstream.sequential.layer_list import (
    BatchSlice,
    LayerContext,
    LayerValue,
    SkipPop,
    SkipRoute,
    SkipStash,
    as_tuple,
    as_value,
)
from slipstream.sequential.shape_trace import LayerBoundary, ShapeTrace, ShapeTracer

Skips = dict[str, Tensor]  # stashed and not yet popped, by name


class SequentialStage(PipelineStage):
    """Layers `stages[number]` of a sequence.

    It receives the output of the layer before, then the skips that end here and began on other stages, and sends
    likewise. Of token slices, the first runs the layers before CutTokens, and brings what CutTokens leaves whole:

        slice 0   encoder -> cut -> decoder        messages: all of a boundary
        slice 1             tokens -> decoder      messages: nothing before the cut; after it what isn't whole
    """

    def __init__(
        self,
        number: int,
        stages: Sequence[range],
        routes: Sequence[SkipRoute],
        tracer: ShapeTracer,
        has_segments: bool,
        recompute: RecomputePolicy | None,
    ) -> None:
        """With `has_segments` it keeps only the inputs of some segments of its layers, and recomputes them in its
        backward; `recompute` says which layers are such a segment each."""
        self._number, self.layers_here = number, stages[number]  # the numbers of its layers
        self.is_first = number == 0
        self.is_last = number == len(stages) - 1
        self.has_loss = self.is_last
        # There is no head whose rows could be spread.
        self.vocabulary = None
        own = [tracer.layers[index] for index in self.layers_here]
        self._names = [layer.name for layer in own]
        self.layers = [layer.module for layer in own]
        self.model = nn.ModuleList(self.layers).to(tracer.device)
        self.tied = []
        self._tracer = tracer
        self._has_segments = has_segments
        self._recompute = recompute or RecomputePolicy()
        self._routes = {route.name: route for route in routes}
        place = {index: owner for owner, owned in enumerate(stages) for index in owned}
        ends = [(route.name, place[route.stash], place[route.pop]) for route in routes]
        self._arrivals = self._in_order((name, begin) for name, begin, end in ends if begin < end == number)
        self._departures = self._in_order((name, end) for name, begin, end in ends if number == begin < end)
        self.has_skips = any(abs(end - number) > 1 for _, end in (*self._arrivals, *self._departures))
        cut = find_cut(tracer.layers)
        self._cut = len(tracer.layers) if cut is None else cut
        add_weight_gradients_in_place(self.model)
        self.statistics = MiniBatchStatistics(self.layers)

    @property
    def graph_obstacle(self) -> str | None:
        """See `PipelineStage`."""
        return "an nn.Sequential's layers may be any code"

    def _in_order(self, ends: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Sorts (skip, stage at its other end): first those that go with the regular message, then stage by stage."""
        return sorted(ends, key=lambda end: (abs(end[1] - self._number) > 1, end[1]))

    def receives(self, piece: BatchSlice) -> tuple[TensorSpec, ...]:
        """Returns the tensors that come from other stages, in order."""
        return () if self.is_first else self._specs(self.layers_here.start, self._arrivals, piece)

    def sends(self, piece: BatchSlice) -> tuple[TensorSpec, ...]:
        """Returns the tensors that go to other stages, in order."""
        return () if self.is_last else self._specs(self.layers_here.stop, self._departures, piece)

    def compute(self, piece: BatchSlice, inputs: Tensors, store: ContextStore) -> Any:
        """Runs the layers' forward and returns the message; the last stage returns its last layer's output."""
        names = [name for name, _ in self._travelling_skips(self._arrivals, piece)]
        num_regular = len(inputs) - len(names)
        tensors = piece.tensors if self.is_first else inputs[:num_regular]
        skips = dict(zip(names, inputs[num_regular:], strict=True))
        context = LayerContext(piece, store)
        if piece.tokens is None:
            tensors, skips = self._through(self.layers_here, tensors, skips, context)
        else:
            tensors, skips = self._sliced(tensors, skips, inputs, context)
        if self.is_last:
            return as_value(tensors, self._trace(piece).boundaries[-1].is_tuple)
        main = [tensors[index] for index in self._travelling(self.layers_here.stop, piece)]
        return (*main, *(skips[name] for name, _ in self._travelling_skips(self._departures, piece)))

    def _sliced(self, tensors: Tensors, skips: Skips, inputs: Tensors, context: LayerContext) -> tuple[Tensors, Skips]:
        """Runs `_through` for a token slice: the layers before the cut, for the first slice, and those after it."""
        start, stop = self.layers_here.start, self.layers_here.stop
        if context.piece.index == 0:
            tensors, skips = self._through(range(start, min(stop, self._cut)), tensors, skips, context)
        if stop <= self._cut:
            return tensors, skips
        tensors = self._with_shared(tensors, inputs, context)
        return self._through(range(max(start, self._cut + 1), stop), tensors, skips, context)

    def _with_shared(self, tensors: Tensors, inputs: Tensors, context: LayerContext) -> Tensors:
        """Returns the input of the first layer after the cut, or of the stage.

        The first slice brings the tensors that all slices share, which stay here until its backward.
        """
        piece, store = context.piece, context.store
        assert piece.tokens is not None
        begins_here = self.layers_here.start <= self._cut
        boundary = self._trace(piece).boundaries[self._cut + 1 if begins_here else self.layers_here.start]
        numbers = [n for n, is_shared in enumerate(boundary.is_shared) if is_shared or (begins_here and n == 0)]
        brought = None
        regular = [*tensors]
        if piece.index == 0:
            brought = tuple(tensors[index] for index in numbers)
            regular = [tensor for index, tensor in enumerate(tensors) if index not in numbers]
            if not store.is_replaying:
                is_cut = [begins_here and index == 0 for index in numbers]
                store.shared = SharedTensors(copied_from_messages(brought, inputs), is_cut)
        assert isinstance(store.shared, SharedTensors)
        shared = iter(store.shared.read(piece.tokens, brought))
        others = iter(regular)
        return tuple(next(shared if index in numbers else others) for index in range(len(boundary.specs)))

    def _through(self, layers: range, tensors: Tensors, skips: Skips, context: LayerContext) -> tuple[Tensors, Skips]:
        """Runs these layers on the output of the one before and on skips; returns their output and the skips left."""
        for segment in self._segments(layers, context.piece) if torch.is_grad_enabled() else ():
            tensors, skips = self._run_recomputed(segment, tensors, skips, context)
            layers = range(segment.stop, layers.stop)
        return self._run(layers, tensors, skips, context) if layers else (tensors, skips)

    def _segments(self, layers: range, piece: BatchSlice) -> list[range]:
        """Returns the first of these layers as segments that the backward recomputes."""
        if self._has_segments and layers:
            return choose_segments(layers, self._trace(piece))
        stop = min(layers.stop, self.layers_here.start + self._recompute.num_layers)
        return [range(index, index + 1) for index in layers if index < stop]

    def _run_recomputed(
        self, segment: range, tensors: Tensors, skips: Skips, context: LayerContext
    ) -> tuple[Tensors, Skips]:
        """Runs `_run`, keeping only its inputs."""
        popped = [name for name in skips if self._routes[name].pop in segment]
        num_tensors = len(tensors)

        def run(inputs: Tensors, again: bool) -> tuple[Tensors, Skips]:
            entered = dict(zip(popped, inputs[num_tensors:], strict=True))
            with context.store.replay() if again else nullcontext():
                return self._run(segment, inputs[:num_tensors], entered, context, again)

        inputs = (*tensors, *(skips[name] for name in popped))
        outputs, stashed = recompute_in_backward(
            partial(run, inputs, False),
            partial(run, again=True),
            inputs,
            self._recompute.is_checked,
            context.store.is_repeated,
        )
        # A replay of the stage compares it; a backward compares each layer.
        note_output(str(self._tracer.layers[segment[-1]]), outputs)
        return outputs, {name: tensor for name, tensor in skips.items() if name not in popped} | stashed

    def _run(
        self, layers: range, tensors: Tensors, skips: Skips, context: LayerContext, again: bool = False
    ) -> tuple[Tensors, Skips]:
        piece = context.piece
        trace = self._trace(context.piece)
        context = LayerContext(piece, context.store, piece.tokens if layers.start > self._cut else None)
        came = trace.boundaries[layers.start]
        skips = dict(skips)
        value = as_value(_own(tensors, came.changed), came.is_tuple)
        is_random = any(trace.work[index].is_random for index in layers)
        fork = torch.random.fork_rng(enabled=is_random)
        with active_forward(context), fork, self.statistics.seeing(piece.microbatch, again):
            for index in layers:
                context.layer = index
                if trace.work[index].is_random:
                    torch.manual_seed(context.seed())
                value = self._call(index, value, skips, trace)
                note_output(str(self._tracer.layers[index]), value)
        return as_tuple(value), skips

    def _call(self, index: int, value: LayerValue, skips: Skips, trace: ShapeTrace) -> LayerValue:
        layer = self.layers[index - self.layers_here.start]
        if isinstance(layer, SkipStash):
            return _stash(layer, value, skips, trace.boundaries[index + 1])
        if isinstance(layer, SkipPop):
            name = layer.skip.name
            return (*as_tuple(value), *_own((skips.pop(name),), (trace.skips[name][1],)))
        if not trace.work[index].differentiates:
            return layer(value)  # type: ignore[no-any-return]
        # Its saved tensors are kept, since its forward needs them.
        with left_to_autograd(), without_saved_tensors_hooks():
            return layer(value)  # type: ignore[no-any-return]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under the unsplit model's names."""
        names: dict[nn.Parameter, str] = {}
        for name, layer in zip(self._names, self.layers, strict=True):
            for key, parameter in layer.named_parameters(prefix=name):
                names.setdefault(parameter, key)
        return ((name, parameter) for parameter, name in names.items())

    def state(self) -> dict[str, Tensor]:
        """Returns this stage's part of the unsplit model's state dict, by the same names."""
        states = (layer.state_dict(prefix=f"{name}.") for name, layer in zip(self._names, self.layers, strict=True))
        return {key: tensor.detach() for state in states for key, tensor in state.items()}

    def _trace(self, piece: BatchSlice) -> ShapeTrace:
        return self._tracer.trace(piece, self.model.training)

    def _specs(self, number: int, skips: list[tuple[str, int]], piece: BatchSlice) -> tuple[TensorSpec, ...]:
        """Returns the tensors of a boundary and of skips. Skips between neighbours go with the regular message."""
        trace = self._trace(piece)
        regular = [trace.boundaries[number].specs[index] for index in self._travelling(number, piece)]
        ends = self._travelling_skips(skips, piece)
        peers = [(name, None if abs(other - self._number) == 1 else other) for name, other in ends]
        return (*regular, *(trace.skips[name][0]._replace(peer=peer) for name, peer in peers))

    def _travelling(self, number: int, piece: BatchSlice) -> list[int]:
        """Returns which tensors of a boundary go from stage to stage: with the first slice all of them."""
        is_own = number > self._cut
        is_shared = self._trace(piece).boundaries[number].is_shared
        return [index for index, shared in enumerate(is_shared) if piece.index == 0 or (is_own and not shared)]

    def _travelling_skips(self, skips: list[tuple[str, int]], piece: BatchSlice) -> list[tuple[str, int]]:
        return [end for end in skips if piece.index == 0 or self._routes[end[0]].stash > self._cut]


def _own(tensors: Tensors, changed: Sequence[bool]) -> Tensors:
    """Returns the tensors, with copies of those changed in place: their memory may be a message's or the caller's."""
    return tuple(tensor.clone() if is_changed else tensor for tensor, is_changed in zip(tensors, changed, strict=True))


def _stash(layer: SkipStash, value: LayerValue, skips: Skips, after: LayerBoundary) -> LayerValue:
    """Gives the skip and the layer's output separate gradients, which are added here, wherever the skip ends.

    The sum of more than two would depend on the split.
    """
    tensors = list(as_tuple(value))
    skip = main = tensors[layer.index]
    if torch.is_grad_enabled() and main.requires_grad:
        main, skip = with_backward(
            lambda whole: (whole.view_as(whole), whole.view_as(whole)), _joined, main, fills=False
        )
    skips[layer.skip.name] = skip
    tensors[layer.index] = main
    return as_value(_own(tuple(tensors), after.changed), after.is_tuple)


def _joined(main: Tensor | None, skip: Tensor | None) -> tuple[Tensor | None]:
    """Returns the gradient of a tensor that goes two ways, of which one may lead nowhere."""
    if main is None or skip is None:
        return (skip if main is None else main,)
    return (main + skip,)


class SharedTensors:
    """Tensors of which each slice reads its tokens (dim 1), if they are cut, or the whole.

        forward    slice 0 brings them        slices 1, 2, ... read them
        backward   slices ..., 2, 1 leave gradients        slice 0 takes the sums, and its backward continues with them

    Sums are in float32, or in the tensors' dtype where that is wider.
    """

    def __init__(self, tensors: Tensors, is_cut: Sequence[bool]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._is_cut = is_cut
        self._numbers = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        self._gradients: dict[int, Tensor] = {}

    def read(self, tokens: range, brought: Tensors | None = None) -> Tensors:
        """Returns a slice's tensors: slice 0's is connected to the graph of the tensors that it brings, and a later
        one's graph begins here."""
        views = [self._view(index, tokens) for index in range(len(self._tensors))]
        if self._numbers and torch.is_grad_enabled():
            is_first = brought is not None
            begin = (torch.empty(0, requires_grad=True),)
            ends = begin if brought is None else tuple(brought[index] for index in self._numbers)

            def differentiable(*_: Tensor) -> list[Tensor]:
                return [self._view(index, tokens) for index in self._numbers]

            def leave(*gradients: Tensor | None) -> list[Tensor | None]:
                self._add(gradients, tokens)
                return self._take() if is_first else [None]

            # All at the same time, so that every sum is taken if slice 0's loss depends on any of them.
            leaves = with_backward(differentiable, leave, *ends, fills=False)
            for index, tensor in zip(self._numbers, leaves, strict=True):
                views[index] = tensor
        return tuple(views)

    def close(self) -> None:
        """Raises ContextError where gradients were never taken, because slice 0's backward didn't come here."""
        if self._gradients:
            raise ContextError(
                "token slices left gradients for what the first of them brought, but its own loss depends on none of "
                "it. loss_fn must return a sum that depends on the outputs, even where no target counts."
            )

    def _add(self, gradients: Sequence[Tensor | None], tokens: range) -> None:
        """Adds a slice's gradients to the sums."""
        for index, gradient in zip(self._numbers, gradients, strict=True):
            if gradient is not None:
                like = self._tensors[index]
                if index not in self._gradients:
                    wide = torch.promote_types(like.dtype, torch.float32)
                    self._gradients[index] = torch.zeros_like(like, dtype=wide)
                self._part(self._gradients[index], index, tokens).add_(gradient)

    def _take(self) -> list[Tensor | None]:
        """Returns the complete sums and forgets them."""
        sums = [(self._gradients.pop(index, None), self._tensors[index].dtype) for index in self._numbers]
        return [None if total is None else total.to(dtype) for total, dtype in sums]

    def _view(self, number: int, tokens: range) -> Tensor:
        """Returns a slice's view, contiguous where it is cut, as if it came in a message: layers may `view` it."""
        part = self._part(self._tensors[number], number, tokens)
        return part.contiguous() if self._is_cut[number] else part

    def _part(self, tensor: Tensor, number: int, tokens: range) -> Tensor:
        return tensor[:, tokens.start : tokens.stop] if self._is_cut[number] else tensor.view_as(tensor)


@lru_cache(maxsize=256)
def choose_segments(owned: range, trace: ShapeTrace) -> list[range]:
    """Returns the best number of segments of a stage's layers, each with about as many bytes to recompute."""
    inputs = [sum(spec.num_bytes for spec in trace.boundaries[index].specs) for index in owned]
    intermediate = [float(trace.work[index].saved_bytes) for index in owned]
    ratio = len(owned) * sum(intermediate) / max(sum(inputs), 1)  # l A_intermediate / A_input of the mean layer
    num_segments = min(max(round(sqrt(ratio)), 1), len(owned))
    bounds = accumulate(partition_layers(intermediate, num_segments), initial=owned.start)
    return [range(start, end) for start, end in pairwise(bounds)]
