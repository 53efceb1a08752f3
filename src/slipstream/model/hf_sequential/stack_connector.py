"""What a model of transformers computes before, between and after its stacks of layers, run by its own forward.

    inputs -> StackConnector 0 -> (hidden, extras, inputs) -> layer -> ... -> layer -> StackConnector 1 -> ...

A StackConnector runs the model's whole forward with placeholders: the layers of the stack behind return the hidden
states that came in, those of the stack ahead record their arguments, and the last of them ends the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from slipstream.errors import SlipstreamError
from slipstream.model.hf_sequential.call_layout import LayerCalls, with_tensors
from slipstream.model.hf_sequential.fixed_shape_masks import always_build_masks
from slipstream.model.hooks.layer_arguments import Arguments, first_output, hidden_states
from slipstream.model.model_cutting import Placeholder
from slipstream.model.storages import has_parameters


class StackLayer(nn.Module):
    """One layer of the model: (hidden, extras, inputs) -> (its output, extras, inputs)."""

    def __init__(self, layer: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.layer, self._arguments = layer, arguments

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args, kwargs = with_tensors(self._arguments, tensors)
        return first_output(self.layer(*args, **kwargs)), *tensors[1:]


class StackConnector(nn.Module):
    """The model's forward from stack `place` - 1, or the beginning, to stack `place`, or the end.

    It has the weights that are used there, and no others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stacks: Sequence[LayerStack],
        place: int,
        inputs: Mapping[str, Sequence[int]],
        constants: Mapping[str, Any],
        calls_behind: LayerCalls | None,
    ) -> None:
        """`model` is a copy of the modules that shares the weights, and is cut in place; `inputs` are the names and
        shapes, without the batch, of the model's inputs; `calls_behind` is the layout of the stack behind. The
        first forward finds that of the stack ahead."""
        super().__init__()
        self.layer_calls: LayerCalls | None = None
        self._calls_behind = calls_behind
        self._inputs, self._constants = inputs, constants
        self._skips_encoder = place == 2
        behind = stacks[place - 1] if place else None
        ahead = stacks[place] if place < len(stacks) else None
        self._running = ForwardState()
        remove_unused_weights(model, stacks, behind, ahead)
        always_build_masks(model)
        if behind is not None:
            first = next(model.get_submodule(behind.layers).children())
            replace_module(model, behind.layers, nn.ModuleList([HiddenPlaceholder(self._running, first)]))
            for name in behind.before:
                replace_module(model, name, HiddenPlaceholder(self._running, model.get_submodule(name)))
        if ahead is not None:
            layers = list(model.get_submodule(ahead.layers).children())
            recorders = [CallRecorder(self._running, layer, layer is layers[-1]) for layer in layers]
            replace_module(model, ahead.layers, nn.ModuleList(recorders))
        self.model = model

    def forward(self, tensors: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Returns the model's output or, if there is a stack ahead, its first layer's input.

        The inputs travel on, except images and embeddings: they are large, and later the model's code reads their shape
        alone.
        """
        tensors = tensors if isinstance(tensors, tuple) else (tensors,)
        if self._calls_behind is None:
            arguments: dict[str, Any] = dict(zip(self._inputs, tensors, strict=True))
            carried = tuple(tensor for tensor in tensors if not tensor.is_floating_point())
        else:
            self._running.hidden = hidden = tensors[0]
            carried = tensors[1 + self._calls_behind.num_extras :]
            arguments = self._restored(carried, hidden)
            if self._skips_encoder:
                # after the decoder nothing reads the encoder's output, but the model's code reads its shape
                encoding = hidden.new_zeros(()).expand(*arguments["input_ids"].shape, hidden.shape[-1])
                arguments["encoder_outputs"] = BaseModelOutput(encoding)
        try:
            return main_output(self.model(**arguments, **self._constants, use_cache=False))
        except LayersReachedError:
            calls = self._running.calls
        finally:
            self._running.hidden, self._running.calls = None, []
        if self.layer_calls is None:
            self.layer_calls, known = LayerCalls.of(calls)
        else:
            known = self.layer_calls.tensors(calls)
        return (*known, *carried)

    def _restored(self, carried: Sequence[Tensor], hidden: Tensor) -> dict[str, Any]:
        """Returns all inputs by name; those that didn't travel are replaced by tensors that take no memory."""
        left = iter(carried)
        stand_ins = {
            "inputs_embeds": hidden,
            "pixel_values": hidden.new_zeros(()).expand(len(hidden), *self._inputs.get("pixel_values", ())),
        }
        return {name: stand_ins[name] if name in stand_ins else next(left) for name in self._inputs}


def main_output(output: Any) -> Tensor:
    """Returns a forward's tensor: its logits, or the last hidden states."""
    tensor = output if isinstance(output, Tensor) else output.get("logits", output.get("last_hidden_state"))
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{type(output).__name__} has neither logits nor last_hidden_state")
    return tensor


@dataclass(frozen=True)
class LayerStack:
    """The names of one stack of layers in a model, and of the modules that the plan puts before and after it."""

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return *self.before, self.layers, *self.after


class LayersReachedError(Exception):
    """Ends the model's forward once the layers ahead have been called."""


@dataclass
class ForwardState:
    """The hidden states that came in, and the arguments with which layers ahead were called."""

    hidden: Tensor | None = None
    calls: list[Arguments] = field(default_factory=list)


class HiddenPlaceholder(Placeholder):
    """Replaces the layers behind and the embedding before them: returns the hidden states that came in.

    Models read the dtype of their embedding's weights, so these are there as buffers that take no memory.
    """

    def __init__(self, running: ForwardState, original: nn.Module) -> None:
        super().__init__(original)
        self._running = running
        _copy_without_memory(original, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.hidden


class CallRecorder(Placeholder):
    """Replaces a layer ahead: records its arguments, and ends the forward if it is the last one."""

    def __init__(self, running: ForwardState, original: nn.Module, is_last: bool) -> None:
        super().__init__(original)
        self._running, self._is_last = running, is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._running.calls.append((args, kwargs))
        if self._is_last:
            raise LayersReachedError
        return hidden_states(args, kwargs)


class AbsentModule(Placeholder):
    """Replaces a module that is computed elsewhere, and raises SlipstreamError where it is called here."""

    def __init__(self, name: str, original: nn.Module) -> None:
        super().__init__(original)
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise SlipstreamError(f"{self.name} is used where the pipeline plan has no place for it")


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts `module` at `name`, unless all around it is absent."""
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    if isinstance(holder, nn.ModuleList):
        holder[int(child)] = module
    elif not isinstance(holder, AbsentModule):
        setattr(holder, child, module)


def remove_unused_weights(
    model: nn.Module, stacks: Sequence[LayerStack], behind: LayerStack | None, ahead: LayerStack | None
) -> None:
    """Removes the weights that aren't used between the stacks `behind` and `ahead`.

    Those are the plan's other modules and, unless the forward ends here, all that the plan doesn't name: the head.
    """
    planned = [name for stack in stacks for name in stack.names]
    kept = [*(behind.names if behind else ()), *((*ahead.before, ahead.layers) if ahead else ())]
    for name in planned:
        if name not in kept:
            replace_module(model, name, AbsentModule(name, model.get_submodule(name)))
    for name, module in list(model.named_modules()) if ahead else ():
        is_kept = any(f"{name}.".startswith(f"{each}.") for each in kept)
        holds = not name or any(each.startswith(f"{name}.") for each in planned)
        if not is_kept and not holds and has_parameters(module):
            replace_module(model, name, AbsentModule(name, module))


def _copy_without_memory(original: nn.Module, copy: nn.Module) -> None:
    """Gives `copy` the names of all weights inside `original`, as buffers of the same shapes that share one zero."""
    for name, child in original.named_children():
        setattr(copy, name, nn.Module())
        _copy_without_memory(child, copy.get_submodule(name))
    for name, weight in original.named_parameters(recurse=False):
        copy.register_buffer(name, weight.new_zeros(()).expand(weight.shape), persistent=False)
