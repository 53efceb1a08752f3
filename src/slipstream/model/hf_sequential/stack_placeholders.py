"""Placeholders that let a model's whole forward run only what lies between two stacks of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.model.layer_arguments import Arguments, hidden_states
from slipstream.model.model_anatomy import has_parameters
from slipstream.model.placeholders import Placeholder


@dataclass(frozen=True)
class LayerStack:
    """The names of one stack of layers in a model, and of the modules that the plan puts before and after it."""

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class LayersReachedError(Exception):
    """Ends the model's forward once the layers ahead have been called."""


class ReceivedHidden:
    """Holds the hidden states that came in, while a forward runs."""

    tensor: Tensor | None = None


class RecordedCalls:
    """Collects the arguments with which layers were called."""

    def __init__(self) -> None:
        self.calls: list[Arguments] = []

    def take(self) -> list[Arguments]:
        """Returns the calls so far and forgets them."""
        calls, self.calls = self.calls, []
        return calls


class HiddenPlaceholder(Placeholder):
    """Replaces the layers behind and the embedding before them: returns the hidden states that came in.

    Models read the dtype of their embedding's weights, so these are there as buffers that take no memory.
    """

    def __init__(self, received: ReceivedHidden, original: nn.Module) -> None:
        super().__init__(original)
        self._received = received
        _copy_without_memory(original, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._received.tensor


class CallRecorder(Placeholder):
    """Replaces a layer ahead: records its arguments, and ends the forward if it is the last one."""

    def __init__(self, recorded: RecordedCalls, original: nn.Module, is_last: bool) -> None:
        super().__init__(original)
        self._recorded, self._is_last = recorded, is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._recorded.calls.append((args, kwargs))
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
    owned = [*(behind.after if behind else ()), *(ahead.before if ahead else ())]
    planned = [name for stack in stacks for name in (stack.layers, *stack.before, *stack.after)]
    skipped = [ahead.layers] if ahead else []
    for name in planned:
        if name not in owned + skipped and not (behind and name in (behind.layers, *behind.before)):
            replace_module(model, name, AbsentModule(name, model.get_submodule(name)))
    if ahead is None:
        return
    for name, module in list(model.named_modules()):
        inside = any(name == kept or name.startswith(f"{kept}.") for kept in owned + skipped)
        holds = any(kept.startswith(f"{name}.") for kept in planned) or not name
        is_behind = behind and name.startswith((behind.layers, *behind.before))
        if not inside and not holds and not is_behind and has_parameters(module):
            replace_module(model, name, AbsentModule(name, module))


def _copy_without_memory(original: nn.Module, copy: nn.Module) -> None:
    """Gives `copy` the names of all weights inside `original`, as buffers of the same shapes that share one zero."""
    for name, child in original.named_children():
        setattr(copy, name, nn.Module())
        _copy_without_memory(child, copy.get_submodule(name))
    for name, weight in original.named_parameters(recurse=False):
        copy.register_buffer(name, weight.new_zeros(()).expand(weight.shape), persistent=False)
