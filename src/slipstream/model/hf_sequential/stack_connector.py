"""What a model of transformers computes before, between and after its stacks of layers, run by its own forward.

    inputs -> StackConnector 0 -> (hidden, extras, inputs) -> layer -> ... -> layer -> StackConnector 1 -> ...

A StackConnector runs the model's whole forward with placeholders: the layers of the stack behind return the hidden
states that came in, those of the stack ahead record their arguments, and the last of them ends the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from slipstream.model.hf_sequential.call_layout import LayerCalls, with_tensors
from slipstream.model.hf_sequential.fixed_shape_masks import always_build_masks
from slipstream.model.hf_sequential.stack_placeholders import (
    CallRecorder,
    HiddenPlaceholder,
    LayersReachedError,
    LayerStack,
    ReceivedHidden,
    RecordedCalls,
    remove_unused_weights,
    replace_module,
)
from slipstream.model.layer_arguments import Arguments, first_output


@dataclass(frozen=True)
class ModelInputs:
    """The names and shapes (without the batch) of the model's inputs.

    Images and embeddings are large and are needed only at the beginning: later the model's code reads their shape
    alone.
    """

    shapes: Mapping[str, Sequence[int]]

    def carried(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the inputs that travel on with the hidden states."""
        return tuple(tensor for tensor in tensors if not tensor.is_floating_point())

    def restored(self, carried: Sequence[Tensor], hidden: Tensor) -> dict[str, Tensor]:
        """Returns all inputs by name; those that didn't travel are replaced by tensors that take no memory."""
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
        inputs: ModelInputs,
        constants: Mapping[str, Any],
        calls_behind: LayerCalls | None,
    ) -> None:
        """`model` is a copy of the modules that shares the weights, and is cut in place; `calls_behind` is the layout
        of the stack behind. `measure` finds that of the stack ahead."""
        super().__init__()
        self.layer_calls: LayerCalls | None = None
        self._calls_behind = calls_behind
        self._inputs, self._constants = inputs, constants
        self._skips_encoder = place == 2
        behind = stacks[place - 1] if place else None
        ahead = stacks[place] if place < len(stacks) else None
        self._received = ReceivedHidden()
        self._recorded = RecordedCalls()
        remove_unused_weights(model, stacks, behind, ahead)
        always_build_masks(model)
        if behind is not None:
            first = next(model.get_submodule(behind.layers).children())
            replace_module(model, behind.layers, nn.ModuleList([HiddenPlaceholder(self._received, first)]))
            for name in behind.before:
                replace_module(model, name, HiddenPlaceholder(self._received, model.get_submodule(name)))
        if ahead is not None:
            layers = list(model.get_submodule(ahead.layers).children())
            recorders = [CallRecorder(self._recorded, layer, layer is layers[-1]) for layer in layers]
            replace_module(model, ahead.layers, nn.ModuleList(recorders))
        self.model = model

    def forward(self, tensors: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        output, inputs = self._run(tensors if isinstance(tensors, tuple) else (tensors,))
        if output is not None:
            return output
        assert self.layer_calls is not None
        return (*self.layer_calls.tensors(self._recorded.take()), *inputs)

    def measure(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Finds how the stack ahead is called, by a forward on `tensors`; returns its first layer's input."""
        _, inputs = self._run(tensors)
        self.layer_calls, known = LayerCalls.of(self._recorded.take())
        return (*known, *inputs)

    def _run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Returns the model's output, None where the layers ahead were reached, and the inputs that travel on."""
        if self._calls_behind is None:
            arguments: dict[str, Any] = dict(zip(self._inputs.shapes, tensors, strict=True))
            carried = self._inputs.carried(tensors)
        else:
            hidden, carried = tensors[0], tensors[1 + self._calls_behind.num_extras :]
            arguments = self._inputs.restored(carried, hidden)
            self._received.tensor = hidden
            if self._skips_encoder:
                # after the decoder nothing reads the encoder's output, but the model's code reads its shape
                encoding = hidden.new_zeros(()).expand(*arguments["input_ids"].shape, hidden.shape[-1])
                arguments["encoder_outputs"] = BaseModelOutput(encoding)
        try:
            return main_output(self.model(**arguments, **self._constants, use_cache=False)), carried
        except LayersReachedError:
            return None, carried
        finally:
            self._received.tensor = None


def main_output(output: Any) -> Tensor:
    """Returns a forward's tensor: its logits, or the last hidden states."""
    tensor = output if isinstance(output, Tensor) else output.get("logits", output.get("last_hidden_state"))
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{type(output).__name__} has neither logits nor last_hidden_state")
    return tensor
