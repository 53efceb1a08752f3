"""Runs an nn.Sequential without memory or arithmetic, to learn every layer's inputs, outputs and operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd import graph
from torch.autograd.variable import Variable

from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import kept_random_states
from slipstream.model import (
    OperationCounter,
    SavedStorages,
    TensorSpec,
    copy_modules,
    storage_id,
    storage_ids,
    without_saved_tensors_hooks,
    written_tensors,
)
from slipstream.sequential.batch_norm import MiniBatchStatistics
from slipstream.sequential.cut_tokens import CutTokens
from slipstream.sequential.layer_list import (
    BatchSlice,
    LayerValue,
    SequentialLayer,
    SkipPop,
    SkipStash,
    as_tuple,
    as_value,
)


@dataclass(frozen=True)
class LayerWork:
    """The operations, bytes moved and bytes saved of a layer's forward of a microbatch."""

    flops: float = 0
    num_bytes: float = 0  # bytes read and written by all operations
    saved_bytes: int = 0  # bytes kept for the backward, parameters aside
    is_random: bool = False
    differentiates: bool = False  # True if the forward itself differentiates


@dataclass(frozen=True)
class LayerBoundary:
    """The tensors that one layer passes to the next."""

    specs: tuple[TensorSpec, ...]
    is_tuple: bool
    changed: tuple[bool, ...]  # True for tensors that a later layer changes in place
    is_shared: tuple[bool, ...]  # True for tensors that CutTokens leaves whole, the same for every slice


@dataclass(frozen=True, eq=False)
class ShapeTrace:
    """The shapes of all layers for one shape of microbatches: `boundaries[j]` is layer j's input, the last the
    output."""

    boundaries: tuple[LayerBoundary, ...]
    # Spec of the skip's tensor; True if a layer after the pop changes it in place.
    skips: dict[str, tuple[TensorSpec, bool]]
    work: tuple[LayerWork, ...]


class ShapeTracer:
    """Traces microbatches, each shape once, with copies of all layers that take no memory."""

    def __init__(self, layers: Sequence[SequentialLayer], device: torch.device) -> None:
        self.layers = layers
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.copies = _without_memory([layer.module for layer in layers], self.mode, device)
        self.statistics = MiniBatchStatistics(self.copies)
        self._traces: dict[object, ShapeTrace] = {}

    def trace(self, piece: BatchSlice, training: bool) -> ShapeTrace:
        """Returns the trace of a microbatch's shape.

        Raises SlipstreamError, naming the layer, for a layer that can't run or can't be exact in a pipeline.
        """
        device = self.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in piece.tensors)
        num_tokens = None if piece.tokens is None else len(piece.tokens)
        key = shapes, isinstance(piece.value, tuple), training, autocast, num_tokens
        if key not in self._traces:
            self._traces[key] = _TraceRun(self, training, num_tokens).of(piece.value)
        return self._traces[key]


