"""Finds where a layer can be cut in two: after its attention and before its feed-forward, each with its own norms.

A layer that computes x + attention(norm(x)), then h + feed_forward(norm(h)), is two layers, each without one of the
branches: the first passes on h, which has the shape of x, and the second continues with it. Which child belongs to
which half is found by running a toy, and accepted if the halves of the toy's layers are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import LayerPart, ModelAnatomy
from slipstream.model.attached_code import copy_with_shared_weights
from slipstream.model.cutting import keep_half, second_half
from slipstream.model.hooks.crossing_tensors import first_output, hidden_states, with_hidden_states
from slipstream.model.layer_range import LayerHalf
from slipstream.model.tensors import has_parameters
from slipstream.model.toy import (
    full_precision,
    output_weights,
    perturb_parameters,
    recorded_attention,
    relative_errors,
    toy_model,
    toy_tokens,
)

TOLERANCE = 1e-10  # the same products in the same order, so a larger difference is a mistake


def find_halves(config: PretrainedConfig, anatomy: ModelAnatomy) -> tuple[LayerPart, ...]:
    """Returns the parts of every kind of layer, for `ModelAnatomy.halves`.

    Every layer of the toy is compared with its two halves run in sequence, in float64 and training mode: output,
    gradients of input and parameters. Raises SlipstreamError, naming the layer, where they are not equal.
    """
    try:
        if anatomy.hidden is not None:
            raise _NotTwoHalvesError("layers: they take more than hidden states from the layers before")
        with torch.random.fork_rng(devices=[]), full_precision():
            return _find_halves(toy_model(config), anatomy, toy_tokens(config))
    except Exception as error:  # the model's own code may raise any
        reason = f"layers: a toy of it can't be run ({type(error).__name__}: {error})"
        if isinstance(error, _NotTwoHalvesError):
            reason = str(error)
        raise SlipstreamError(
            f"model_type {config.model_type!r} can't be cut inside {reason}. Give whole numbers of layers."
        ) from error


def _find_halves(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> tuple[LayerPart, ...]:
    perturb_parameters(model)  # so that a missing part shows
    found: dict[tuple[str, str], LayerPart] = {}
    for index, run in enumerate(_record_calls(model, anatomy, tokens)):
        try:
            parts = _parts_of(run, {part.name for part in found.values() if part.begins_half})
            for part in parts:
                if found.setdefault((part.name, part.kind), part) != part:
                    raise _NotTwoHalvesError(f"its {part.name} is in the other half than in the layers before")
        except _NotTwoHalvesError as error:
            raise _NotTwoHalvesError(f"layer {index} ({type(run.layer).__name__}): {error}") from error
    _check_walk(model, anatomy, tuple(found.values()), tokens)
    return tuple(found.values())


def _check_walk(model: PreTrainedModel, anatomy: ModelAnatomy, parts: Sequence[LayerPart], tokens: Tensor) -> None:
    """Runs the toy with half layers, since the code between layers may read attributes of their parts."""
    for half in LayerHalf:
        halved = copy_with_shared_weights(model)
        for layer in anatomy.layers_of(halved):
            keep_half(layer, parts, half)
        try:
            with torch.no_grad():
                halved(input_ids=tokens, use_cache=False)
        except Exception as error:  # the model's own code
            raise _NotTwoHalvesError(
                f"layers: without one half of each it fails ({type(error).__name__}: {error})"
            ) from error


class _NotTwoHalvesError(Exception):
    """Raised with the reason why a layer can't be cut in two."""


@dataclass
class _LayerCall:
    """The call of a layer, and its children with parameters in the order in which they ran."""

    layer: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)
    tuple_lengths: dict[str, int] = field(default_factory=dict)
    attending: str = ""  # the child that attends


