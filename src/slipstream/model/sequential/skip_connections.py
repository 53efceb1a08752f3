"""Skip connections of an nn.Sequential: a tensor leaves at one layer and comes back at a later one."""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.model.sequential.layer_context import LayerValue, as_tuple
from slipstream.model.tensor_spec import Tensors


class Skip:
    """A skip connection. `stash` and `pop` make its two ends, each a layer that is used once.

        skip = Skip("residual")
        nn.Sequential(a, skip.stash(), b, skip.pop(), c)  # c gets (output of b, output of a)

    The model remains an ordinary `nn.Sequential`. In a pipeline the tensor goes directly from the stage of one end to
    the stage of the other, and no stage between them holds it.
    """

    def __init__(self, name: str) -> None:
        """`name` identifies it in errors and in the timeline; it must be unique in a model."""
        self.name = name
        self.tensor: Tensor | None = None  # on its way from the stash to the pop

    def stash(self, index: int = 0) -> SkipStash:
        """Returns the layer where it begins, which passes on its input and keeps it, or element `index` of a tuple."""
        return SkipStash(self, index)

    def pop(self) -> SkipPop:
        """Returns the layer where it ends, which returns a tuple of its input and, after that, the stashed tensor."""
        return SkipPop(self)


class SkipStash(nn.Module):
    """The beginning of a Skip."""

    def __init__(self, skip: Skip, index: int) -> None:
        super().__init__()
        self.skip, self.index = skip, index

    def forward(self, inputs: LayerValue) -> LayerValue:
        self.skip.tensor = inputs[self.index] if isinstance(inputs, tuple) else inputs
        return inputs

    def extra_repr(self) -> str:
        return repr(self.skip.name)


class SkipPop(nn.Module):
    """The end of a Skip."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, inputs: LayerValue) -> Tensors:
        tensor, self.skip.tensor = self.skip.tensor, None
        if tensor is None:
            raise RuntimeError(f"the skip {self.skip.name!r} is popped before it is stashed")
        return (*as_tuple(inputs), tensor)

    def extra_repr(self) -> str:
        return repr(self.skip.name)