class _TraceRun:
    """Runs the layers once and collects the trace."""

    def __init__(self, tracer: ShapeTracer, training: bool, num_tokens: int | None) -> None:
        """`num_tokens` is a slice's number of tokens; None: tokens aren't cut."""
        self._tracer = tracer
        self._training = training
        self._num_tokens = num_tokens
        # At every boundary: the value, its tensors' versions there, and True for each shared tensor.
        self._values: list[tuple[LayerValue, list[int], tuple[bool, ...]]] = []
        self._shared: set[int] = set()  # ids
        self._stashed: dict[str, Tensor] = {}
        self._popped: dict[str, tuple[Tensor, int]] = {}
        self._fixed: list[tuple[Tensor, int, str]] = []  # tensors that no later layer may change, their versions, texts
        self._work: list[LayerWork] = []
        tracer.statistics.begin()

    def of(self, value: LayerValue) -> ShapeTrace:
        for module in self._tracer.copies:
            module.train(self._training)
        with kept_random_states(), self._tracer.mode, torch.enable_grad():
            empty = tuple(torch.empty_like(tensor, device=self._tracer.device) for tensor in as_tuple(value))
            made: LayerValue = as_value(empty, isinstance(value, tuple))
            self._note(made)
            for layer, module in zip(self._tracer.layers, self._tracer.copies, strict=True):
                self._work.append(LayerWork())
                made = self._step(layer, module, made)
                self._note(made)
                self._check_fixed(layer)
            return self._result()

    def _step(self, layer: SequentialLayer, module: nn.Module, value: LayerValue) -> LayerValue:
        if isinstance(module, SkipStash):
            return self._stash(layer, module, value)
        if isinstance(module, SkipPop):
            tensor = self._stashed.pop(module.skip.name)
            self._fixed = [entry for entry in self._fixed if entry[0] is not tensor]
            self._popped[module.skip.name] = tensor, tensor._version
            return (*as_tuple(value), tensor)
        if isinstance(module, CutTokens) and self._num_tokens is not None:
            return self._cut(layer, value, self._num_tokens)
        return self._call(layer, module, value)

    def _cut(self, layer: SequentialLayer, value: LayerValue, num_tokens: int) -> LayerValue:
        hidden, *others = as_tuple(value)
        if hidden.dim() < 2:
            raise SlipstreamError(f"{layer} is given {_described(value)}. The first must be (rows, tokens, ...).")
        self._shared = {id(tensor) for tensor in others}
        self._fixed += [(tensor, tensor._version, "all token slices share") for tensor in others]
        return as_value((hidden[:, :num_tokens].clone(), *others), isinstance(value, tuple))

    def _stash(self, layer: SequentialLayer, stash: SkipStash, value: LayerValue) -> LayerValue:
        tensors = as_tuple(value)
        name = stash.skip.name
        if not -len(tensors) <= stash.index < len(tensors):
            raise SlipstreamError(f"{layer}: stash({stash.index}) of the skip {name!r} is given {_described(value)}.")
        tensor = self._stashed[name] = tensors[stash.index].view_as(tensors[stash.index])  # a distinct object
        self._fixed.append((tensor, tensor._version, f"the skip {name!r} holds"))
        return value

    def _call(self, layer: SequentialLayer, module: nn.Module, value: LayerValue) -> LayerValue:
        before = _identities(module) if self._training else {}
        # The whole layer is compared too, for functions that use a global name.
        identities = _identities(layer.module) if self._training else {}
        counter = _WatchedOperations()
        saved = SavedStorages([*module.parameters(), *module.buffers(), *as_tuple(value)])
        statistics = self._tracer.statistics
        engine = _WatchedEngine()
        try:
            with (
                counter,
                graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor),
                statistics.seeing(0),
                engine.watched(),
            ):
                output = module(value)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise SlipstreamError(
                f"{layer}: what it returns for {_described(value)} depends on values ({error.func}), so no rank could "
                "know what to expect from another. Use operations whose shapes follow from those of their inputs."
            ) from error
        except Exception as error:  # the layer's own code
            raise SlipstreamError(f"{layer} fails on {_described(value)}: {type(error).__name__}: {error}") from error
        checked = _checked_output(layer, output)
        if max(statistics.num_calls.values(), default=0) > 1:
            raise SlipstreamError(
                f"{layer}: a batch norm runs twice in one forward, so its moving averages would mix two places. "
                "Use a module for each."
            )
        changed = [
            name
            for name, held in before.items()
            if _identities(module).get(name) != held or {held[2], identities[name][2]} & counter.written
        ]
        changed += [
            name for name, storage in _attributes(module).items() if self._training and storage in counter.written
        ]
        if changed:
            kind = before[changed[0]][0] if changed[0] in before else "attribute"
            raise SlipstreamError(
                f"{layer}: its {kind} {changed[0]} changes in training, by each microbatch and again when it is "
                "recomputed. Only nn.BatchNorm1d, 2d and 3d may have such state."
            )
        self._work[-1] = LayerWork(
            counter.tally.flops, counter.tally.num_bytes, saved.num_bytes, counter.is_random, engine.num_calls > 0
        )
        return checked

    def _note(self, value: LayerValue) -> None:
        tensors = as_tuple(value)
        is_shared = tuple(id(tensor) in self._shared for tensor in tensors)
        self._values.append((value, [tensor._version for tensor in tensors], is_shared))
        storages = [storage_id(tensor) for tensor in tensors]
        for tensor, storage in zip(tensors, storages, strict=True):
            if storages.count(storage) > 1:
                self._fixed.append((tensor, tensor._version, "another tensor next to it shares"))

    def _check_fixed(self, layer: SequentialLayer) -> None:
        for tensor, version, holder in self._fixed:
            if tensor._version != version:
                raise SlipstreamError(f"{layer} changes in place a tensor that {holder}. Use inplace=False.")

    def _result(self) -> ShapeTrace:
        skips = {name: (_spec(tensor), tensor._version != version) for name, (tensor, version) in self._popped.items()}
        boundaries = [
            LayerBoundary(
                tuple(map(_spec, as_tuple(value))),
                isinstance(value, tuple),
                tuple(t._version != version for t, version in zip(as_tuple(value), versions, strict=True)),
                is_shared,
            )
            for value, versions, is_shared in self._values
        ]
        return ShapeTrace(tuple(boundaries), skips, tuple(self._work))


