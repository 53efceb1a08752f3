"""Finds the tensors that layers take in addition to hidden states, and passes them on between stages.

Some models compute an input of every layer before the first one (per-layer embeddings), and some layers take keys and
values from layers far before. Wherever such a tensor is computed on one stage and read on a later one, it is sent along
with the hidden states, and its gradient comes back with theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.token_slice import SliceContext, current_slice
from slipstream.model.layer_range import LayerRange

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one call


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the hidden states (b, T, hidden): the first positional argument, else the one that is named so."""
    hidden: Tensor = args[0] if args else kwargs[_keyword(kwargs)]
    return hidden


def with_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> Arguments:
    """Returns the arguments with `hidden` in place of the hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, kwargs | {_keyword(kwargs): hidden}


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> Any:
    """Returns the argument at a position or of a keyword."""
    return args[place] if isinstance(place, int) else kwargs[place]


def with_argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, value: Any) -> Arguments:
    """Returns the arguments with `value` at a position or for a keyword."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, kwargs | {place: value}


def first_output(output: Any) -> Tensor:
    """Returns the hidden states that a layer returned, alone or as the first item of a tuple or a list."""
    first: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return first


def with_first_output(output: Any, hidden: Tensor) -> Any:
    """Returns a layer's output with `hidden` in place of the hidden states."""
    return (hidden, *output[1:]) if isinstance(output, (tuple, list)) else hidden


def _keyword(kwargs: dict[str, Any]) -> str:
    return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))


TRAIN_WHOLE = "Give it to a trainer that keeps models whole, such as transformers' Trainer with replicas."
"""What to do with a model that can't be cut into stages."""

_RUNS = ((3, 7), (2, 1 << 14))  # (rows, tokens) of two runs, whose sizes tell these dims of a tensor from others


class TensorForm(NamedTuple):
    """The shape of a tensor for any number of rows and tokens."""

    sizes: tuple[int, ...]  # size of each dim; placeholders for rows and tokens
    row_dim: int
    token_dim: int
    key_dim: int | None = None  # dim of the sequence's tokens, or of at most that many

    def shape(self, rows: int, tokens: int, length: int) -> torch.Size:
        """Returns the shape for some tokens of some sequences, of `length` tokens each."""
        sizes = list(self.sizes)
        sizes[self.row_dim], sizes[self.token_dim] = rows, tokens
        if self.key_dim is not None:
            sizes[self.key_dim] = min(length, sizes[self.key_dim])
        return torch.Size(sizes)


class LayerInput(NamedTuple):
    """The place from which a layer takes a tensor: an argument, or an entry of a mapping that layers share."""

    layer: int
    argument: int | str  # position or keyword
    key: Any = None  # key in the mapping; None: the argument itself
    item: int = 0  # index in the tuple that is the mapping's value


@dataclass(frozen=True)
class CrossingTensor:
    """A tensor that layers take in addition to hidden states: with a gradient, or numbers that a layer returned."""

    form: TensorForm | None  # None: no tensor of some tokens of some rows
    made: int  # the layer that computes it; -1: a module before the layers
    inputs: tuple[LayerInput, ...]  # inputs in the order of the layers
    dtype: torch.dtype | None = None  # dtype of numbers without a gradient; None: the hidden states' dtype

    def crosses(self, layer: int) -> bool:
        """Returns whether the tensor is computed before this layer and read by this or a later one."""
        return self.made < layer <= self.inputs[-1].layer

    @property
    def sent_form(self) -> TensorForm:
        """The form; raises SlipstreamError where it can't be sent slice by slice."""
        if self.form is None:
            raise SlipstreamError(
                f"layer {self.inputs[-1].layer} takes {self.inputs[-1].argument!r} from a layer before, which isn't a "
                "tensor of tokens, so no stage may end between the two"
            )
        return self.form


class LayerTensors(NamedTuple):
    """The tensors that go from layer to layer: the hidden states, and further crossing tensors."""

    hidden: TensorForm
    crossing: tuple[CrossingTensor, ...]


