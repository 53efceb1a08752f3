"""Finds the tensors that a user's code reaches: what its operations take, and the leaves of the graph that it makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.model.own_code import HOOKS, references
from slipstream.model.tensors import storage_id


class TakenStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages of all tensors that operations take, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self.found.update(map(storage_id, taken))
        return func(*args, **kwargs or {})


class NamedWeights:
    """The parameters of a model by name, which it doesn't keep alive."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        self._references: list[tuple[str, weakref.ref[nn.Parameter]]] = [
            (name, weakref.ref(parameter)) for name, parameter in parameters
        ]

    def of(self, is_wanted: Callable[[str], bool]) -> NamedWeights:
        """Returns those with names that are wanted."""
        wanted = NamedWeights()
        wanted._references = [(name, reference) for name, reference in self._references if is_wanted(name)]
        return wanted

    def among(self, storages: Collection[int]) -> list[str]:
        """Returns the names of those whose storage is among these; of one with several names, all of them."""
        alive = ((name, reference()) for name, reference in self._references)
        return [name for name, parameter in alive if parameter is not None and storage_id(parameter) in storages]


def graph_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors in whose `.grad` a backward of these outputs would add gradients."""
    waiting = [output.grad_fn for output in outputs]
    leaves = {id(output): output for output in outputs if output.grad_fn is None and output.requires_grad}
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:  # AccumulateGrad
            leaves[id(variable)] = variable
        waiting += [following for following, _ in node.next_functions]
    return [*leaves.values()]


@contextmanager
def kept_gradients(outputs: Iterable[Tensor], apart_from: Iterable[Tensor]) -> Iterator[None]:
    """Lets a backward of these outputs run, and leaves `.grad` of all leaves as it was, but for those of a trial."""
    own = set(map(id, apart_from))
    others = {leaf: leaf.grad for leaf in graph_leaves(outputs) if id(leaf) not in own}
    for leaf in others:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in others.items():
            leaf.grad = gradient


def parts_reached(
    taken: Mapping[str, Collection[int]], weights: NamedWeights, own: Mapping[str, nn.Module]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each part whose operations take a parameter that isn't its own, and the parameter's names."""
    for part, storages in taken.items():
        mine = {storage_id(parameter) for parameter in own[part].parameters()}
        for storage in set(storages) - mine:
            if names := weights.among({storage}):
                yield part, tuple(names)


def held_weights(
    model: nn.Module, parts: Mapping[str, nn.Module], is_tried: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each part whose code holds a parameter that isn't its own, and the parameter's names.

    Where the part was tried, what its forward reads is known; then this is of its backward hooks alone.
    """
    weights = NamedWeights(model.named_parameters(remove_duplicate=False))
    for name, part in parts.items():
        own = set(map(id, part.modules())) | {id(parameter) for parameter in part.parameters()}
        attached = (value for module in part.modules() for value in _attached(module, is_tried))
        held = (each for each in references(attached) if id(each) not in own and isinstance(each, nn.Parameter))
        for storage in {storage_id(parameter) for parameter in held}:
            if names := weights.among({storage}):
                yield name, tuple(names)


def _attached(module: nn.Module, is_tried: bool) -> Iterator[object]:
    """Yields the code that was set on a module: its hooks, or those of its backward, and functions in attributes."""
    for kind in HOOKS:
        if not is_tried or "backward" in kind:
            yield from getattr(module, kind).values()
    if not is_tried:
        yield from (value for value in vars(module).values() if isinstance(value, FunctionType | MethodType | partial))