def _checked_output(layer: SequentialLayer, output: object) -> LayerValue:
    """Returns a layer's output; raises SlipstreamError unless it is a tensor or a tuple of some."""
    if isinstance(output, Tensor) or (isinstance(output, tuple) and output and all(map(torch.is_tensor, output))):
        return output
    items = output if isinstance(output, tuple) else ()
    names = ["Tensor" if isinstance(item, Tensor) else type(item).__name__ for item in items]
    kinds = f" of {', '.join(names)}" if names else ""
    raise SlipstreamError(
        f"{layer} returns a {type(output).__name__}{kinds}. A layer must return a tensor or a tuple of tensors."
    )


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tensor.shape, tensor.dtype, tensor.requires_grad)


def _described(value: LayerValue) -> str:
    names = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in as_tuple(value)]
    return f"({', '.join(names)})" if isinstance(value, tuple) else names[0]


def _without_memory(modules: Sequence[nn.Module], mode: FakeTensorMode, device: torch.device) -> list[nn.Module]:
    """Returns copies of the modules whose parameters and buffers only have shapes.

    Gradients reach all parameters, frozen or not, since that may change from step to step.
    """
    memo: dict[int, Any] = {}
    with mode:
        for module in modules:
            for parameter in module.parameters():
                empty = torch.empty_like(parameter, device=device, requires_grad=False)
                memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.is_floating_point())
            for buffer in module.buffers():
                memo[id(buffer)] = torch.empty_like(buffer, device=device)
    return copy_modules(modules, memo, Tensor.detach)


def _identities(module: nn.Module) -> dict[str, tuple[str, int, int]]:
    """Returns the kind of each parameter or buffer of a layer, and two ids that show whether another took its place."""
    return {
        name: (kind, id(tensor), storage_id(tensor))
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, tensor in named
    }


def _attributes(module: nn.Module) -> dict[str, int]:
    """Returns the storages of tensors that are attributes of a layer and its parts."""
    return {
        f"{name}.{key}" if name else key: storage_id(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, Tensor)
    }


_aten = torch.ops.aten
_BATCH_NORMS = {_aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm}


class _WatchedOperations(OperationCounter):  # type: ignore[no-untyped-call]
    """Counts the operations of a layer, and notes what they change in place, and whether any draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_random = False
        self.written: set[int] = set()  # ids of storages changed in place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        op = func.overloadpacket
        # max_norm changes a row only once, so embedding_renorm_ doesn't count.
        if func._schema.is_mutable and op is not _aten.embedding_renorm_:
            self.written |= storage_ids(written_tensors(func, args, kwargs))
        # Batch norm changes its averages in training, which its schema doesn't say.
        if op in _BATCH_NORMS and args[5]:
            self.written |= storage_ids(operand for operand in args[3:5] if isinstance(operand, Tensor))
        return result


class _WatchedEngine:
    """Counts how often code asks for gradients: autograd, or torch.func, which runs under no hooks on saved tensors."""

    def __init__(self) -> None:
        self.num_calls = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts from here on."""
        self._engine = Variable._execution_engine
        self._disable = graph.disable_saved_tensors_hooks
        engine = patch.object(Variable, "_execution_engine", self)
        with engine, patch.object(graph, "disable_saved_tensors_hooks", self._begin_transform):
            yield

    @contextmanager
    def _begin_transform(self, message: str) -> Iterator[None]:
        self.num_calls += 1
        with without_saved_tensors_hooks(), self._disable(message):
            yield

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the backward as the engine does."""
        self.num_calls += 1
        return self._engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
