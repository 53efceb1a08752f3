"""What a model of transformers computes before, between and after its stacks of layers, run by its own forward.

    inputs -> StackConnector 0 -> (hidden, extras, inputs) -> layer -> ... -> layer -> StackConnector 1 -> ...

A StackConnector runs the model's whole forward with placeholders: the layers of the stack behind return the hidden
states that came in, those of the stack ahead record their arguments, and the last of them ends the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from slipstream.errors import SlipstreamError
from slipstream.model.hf_sequential.fixed_shape_masks import always_build_masks

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with


@dataclass(frozen=True)
class LayerStack:
    """One stack of layers in a model: the names of its layers, and of the modules the plan puts before and after."""

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class TensorIndex(int):
    """Stands for the tensor at this place of the tuple in a layer's arguments."""


@dataclass(frozen=True)
class LayerCalls:
    """What goes between the layers of a stack: hidden states, `num_extras` tensors that layers are called with, and the
    model's token ids and masks. `arguments[i]` are layer i's, with a Slot for each tensor."""

    arguments: tuple[Arguments, ...]
    num_extras: int


@dataclass(frozen=True)
class ModelInputs:
    """The names and the shapes (without the batch) of the model's inputs. Images and embeddings are large, and needed
    at the beginning only: later the model's code looks at their shape alone."""

    shapes: Mapping[str, Sequence[int]]

    def carried(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Those that travel on with the hidden states."""
        return tuple(tensor for tensor in tensors if not tensor.is_floating_point())

    def restored(self, carried: Sequence[Tensor], hidden: Tensor) -> dict[str, Tensor]:
        """All of them by name, with stand-ins that take no memory."""
        left = iter(carried)
        stand_ins = {
            "inputs_embeds": hidden,
            "pixel_values": hidden.new_zeros(()).expand(len(hidden), *self.shapes.get("pixel_values", ())),
        }
        return {name: stand_ins[name] if name in stand_ins else next(left) for name in self.shapes}


class StackLayer(nn.Module):
    """One layer of the model: (hidden, extras, inputs) -> (its output, extras, inputs)."""

    def __init__(self, layer: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.layer, self._arguments = layer, arguments

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args, kwargs = _mapped(self._arguments, tensors.__getitem__, TensorIndex)
        output = self.layer(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output, *tensors[1:]


class StackConnector(nn.Module):
    """The model's forward from the end of stack `place` - 1, or its beginning, to the beginning of stack `place`, or
    its end. Its own are the weights that are used there."""

    def __init__(
        self,
        skeleton: PreTrainedModel,
        stacks: Sequence[LayerStack],
        place: int,
        inputs: ModelInputs,
        constants: Mapping[str, Any],
        behind: LayerCalls | None,
    ) -> None:
        """`skeleton` shares the model's weights and is cut to what is run here; `behind` is the layout of the stack
        before this place; `measure` finds that of the stack ahead."""
        super().__init__()
        self.layout: LayerCalls | None = None
        self._behind = behind
        self._inputs, self._constants = inputs, constants
        self._skips_encoder = place == 2
        before = stacks[place - 1] if place else None
        ahead = stacks[place] if place < len(stacks) else None
        self._given = _ReceivedHidden()
        self._caught = _RecordedCalls()
        _keep(skeleton, stacks, before, ahead)
        always_build_masks(skeleton)
        if before is not None:
            _put(
                skeleton,
                before.layers,
                nn.ModuleList([HiddenPlaceholder(self._given, _first_layer(skeleton, before.layers))]),
            )
            for name in before.before:
                _put(skeleton, name, HiddenPlaceholder(self._given, skeleton.get_submodule(name)))
        if ahead is not None:
            layers = list(skeleton.get_submodule(ahead.layers).children())
            catching = [CallRecorder(self._caught, layer, layer is layers[-1]) for layer in layers]
            _put(skeleton, ahead.layers, nn.ModuleList(catching))
        self.model = skeleton

    def forward(self, tensors: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        output, inputs = self._run(tensors if isinstance(tensors, tuple) else (tensors,))
        if output is not None:
            return output
        assert self.layout is not None
        return (*_arranged(self.layout, self._caught.take()), *inputs)

    def measure(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Find the layout of the stack ahead from a forward on `tensors`; returns the layers' input."""
        _, inputs = self._run(tensors)
        calls = self._caught.take()
        known = [_hidden(calls[0])]  # and then the extras

        def slot(tensor: Tensor) -> TensorIndex:
            place = next((i for i, other in enumerate(known) if other is tensor), len(known))
            known.extend([tensor] if place == len(known) else [])
            return TensorIndex(place)

        self.layout = LayerCalls(tuple(_mapped(call, slot, Tensor) for call in calls), len(known) - 1)
        return (*known, *inputs)

    def _run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """What the model returns, None where the layers ahead were reached, and the inputs that travel on."""
        if self._behind is None:
            arguments: dict[str, Any] = dict(zip(self._inputs.shapes, tensors, strict=True))
            carried = self._inputs.carried(tensors)
        else:
            hidden, carried = tensors[0], tensors[1 + self._behind.num_extras :]
            arguments = self._inputs.restored(carried, hidden)
            self._given.tensor = hidden
            if self._skips_encoder:
                arguments["encoder_outputs"] = BaseModelOutput(_empty_encoding(hidden, arguments["input_ids"]))
        try:
            return main_output(self.model(**arguments, **self._constants, use_cache=False)), carried
        except _LayersReachedError:
            return None, carried
        finally:
            self._given.tensor = None


def main_output(output: Any) -> Tensor:
    """A forward's tensor: logits, or the last hidden states."""
    tensor = output if isinstance(output, Tensor) else output.get("logits", output.get("last_hidden_state"))
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{type(output).__name__} has neither logits nor last_hidden_state")
    return tensor


def _empty_encoding(hidden: Tensor, ids: Tensor) -> Tensor:
    """After the decoder nothing reads the encoder's output; the model's code reads its shape."""
    return hidden.new_zeros(()).expand(*ids.shape, hidden.shape[-1])


class _LayersReachedError(Exception):
    """What a Between is to compute is computed: ends the model's forward."""


class _ReceivedHidden:
    """The hidden states that came in."""

    tensor: Tensor | None = None


class _RecordedCalls:
    """What the layers were called with."""

    def __init__(self) -> None:
        self.calls: list[Arguments] = []

    def take(self) -> list[Arguments]:
        calls, self.calls = self.calls, []
        return calls


class _Placeholder(nn.Module):
    """Plain attributes of the original stay readable, as some models choose a layer's mask by one of its layer's."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool, type(None))):
                setattr(self, name, value)


class HiddenPlaceholder(_Placeholder):
    """Stands for the layers behind and the embedding before them. Models ask their embedding's weights for a dtype."""

    def __init__(self, given: _ReceivedHidden, original: nn.Module) -> None:
        super().__init__(original)
        self._given = given
        _copy_without_memory(original, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._given.tensor


class CallRecorder(_Placeholder):
    """Stands for a layer ahead."""

    def __init__(self, caught: _RecordedCalls, original: nn.Module, is_last: bool) -> None:
        super().__init__(original)
        self._caught, self._is_last = caught, is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._caught.calls.append((args, kwargs))
        if self._is_last:
            raise _LayersReachedError
        return _hidden((args, kwargs))


class AbsentModule(_Placeholder):
    """Stands for what is computed elsewhere."""

    def __init__(self, name: str, original: nn.Module) -> None:
        super().__init__(original)
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise SlipstreamError(f"{self.name} is used where the pipeline plan has no place for it")


def _copy_without_memory(original: nn.Module, copy: nn.Module) -> None:
    """Give `copy` the names of all weights inside `original`, as buffers of the same shape of one zero."""
    for name, child in original.named_children():
        setattr(copy, name, nn.Module())
        _copy_without_memory(child, copy.get_submodule(name))
    for name, weight in original.named_parameters(recurse=False):
        copy.register_buffer(name, weight.new_zeros(()).expand(weight.shape), persistent=False)


def _keep(
    skeleton: nn.Module, stacks: Sequence[LayerStack], before: LayerStack | None, ahead: LayerStack | None
) -> None:
    """Take the weights out that aren't used between `before` and `ahead`: of other places of the plan, and, unless this
    is the end, of all that the plan doesn't name, the head."""
    owned = [*(before.after if before else ()), *(ahead.before if ahead else ())]
    planned = [name for stack in stacks for name in (stack.layers, *stack.before, *stack.after)]
    skipped = [ahead.layers] if ahead else []
    for name in planned:
        if name not in owned + skipped and not (before and name in (before.layers, *before.before)):
            _put(skeleton, name, AbsentModule(name, skeleton.get_submodule(name)))
    if ahead is None:
        return
    for name, module in list(skeleton.named_modules()):
        inside = any(name == kept or name.startswith(f"{kept}.") for kept in owned + skipped)
        holds = any(kept.startswith(f"{name}.") for kept in planned) or not name
        behind = before and name.startswith((before.layers, *before.before))
        if not inside and not holds and not behind and next(module.parameters(), None) is not None:
            _put(skeleton, name, AbsentModule(name, module))


def _first_layer(skeleton: nn.Module, name: str) -> nn.Module:
    return next(skeleton.get_submodule(name).children())


def _put(skeleton: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    holder = skeleton.get_submodule(parent)
    if isinstance(holder, nn.ModuleList):
        holder[int(child)] = module
    elif not isinstance(holder, AbsentModule):
        setattr(holder, child, module)


def _hidden(call: Arguments) -> Tensor:
    args, kwargs = call
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _arranged(layout: LayerCalls, calls: list[Arguments]) -> tuple[Tensor, ...]:
    """Hidden states and extras for the layers, in the order that `layout` found in a trial."""
    places: dict[int, Tensor] = {}
    for wanted, call in zip(layout.arguments, calls, strict=True):
        _matched(wanted, call, places.setdefault)
    return tuple(places[i] for i in range(1 + layout.num_extras))


def _mapped(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """`value` with each `kind` inside its tuples, lists and dictionaries changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change, kind) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change, kind) for key, item in value.items()}
    return value


def _matched(wanted: Any, found: Any, put: Callable[[TensorIndex, Tensor], object]) -> None:
    """Hand each Slot in `wanted` and what `found` has in its place to `put`; anything else must be equal."""
    if isinstance(wanted, TensorIndex) and isinstance(found, Tensor):
        put(wanted, found)
    elif isinstance(wanted, (tuple, list)) and isinstance(found, (tuple, list)) and len(wanted) == len(found):
        for pair in zip(wanted, found, strict=True):
            _matched(*pair, put)
    elif isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        for key in wanted:
            _matched(wanted[key], found[key], put)
    elif isinstance(found, Tensor) or wanted != found:
        raise SlipstreamError(f"a layer is called with {found!r}, in a trial with {wanted!r}: inputs of another kind.")