def _record_calls(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> list[_LayerCall]:
    runs = [_LayerCall(layer) for layer in anatomy.layers_of(model)]
    with torch.no_grad(), recorded_attention() as attending, ExitStack() as hooks:
        for run in runs:
            hooks.enter_context(run.layer.register_forward_pre_hook(partial(_record_call, run), with_kwargs=True))
            for name, child in run.layer.named_children():
                if has_parameters(child):
                    hooks.enter_context(child.register_forward_hook(partial(_record_child, run, name)))
        model(input_ids=tokens, use_cache=False)
    for run in runs:
        inside = {name: set(child.modules()) for name, child in run.layer.named_children()}
        run.attending = next((name for name, modules in inside.items() if modules & set(attending)), "")
    return runs


def _record_call(run: _LayerCall, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    run.args, run.kwargs = args, kwargs


def _record_child(run: _LayerCall, name: str, _child: nn.Module, _args: Any, output: Any) -> None:
    run.children.append(name)
    run.tuple_lengths[name] = len(output) if isinstance(output, tuple) else 0


def _parts_of(run: _LayerCall, beginnings: set[str]) -> list[LayerPart]:
    """Tries every child after the attention as the beginning of the second half, those of earlier layers first."""
    _check_children(run)
    candidates = run.children[run.children.index(run.attending) + 1 :]
    if not candidates:
        raise _NotTwoHalvesError(f"nothing that has parameters runs after its {run.attending}")
    smallest = inf
    for beginning in sorted(candidates, key=lambda name: name not in beginnings):
        parts = _cut_at(run, beginning)
        difference = _difference(run, parts)
        if difference < TOLERANCE:
            return parts
        smallest = min(smallest, difference)
    if smallest == inf:
        raise _NotTwoHalvesError("attention first and feed-forward after it fail, or train other parameters")
    raise _NotTwoHalvesError(
        f"attention first and feed-forward after it differ from the whole layer by {smallest:.1e}, as where both start "
        "from the same input"
    )


def _check_children(run: _LayerCall) -> None:
    if not run.attending:
        raise _NotTwoHalvesError("none of its children attends through transformers' AttentionInterface")
    own = [*dict(run.layer.named_parameters(recurse=False)), *dict(run.layer.named_buffers(recurse=False))]
    if own:
        raise _NotTwoHalvesError(f"{own[0]} belongs to the layer itself, so to none of its halves")
    for name, child in run.layer.named_children():
        if has_parameters(child) and run.children.count(name) != 1:
            raise _NotTwoHalvesError(f"{name} runs {run.children.count(name)} times in one forward")


def _cut_at(run: _LayerCall, beginning: str) -> list[LayerPart]:
    middle = run.children.index(beginning)
    parts = []
    for index, name in enumerate(run.children):
        kind = type(run.layer.get_submodule(name)).__name__
        half = LayerHalf.ATTENTION if index < middle else LayerHalf.FEED_FORWARD
        parts.append(LayerPart(name, kind, half, run.tuple_lengths[name], begins_half=index in (0, middle)))
    return parts


def _difference(run: _LayerCall, parts: Sequence[LayerPart]) -> float:
    """Returns the largest relative error of outputs and gradients; infinity if one is missing or a half can't run."""
    halves = [copy_with_shared_weights(run.layer) for _ in LayerHalf]
    for half, layer in zip(LayerHalf, halves, strict=True):
        keep_half(layer, parts, half)
    expected = _outputs_and_gradients(run, [run.layer], parts)
    try:
        found = _outputs_and_gradients(run, halves, parts)
    except Exception:  # the model's own code, given placeholders that don't suit it
        return inf
    if found.keys() != expected.keys():
        return inf
    errors = relative_errors(found, expected, floor=1e-6).values()
    return inf if any(map(isnan, errors)) else max(errors)


def _outputs_and_gradients(
    run: _LayerCall, layers: Sequence[nn.Module], parts: Sequence[LayerPart]
) -> dict[str, Tensor]:
    """Runs the layers in sequence, as stages run them: with dropout whose random state is keyed by the half."""
    hidden: Any = hidden_states(run.args, run.kwargs).clone().requires_grad_()
    received = hidden
    for layer in layers:
        args, kwargs = with_hidden_states(run.args, run.kwargs, hidden)
        torch.manual_seed(0)
        middle = second_half(layer.train(), parts)
        with nullcontext() if middle is None else middle.register_forward_pre_hook(_seed_second_half):
            hidden = first_output(layer(*args, **kwargs))
    (hidden * output_weights(hidden)).sum().backward()
    gradients = {name: p.grad for layer in layers for name, p in layer.named_parameters() if p.grad is not None}
    for layer in layers:
        layer.zero_grad()
    return gradients | {"output": hidden.detach(), "input's gradient": received.grad}


def _seed_second_half(*_: Any) -> None:
    torch.manual_seed(1)