def takes_more(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Returns whether layers take more than hidden states (b, T, hidden), found by running the model on few tokens."""
    run = _Record(model, layers, torch.zeros(*_RUNS[0], dtype=torch.int64))
    return bool(run.taken) or len(run.hidden) != 3


def find_layer_tensors(model: nn.Module, layers: Sequence[nn.Module]) -> LayerTensors:
    """Returns the tensors that go from layer to layer in a model on the meta device, run on few and many tokens."""
    runs: list[_Record] = []
    for sizes in _RUNS:
        ids = torch.zeros(*sizes, dtype=torch.int64, device="meta")
        # without a mask transformers would look for packed documents in positions, which have no values
        ones = torch.ones(*sizes, dtype=torch.int64)
        # If nothing crosses in the first run, the first layer alone tells the hidden states' form in the second.
        is_enough = bool(runs) and not runs[0].taken
        runs.append(_Record(model, layers, ids, is_enough, position_ids=ids, attention_mask=ones))
    hidden = _form([run.hidden for run in runs])
    if hidden is None:
        (rows, tokens) = _RUNS[0]
        shape = tuple(runs[0].hidden)
        raise SlipstreamError(
            f"{type(model).__name__} can't be cut into stages: its layers take hidden states of the shape {shape} for "
            f"{rows} x {tokens} tokens, which aren't one of each token. {TRAIN_WHOLE}"
        )
    crossing = []
    for same_tensor in zip(*(run.taken.values() for run in runs), strict=True):
        tensor = same_tensor[0].tensor
        first = same_tensor[0]
        dtype = None if tensor.requires_grad else tensor.dtype
        form = _form([taken.tensor.shape for taken in same_tensor])
        crossing.append(CrossingTensor(form, first.made(layers), tuple(first.inputs), dtype))
    return LayerTensors(hidden, tuple(crossing))


class _Taken(NamedTuple):
    tensor: Tensor
    returned: int | None  # the layer that returned it; None: none of them
    inputs: list[LayerInput]

    def made(self, layers: Sequence[nn.Module]) -> int:
        """Returns the last layer whose parameters it depends on, or that returned it; -1 where there is none."""
        if self.returned is not None or not self.tensor.requires_grad:
            return -1 if self.returned is None else self.returned
        owned = {id(p): layer_index for layer_index, layer in enumerate(layers) for p in layer.parameters()}
        return max((owned.get(id(leaf), -1) for leaf in _leaves(self.tensor)), default=-1)


class _FirstLayerError(Exception):
    """Ends a run that needn't go on."""


class _Record:
    """The shape of the hidden states, and further inputs of layers, in one run of a model or of its beginning."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], ids: Tensor, first_only: bool = False, **given: Tensor
    ) -> None:
        self.hidden = torch.Size()
        self.taken: dict[int, _Taken] = {}  # tensors that live until the end, by id
        self._returned: dict[int, tuple[int, Tensor]] = {}
        self._first_only = first_only
        with torch.enable_grad(), ExitStack() as hooks, suppress(_FirstLayerError):
            for index, layer in enumerate(layers):
                hooks.enter_context(layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(partial(self._leave, index)))
            model(input_ids=ids, use_cache=False, **given)

    def _enter(self, layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_states(args, kwargs)
        self.hidden = hidden.shape
        for place, tensor in _tensors(layer, args, kwargs):
            returned, _ = self._returned.get(id(tensor), (None, tensor))
            if tensor is not hidden and (tensor.requires_grad or returned is not None):
                self.taken.setdefault(id(tensor), _Taken(tensor, returned, [])).inputs.append(place)
        if self._first_only:
            raise _FirstLayerError

    def _leave(self, layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
        for item in output[1:] if isinstance(output, tuple) else ():
            if isinstance(item, Tensor):
                self._returned.setdefault(id(item), (layer, item))


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the leaves of a tensor's graph, whose gradients would say the same and take a deep model a second."""
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += (before for before, _ in node.next_functions)
            if hasattr(node, "variable"):
                yield node.variable


def _tensors(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[LayerInput, Tensor]]:
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in arguments:
        if isinstance(value, Tensor):
            yield LayerInput(layer, place), value
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                for item, tensor in enumerate(entry if isinstance(entry, tuple) else (entry,)):
                    if isinstance(tensor, Tensor):
                        yield LayerInput(layer, place, key, item), tensor


def _form(shapes: Sequence[Sequence[int]]) -> TensorForm | None:
    """Returns the form of a tensor with these shapes in the runs; None where it isn't of some tokens of some rows."""
    rows, lengths = zip(*_RUNS, strict=True)
    places: dict[str, int] = {}
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        if len(set(sizes)) > 1:
            kind = {rows: "row", lengths: "token"}.get(sizes, "key" if sizes[0] == lengths[0] else "")
            if not kind or kind in places:
                return None
            places[kind] = dim
    if not {"row", "token"} <= places.keys():
        return None
    return TensorForm(tuple(shapes[-1]), places["row"], places["token"], places.get("key"))


class CrossingTensors:
    """The tensors that enter and leave a stage together with the hidden states.

    Received tensors that are read later, too, go on as they came. One that the stage computes is taken where a later
    layer would read it, in whose place the stage has a placeholder.
    """

    def __init__(self, tensors: Sequence[CrossingTensor], owned: LayerRange, is_first: bool) -> None:
        """Raises SlipstreamError for a tensor that can't be sent in slices."""
        self._owned = owned.layers
        self.received = [] if is_first else [tensor for tensor in tensors if tensor.crosses(self._owned.start)]
        self.sent = [tensor for tensor in tensors if tensor.crosses(self._owned.stop)]
        for tensor in (*self.received, *self.sent):
            tensor.sent_form  # noqa: B018  raises

    def install(self, layers: Sequence[nn.Module]) -> None:
        """Makes the layers here take the received tensors, and placeholders give those to send."""
        for number, tensor in enumerate(self.received):
            for place in tensor.inputs:
                if place.layer in self._owned:
                    layers[place.layer].register_forward_pre_hook(partial(_put, number, place), with_kwargs=True)
        for number, tensor in enumerate(self.sent):
            place = next(place for place in tensor.inputs if place.layer >= self._owned.stop)
            layers[place.layer].register_forward_pre_hook(partial(_take, number, place), with_kwargs=True)

    def leaving(self, context: SliceContext, dtype: torch.dtype) -> list[Tensor]:
        """Returns the tensors to send, in `sent`'s order."""
        if not self.sent:
            return []
        came = dict(zip(self.received, context.received, strict=True))
        values = (came.get(tensor, context.taken[index]) for index, tensor in enumerate(self.sent))
        return [value.to(tensor.dtype or dtype) for value, tensor in zip(values, self.sent, strict=True)]


def _put(number: int, place: LayerInput, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    tensor = current_slice().received[number]
    if place.key is None:
        return with_argument(args, kwargs, place.argument, tensor)
    mapping = argument(args, kwargs, place.argument)
    others = mapping.get(place.key, ())  # the rest of the tuple
    mapping[place.key] = (*others[: place.item], tensor, *others[place.item + 1 :])
    return args, kwargs


def _take(number: int, place: LayerInput, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    value = argument(args, kwargs, place.argument)
    current_slice().taken[number] = value if place.key is None else value[place.key][place.item]
