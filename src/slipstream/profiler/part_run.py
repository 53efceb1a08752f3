"""Runs one part of a model alone, on meta tensors, and counts its forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from slipstream.model import SavedStorages
from slipstream.model.layer_arguments import first_output, hidden_states, with_hidden_states
from slipstream.pipeline.families import causal_cross_entropy
from slipstream.planner.costs import AttentionCall
from slipstream.profiler.operation_tally import OperationTally, counted_operations
from slipstream.profiler.recorded_calls import META, ModelCalls, recording
from slipstream.schedule import Op


class PartRun:
    """Runs a part's F, I and W at one length, on meta tensors."""

    def __init__(self, modules: list[tuple[nn.Module, str]], calls: ModelCalls, width: int, loss: bool) -> None:
        self._modules, self._calls, self._width, self._loss = modules, calls, width, loss
        self._parameters = {id(p): p for module, _ in modules for p in module.parameters()}
        # rotary tables and the like, which all layers share
        self._shared = [t for _, name in modules for t in _beyond_first(*calls.arguments[name])]
        self.attentions: list[AttentionCall] = []
        self.saved_bytes = 0

    def count(self) -> dict[Op, OperationTally]:
        """Returns the tallies of F, I and W; what the whole backward does beyond the input gradient is W's."""
        forward, inputs = self._pass(weights=False)
        _, backward = self._pass(weights=True)
        return {Op.F: forward, Op.I: inputs, Op.W: backward - inputs}

    def _pass(self, weights: bool) -> tuple[OperationTally, OperationTally]:
        for parameter in self._parameters.values():
            parameter.requires_grad_(weights)
            parameter.grad = torch.zeros_like(parameter) if weights else None
        own = ModelCalls(self._calls.length, self._calls.seq_len)
        saved = SavedStorages([*self._parameters.values(), *self._shared])
        with (
            recording(own),
            counted_operations(self._width) as forward,
            saved_tensors_hooks(saved.pack, lambda tensor: tensor),
            META,
        ):
            output, source = self._forward()
        self.attentions = own.attentions
        saved.pack(source)
        self.saved_bytes = saved.num_bytes
        if not output.requires_grad:
            return forward, OperationTally()
        with counted_operations(self._width) as backward, META:
            output.backward(torch.empty_like(output))  # type: ignore[no-untyped-call]
        return forward, backward

    def _forward(self) -> tuple[Tensor, Tensor]:
        """Returns the part's output and its first input."""
        results: list[Tensor] = []
        source = None
        for module, name in self._modules:
            args, kwargs = self._calls.arguments[name]
            args, kwargs = (_fresh(args), _fresh(kwargs))
            if self._loss and results:  # the head reads the norm's output
                args, kwargs = with_hidden_states(args, kwargs, results[-1])
            source = hidden_states(args, kwargs) if source is None else source
            results.append(first_output(module(*args, **kwargs)))
        assert source is not None
        if self._loss:
            targets = torch.zeros(results[-1].shape[:-1], dtype=torch.long)
            return causal_cross_entropy(results[-1], targets)[0], source
        return results[0] if len(results) == 1 else sum(results[1:], results[0]), source


def _fresh(value: Any) -> Any:
    """Returns the arguments as leaves, which get a gradient where they can."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point() and value.dim() == 3)
    if isinstance(value, tuple):
        return tuple(item.detach() if isinstance(item, Tensor) and len(value) == 2 else _fresh(item) for item in value)
    return {key: _fresh(item) for key, item in value.items()} if isinstance(value, dict) else value


def _beyond_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)][1:]
