"""Runs a toy once and notes what its layers, and the modules around them, are given and give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.crossing_tensors import TRAIN_WHOLE
from slipstream.model.hooks.layer_arguments import hidden_states
from slipstream.model.storages import has_parameters, storage_ids
from slipstream.model.toy.toy_comparison import full_precision, recorded_attention


@dataclass
class WatchedToy:
    """What a toy did in one forward.

    Args:
        layers: the name of its list of layers.
        outside: the largest modules that neither contain the layers nor lie in them, by name.
    """

    model: PreTrainedModel
    layers: str
    outside: dict[str, nn.Module]
    num_entered: int = 0  # calls of layers
    output: Any = None  # of the last of them
    taken: list[Tensor] = field(default_factory=list)  # by layers, besides hidden states
    calls: dict[str, set[int]] = field(default_factory=dict)  # after how many layers each of `outside` was called
    given: dict[str, list[Tensor]] = field(default_factory=dict)  # what each of them was given last
    constants: dict[str, list[Tensor]] = field(default_factory=dict)  # what those with frozen parameters alone gave
    attended: list[nn.Module] = field(default_factory=list)  # through the attention interface

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: Tensor) -> WatchedToy:
        """Runs the toy, once its layers are found."""
        with full_precision():
            layers = _find_layers(model, tokens)
        run = cls(model, layers, _outside(model, layers))
        with run._watched(), torch.no_grad(), full_precision(), recorded_attention() as run.attended:
            model(input_ids=tokens, use_cache=False)
        return run

    @property
    def every_layer(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.layers).children())

    def runs_after(self, name: str) -> bool:
        """Returns whether a module outside of the layers ran after the last of them alone."""
        return self.calls[name] == {len(self.every_layer)}

    def runs_before(self, name: str) -> bool:
        """Returns whether it ran before the first layer alone, or not at all."""
        return self.calls[name] <= {0}

    def takes_other_tensors(self, name: str) -> bool:
        """Returns whether it took several tensors that the last layer didn't give."""
        given = self.given[name]
        return len(given) > 1 and not storage_ids(given) <= storage_ids(_tensors(self.output))

    def reaches_layers(self, name: str) -> bool:
        """Returns whether layers took what a module of constants gave."""
        return not storage_ids(self.constants[name]).isdisjoint(storage_ids(self.taken))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for layer in self.every_layer:
                hooks.enter_context(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(self._leave))
            for name, module in self.outside.items():
                self.calls[name] = set()
                hooks.enter_context(module.register_forward_pre_hook(partial(self._call, name), with_kwargs=True))
                if has_parameters(module) and not any(each.requires_grad for each in module.parameters()):
                    hooks.enter_context(module.register_forward_hook(partial(self._give, name)))
            yield

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_entered += 1
        hidden = hidden_states(args, kwargs)
        self.taken += [each for each in _tensors((args, kwargs)) if each is not hidden]

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        self.output = output

    def _call(self, name: str, _: nn.Module, *given: Any) -> None:
        self.calls[name].add(self.num_entered)
        self.given[name] = _tensors(given)

    def _give(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.constants[name] = _tensors(output)


def _tensors(given: Any) -> list[Tensor]:
    return [each for each in tree_leaves(given) if isinstance(each, Tensor)]


def _find_layers(model: nn.Module, tokens: Tensor) -> str:
    """Returns the name of the model's list of decoder layers: of the lists that run on tokens, the largest.

    Models of images and text have a list for images, too.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    ran: set[str] = set()
    with ExitStack() as hooks, torch.no_grad():
        for name, layers in lists.items():
            for layer in layers:
                hooks.enter_context(layer.register_forward_pre_hook(lambda *_, name=name: ran.add(name)))
        model(input_ids=tokens, use_cache=False)
    if not ran:
        raise SlipstreamError(
            f"{type(model).__name__} has no nn.ModuleList of layers, so it can't be cut into stages. {TRAIN_WHOLE}"
        )
    return max(sorted(ran), key=lambda name: sum(p.numel() for p in lists[name].parameters()))


def _outside(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    path = layers.split(".")
    for depth in range(len(path)):
        prefix = ".".join(path[:depth])
        for name, child in model.get_submodule(prefix).named_children():
            if name != path[depth]:
                found |= _called(f"{prefix}.{name}" if prefix else name, child)
    return found


def _called(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Returns the module, or those in a list, which isn't called itself."""
    if not isinstance(module, nn.ModuleList):
        return {name: module}
    inside = (_called(f"{name}.{number}", child) for number, child in module.named_children())
    return dict(chain.from_iterable(each.items() for each in inside))
