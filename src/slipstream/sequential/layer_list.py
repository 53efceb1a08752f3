"""Turns an nn.Sequential into a list of layers: flattened, with its skip connections found and checked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import FunctionType
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch
from torch.nn.parameter import is_lazy

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import keyed_seed
from slipstream.model import HOOK_NAMES, HOOKS, Tensors, is_compiled, references
from slipstream.sequential.batch_norm import mixes_batch

_HOOK_NAMES = HOOK_NAMES | {
    "_state_dict_pre_hooks": "hook before state_dict",
    "_state_dict_hooks": "hook after state_dict",
    "_load_state_dict_pre_hooks": "hook before load_state_dict",
    "_load_state_dict_post_hooks": "hook after load_state_dict",
}
_GLOBAL_HOOKS = [f"_global{kind}" for kind in HOOKS]
# Methods that no forward or state depends on.
_MAY_DEFINE = {"__init__", "__repr__", "_get_name", "extra_repr", "_version"}


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

    A nested sequence that does more than call its children is one layer. Raises SlipstreamError, naming the layer, for
    one that a pipeline can't have.
    """
    layers = list(_flattened(model, ""))
    if not layers:
        raise SlipstreamError("the nn.Sequential has no layers: there is nothing to train.")
    for layer in layers:
        for module in layer.module.modules():
            reason = mixes_batch(module) or _refusal(module)
            if reason is not None:
                raise SlipstreamError(f"{layer}: {reason}")
        if isinstance(layer.module, SkipStash | SkipPop):
            check_runs_as_written(layer, "a pipeline carries the tensor itself")
    return layers


def _refusal(module: nn.Module) -> str | None:
    """Returns why a module can't be in a pipeline because of its weights or its state; None where it can."""
    if any(map(is_lazy, module.parameters(recurse=False))):
        name = type(module).__name__
        return f"{name} has no weights yet. Run the model once on a batch, or use {name.removeprefix('Lazy')}."
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        state = module.get_extra_state()
        if not isinstance(state, Tensor):
            return (
                f"{type(module).__name__} has an extra state, a {type(state).__name__}, but a pipeline saves tensors. "
                "Return a tensor from get_extra_state, or keep it elsewhere."
            )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return (
            f"{type(module).__name__}(scale_grad_by_freq=True) divides gradients by how often an id is in a batch, "
            "here in a microbatch. Use scale_grad_by_freq=False."
        )
    return None


