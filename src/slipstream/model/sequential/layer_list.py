"""Turns an nn.Sequential into a list of layers: flattened, with its skip connections found and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from slipstream.errors import SlipstreamError
from slipstream.model.saving.weight_gradients import is_compiled
from slipstream.model.sequential.batch_norm import mixes_batch
from slipstream.model.sequential.skip_connections import Skip, SkipPop, SkipStash


@dataclass(frozen=True)
class SequentialLayer:
    """One layer of the flattened sequence; `name` is its module's name in the unsplit model, such as "3.1"."""

    name: str
    module: nn.Module

    def __str__(self) -> str:
        return f"layer {self.name} ({type(self.module).__name__})"


@dataclass(frozen=True)
class SkipRoute:
    """The numbers of the layers where a skip connection begins and ends."""

    name: str
    stash: int
    pop: int


def flatten_layers(model: nn.Sequential) -> list[SequentialLayer]:
    """Returns the layers of nested sequences, in the order in which they run.

    A subclass with a different forward, or a sequence with hooks, is one layer. Raises SlipstreamError, naming the
    layer, for what can't be a layer of a pipeline.
    """
    layers = list(_flattened(model, ""))
    if not layers:
        raise SlipstreamError("the nn.Sequential has no layers: there is nothing to train.")
    for layer in layers:
        for module in layer.module.modules():
            reason = mixes_batch(module)
            if reason is not None:
                raise SlipstreamError(f"{layer}: {reason}")
    return layers


def is_plain_sequential(module: object) -> bool:
    """Returns whether the module is a sequence that only calls its children one after the other."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or is_compiled(module))


def _flattened(module: nn.Module, prefix: str) -> Iterator[SequentialLayer]:
    for name, child in module._modules.items():  # with repetitions: a layer may run twice
        assert child is not None
        if is_plain_sequential(child):
            yield from _flattened(child, f"{prefix}{name}.")
        else:
            yield SequentialLayer(f"{prefix}{name}", child)


def check_weights_on_one_stage(layers: Sequence[SequentialLayer], stages: Sequence[range]) -> None:
    """Raises SlipstreamError where layers of two stages have the same weight."""
    first: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for index in stage:
            for name, parameter in layers[index].module.named_parameters():
                other, owner = first.setdefault(id(parameter), (number, f"{layers[index].name}.{name}"))
                if other != number:
                    raise SlipstreamError(
                        f"{layers[index]}: its {name} is also {owner}, but they are on stages {other} and {number}. "
                        "Give a partition that has both on one stage, or give each layer a separate weight."
                    )


def find_skip_routes(layers: Sequence[SequentialLayer]) -> list[SkipRoute]:
    """Returns the skip connections. Raises SlipstreamError where one lacks an end, or its ends are reversed or
    repeated."""
    stashed, popped = _ends(layers, SkipStash, "stashed"), _ends(layers, SkipPop, "popped")
    for name, (number, _) in stashed.items():
        if name not in popped:
            raise SlipstreamError(
                f"{layers[number]}: the skip {name!r} is never consumed. Add a layer skip.pop() after it, or leave it "
                "out."
            )
    for name, (number, skip) in popped.items():
        begin, other = stashed.get(name, (number, skip))
        if begin >= number:
            raise SlipstreamError(
                f"{layers[number]}: the skip {name!r} is popped before it is stashed. Put skip.stash() before it."
            )
        if other is not skip:
            raise SlipstreamError(
                f"{layers[number]}: two skips are called {name!r}. Give each its own name, and use one Skip's "
                "stash() and pop() together."
            )
    return [SkipRoute(name, number, popped[name][0]) for name, (number, _) in stashed.items()]


def _ends(
    layers: Sequence[SequentialLayer], kind: type[SkipStash] | type[SkipPop], what: str
) -> dict[str, tuple[int, Skip]]:
    """Returns the layer's number and the skip by the skip's name."""
    found: dict[str, tuple[int, Skip]] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer.module, kind):
            skip = layer.module.skip
            if skip.name in found:
                raise SlipstreamError(
                    f"{layer}: the skip {skip.name!r} is {what} twice. Make a Skip of another name for it."
                )
            found[skip.name] = number, skip
    return found
