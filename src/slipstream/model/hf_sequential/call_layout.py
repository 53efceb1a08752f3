"""The arguments with which a model calls the layers of a stack, split into tensors and everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.layer_arguments import Arguments, hidden_states


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

        arguments = tree_map_only(Tensor, index, tuple(calls))
        return cls(arguments, len(known) - 1), tuple(known)

    def tensors(self, calls: Sequence[Arguments]) -> tuple[Tensor, ...]:
        """Returns the tensors of new calls, in this layout's order.

        Raises SlipstreamError where a call differs from this layout in anything but its tensors.
        """
        wanted, wanted_layout = tree_flatten(self.arguments)
        found, layout = tree_flatten(tuple(calls))
        if layout != wanted_layout:
            raise _other_call(layout, wanted_layout)
        tensors: dict[int, Tensor] = {}
        for index, value in zip(wanted, found, strict=True):
            if isinstance(index, TensorIndex) and isinstance(value, Tensor):
                tensors.setdefault(index, value)
            elif isinstance(value, Tensor) or index != value:
                raise _other_call(value, index)
        return tuple(tensors[i] for i in range(1 + self.num_extras))


def with_tensors(arguments: Arguments, tensors: Sequence[Tensor]) -> Arguments:
    """Returns the arguments with each TensorIndex replaced by its tensor."""
    filled: Arguments = tree_map_only(TensorIndex, tensors.__getitem__, arguments)
    return filled


def _other_call(found: object, wanted: object) -> SlipstreamError:
    return SlipstreamError(
        f"a layer is called with {found!r}, but was called with {wanted!r} when the sequence was made. Give inputs of "
        "the same kind."
    )