def own_behaviour(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Returns a module's data or behaviour beyond its class `kind` of this library or of PyTorch; None for nothing."""
    for name, what in _HOOK_NAMES.items():
        if getattr(module, name, None):
            return f"has a {what}"
    for name in _GLOBAL_HOOKS:
        if getattr(module_of_torch, name):
            return "has a hook of all modules (torch.nn.modules.module.register_module_...)"
    for name in vars(module):
        if callable(getattr(kind, name, None)):
            return f"has a {name} that was set on it"
    for parent in type(module).__mro__[: type(module).__mro__.index(kind)]:
        for name in vars(parent).keys() - _MAY_DEFINE:
            if callable(getattr(kind, name, None)):
                return f"has a {name} that its class {parent.__name__} defines"
    for parent in kind.__mro__:
        for name in ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__iter__"):
            if name in vars(parent) and not _is_defined_with(parent, vars(parent)[name]):
                return f"has a {name} that was set on {parent.__name__}"
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            return f"has {name}, a tensor of its own"
    return "is compiled" if is_compiled(module) else None


def _is_defined_with(kind: type, function: object) -> bool:
    """Returns whether a class's function stands in the file that defines the class."""
    home = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return not isinstance(function, FunctionType) or function.__code__.co_filename == home


def check_runs_as_written(layer: SequentialLayer, instead: str) -> None:
    """Raises SlipstreamError where one of this library's layers was changed, which a pipeline wouldn't run."""
    kind = next(parent for parent in type(layer.module).__mro__ if parent.__module__.startswith("slipstream."))
    behaviour = own_behaviour(layer.module, kind)
    if behaviour is not None:
        raise SlipstreamError(f"{layer} {behaviour}, which wouldn't run: {instead}. Put it on a layer next to it.")


def check_runs_its_children(model: nn.Sequential) -> None:
    """Raises SlipstreamError where a sequence does more than to call its children one after the other."""
    behaviour = own_behaviour(model, nn.Sequential)
    if behaviour is not None:
        raise SlipstreamError(
            f"the nn.Sequential {behaviour}, which wouldn't run: its layers run one by one, on several ranks. Put it "
            "on a layer, or make the sequence one layer of another: nn.Sequential(model)."
        )


def nested_sequences(model: nn.Sequential) -> list[nn.Sequential]:
    """Returns the sequences whose children are layers, the model first."""
    inner = (child for child in model._modules.values() if child is not None)
    plain = (
        child for child in inner if isinstance(child, nn.Sequential) and own_behaviour(child, nn.Sequential) is None
    )
    return [model, *chain.from_iterable(map(nested_sequences, plain))]


def _flattened(module: nn.Module, prefix: str) -> Iterator[SequentialLayer]:
    # `_modules` lists repetitions too: a layer may run twice.
    for name, child in module._modules.items():
        assert child is not None
        if isinstance(child, nn.Sequential) and own_behaviour(child, nn.Sequential) is None:
            yield from _flattened(child, f"{prefix}{name}.")
        else:
            yield SequentialLayer(f"{prefix}{name}", child)


def check_weights_on_one_stage(layers: Sequence[SequentialLayer], stages: Sequence[range]) -> None:
    """Raises SlipstreamError where layers of two stages have the same weight."""
    first: dict[int, tuple[int, str]] = {}
    for stage_index, stage in enumerate(stages):
        for index in stage:
            for name, parameter in layers[index].module.named_parameters():
                other, owner = first.setdefault(id(parameter), (stage_index, f"{layers[index].name}.{name}"))
                if other != stage_index:
                    raise SlipstreamError(
                        f"{layers[index]}: its {name} is also {owner}, but they are on stages {other} and "
                        f"{stage_index}. Give a partition that has both on one stage, or each layer a separate weight."
                    )


def check_reads_on_one_stage(layers: Sequence[SequentialLayer], stages: Sequence[range]) -> None:
    """Raises SlipstreamError where a layer holds a module or tensor of a layer on another stage, of which it isn't the
    parent."""
    owners: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for part in _parts(layer.module):
            owners.setdefault(id(part), index)
    place = {index: stage_index for stage_index, stage in enumerate(stages) for index in stage}
    shared = {id(None)} | _ids_of_several(layers)
    for index, layer in enumerate(layers):
        for reference in _references(layer.module):
            other = owners.get(id(reference), index)
            if place[other] != place[index] and id(reference) not in shared:
                raise SlipstreamError(
                    f"{layer} reads {layers[other]}, but they are on stages {place[index]} and {place[other]}. Give a "
                    "partition that has both on one stage, or hand on what it reads in the tuple."
                )


def _parts(module: nn.Module) -> Iterator[object]:
    """Yields a module's own modules, parameters and buffers, and None for those that aren't set."""
    for inner in module.modules():
        yield from (inner, *inner._parameters.values(), *inner._buffers.values())


def _ids_of_several(layers: Sequence[SequentialLayer]) -> set[int]:
    """Returns the ids of modules, and tensors, that are parts of several layers: each stage has them."""
    seen: set[int] = set()
    several: set[int] = set()
    for module in dict.fromkeys(layer.module for layer in layers):
        parts = set(map(id, _parts(module)))
        several |= seen & parts
        seen |= parts
    return several


def _references(module: nn.Module) -> Iterator[object]:
    """Yields the modules and tensors that a module and its parts hold: in attributes, containers, hooks, closures."""
    return references(value for part in module.modules() for value in vars(part).values())


def find_skip_routes(layers: Sequence[SequentialLayer]) -> list[SkipRoute]:
    """Returns the skip connections. Raises SlipstreamError where one lacks an end, or its ends are reversed or
    repeated."""
    _check_hidden_ends(layers)
    stashed, popped = _ends(layers, SkipStash, "stashed"), _ends(layers, SkipPop, "popped")
    for name, (index, _) in stashed.items():
        if name not in popped:
            raise SlipstreamError(
                f"{layers[index]}: the skip {name!r} is never consumed. Add a layer skip.pop() after it, or leave it "
                "out."
            )
    for name, (index, skip) in popped.items():
        begin, other = stashed.get(name, (index, skip))
        if begin >= index:
            raise SlipstreamError(
                f"{layers[index]}: the skip {name!r} is popped before it is stashed. Put skip.stash() before it."
            )
        if other is not skip:
            raise SlipstreamError(
                f"{layers[index]}: two skips are called {name!r}. Give each its own name, and use one Skip's "
                "stash() and pop() together."
            )
    return [SkipRoute(name, index, popped[name][0]) for name, (index, _) in stashed.items()]


def _check_hidden_ends(layers: Sequence[SequentialLayer]) -> None:
    """Raises SlipstreamError where a skip begins or ends inside a layer, but not both."""
    for layer in layers:
        inner = [part for part in layer.module.modules() if part is not layer.module]
        begins = {part.skip for part in inner if isinstance(part, SkipStash)}
        ends = {part.skip for part in inner if isinstance(part, SkipPop)}
        for skip in begins ^ ends:
            raise SlipstreamError(
                f"{layer}: the skip {skip.name!r} {'begins' if skip in begins else 'ends'} in it, but not both. Put "
                "stash() and pop() into one layer, or into plain nn.Sequentials."
            )


def _ends(
    layers: Sequence[SequentialLayer], kind: type[SkipStash] | type[SkipPop], what: str
) -> dict[str, tuple[int, Skip]]:
    """Returns the layer's number and the skip by the skip's name."""
    ends: dict[str, tuple[int, Skip]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer.module, kind):
            skip = layer.module.skip
            if skip.name in ends:
                raise SlipstreamError(
                    f"{layer}: the skip {skip.name!r} is {what} twice. Make a Skip of another name for it."
                )
            ends[skip.name] = index, skip
    return ends


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
        self.tensor: Tensor | None = None  # the skip, on its way from the stash to the pop

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
        self.skip = skip
        self.index = index

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


LayerValue = Tensor | Tensors  # a layer's input or output


@dataclass(frozen=True)
class BatchSlice:
    """One microbatch of a batch, or one token slice of it: the first layer's input.

    Of the token slices, only the first runs the layers before CutTokens.
    """

    value: LayerValue
    microbatch: int = 0
    index: int = 0  # the number of the token slice
    seed: int = 0  # the step's seed
    tokens: range | None = None  # the slice's tokens; None: an unsliced microbatch
    length: int = 1  # tokens of all slices together
    max_position: ClassVar[int] = -1  # placeholder: the user's layers know no positions
    lone_sequences: ClassVar[tuple[()]] = ()

    @property
    def tensors(self) -> Tensors:
        return as_tuple(self.value)


@dataclass
class LayerContext:
    """A stage's forward of one microbatch or token slice while it runs."""

    piece: BatchSlice
    store: ContextStore  # keys and values of the microbatch's slices
    tokens: range | None = None  # the tokens that the layers work on; None: all of the input
    layer: int = -1  # number of the running layer in the whole sequence
    calls: Counter[int] = field(default_factory=Counter)  # calls of attention, by layer

    def seed(self) -> int:
        """Returns a seed keyed by step, layer, microbatch and slice, so every split and schedule draws the same (rule
        10)."""
        return keyed_seed(self.piece.seed, self.layer, self.piece.microbatch, self.piece.index)

    def next_call(self) -> tuple[int, int]:
        """Returns the store's key: a layer may attend several times in one forward."""
        self.calls[self.layer] += 1
        return self.layer, self.calls[self.layer]


def as_tuple(value: LayerValue) -> Tensors:
    return value if isinstance(value, tuple) else (value,)


def as_value(tensors: Tensors, is_tuple: bool) -> LayerValue:
    return tensors if is_tuple else tensors[0]
