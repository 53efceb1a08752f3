"""The arguments with which a model calls the layers of a stack, split into tensors and everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model.layer_arguments import Arguments, hidden_states


class TensorIndex(int):
    """An index into the tuple of tensors that travels between layers; it stands in a layer's arguments."""


@dataclass(frozen=True)
class LayerCalls:
    """The arguments with which a model calls the layers of one stack.

    `arguments[i]` are those of layer i, with a TensorIndex for each tensor: 0 is the hidden states, and 1 to
    `num_extras` are masks, positions and whatever else the layers take.
    """

    arguments: tuple[Arguments, ...]
    num_extras: int

    @classmethod
    def of(cls, calls: Sequence[Arguments]) -> tuple[LayerCalls, tuple[Tensor, ...]]:
        """Returns the layout of these calls, one for each layer, and the tensors in its order."""
        known = [hidden_states(*calls[0])]  # and then the extras

        def index(tensor: Tensor) -> TensorIndex:
            place = next((i for i, other in enumerate(known) if other is tensor), len(known))
            known.extend([tensor] if place == len(known) else [])
            return TensorIndex(place)

        arguments = tuple(_mapped(call, index, Tensor) for call in calls)
        return cls(arguments, len(known) - 1), tuple(known)

    def tensors(self, calls: Sequence[Arguments]) -> tuple[Tensor, ...]:
        """Returns the tensors of new calls, in this layout's order.

        Raises SlipstreamError where a call differs from this layout in anything but its tensors.
        """
        found: dict[int, Tensor] = {}
        for wanted, call in zip(self.arguments, calls, strict=True):
            _match(wanted, call, found.setdefault)
        return tuple(found[i] for i in range(1 + self.num_extras))


def with_tensors(arguments: Arguments, tensors: Sequence[Tensor]) -> Arguments:
    """Returns the arguments with each TensorIndex replaced by its tensor."""
    filled: Arguments = _mapped(arguments, tensors.__getitem__, TensorIndex)
    return filled


def _mapped(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Returns `value` with each `kind` inside its tuples, lists and dictionaries changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change, kind) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change, kind) for key, item in value.items()}
    return value


def _match(wanted: Any, found: Any, put: Callable[[TensorIndex, Tensor], object]) -> None:
    """Passes each TensorIndex in `wanted` and the tensor in its place to `put`; everything else must be equal."""
    if isinstance(wanted, TensorIndex) and isinstance(found, Tensor):
        put(wanted, found)
    elif isinstance(wanted, (tuple, list)) and isinstance(found, (tuple, list)) and len(wanted) == len(found):
        for pair in zip(wanted, found, strict=True):
            _match(*pair, put)
    elif isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        for key in wanted:
            _match(wanted[key], found[key], put)
    elif isinstance(found, Tensor) or wanted != found:
        raise SlipstreamError(
            f"a layer is called with {found!r}, but was called with {wanted!r} when the sequence was made. Give inputs "
            "of the same kind."
        )
