"""Finds where a layer can be cut in two: after its attention and before its feed-forward, each with its own norms.

A layer that computes x + attention(norm(x)), then h + feed_forward(norm(h)), is two layers, each without one of the
branches: the first passes on h, which has the shape of x, and the second continues with it. Which child belongs to
which half is found by running a toy, and accepted if the halves of the toy's layers are exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack, nullcontext
from math import inf, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import LayerPart, ModelAnatomy
from slipstream.model.cutting import keep_half, second_half
from slipstream.model.hooks.crossing_tensors import first_output, hidden_states, with_hidden_states
from slipstream.model.hooks.module_calls import ModuleCall, recorded_calls
from slipstream.model.layer_range import LayerHalf
from slipstream.model.module_copies import copy_with_shared_weights
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

# Halves form the same products in the same order, so a larger difference is a mistake.
TOLERANCE = 1e-10


# By toy and anatomy: the parts, or why there are none.
_found: dict[Hashable, tuple[LayerPart, ...] | str] = {}


def find_halves(config: PretrainedConfig, anatomy: ModelAnatomy) -> tuple[LayerPart, ...]:
    """Returns the parts of every kind of layer, for `ModelAnatomy.halves`.

    Every layer of the toy is compared with its two halves run in sequence, in float64 and training mode: output,
    gradients of input and parameters. A toy of the same configuration and code isn't tried again in this process.

    Raises SlipstreamError, naming the layer, where they are not equal.
    """
    key = anatomy.toy, repr(anatomy)
    if key not in _found:
        try:
            if anatomy.hidden is not None:
                raise _NotTwoHalvesError("layers: they take more than hidden states from the layers before")
            with torch.random.fork_rng(devices=[]), full_precision():
                _found[key] = _find_halves(toy_model(config), anatomy, toy_tokens(config))
        # The model's own code may raise anything.
        except Exception as error:
            why = f"layers: a toy of it can't be run ({type(error).__name__}: {error})"
            if isinstance(error, _NotTwoHalvesError):
                why = str(error)
            _found[key] = f"model_type {config.model_type!r} can't be cut inside {why}. Give whole numbers of layers."
    found = _found[key]
    if isinstance(found, str):
        raise SlipstreamError(found)
    return found


def halves_or_none(config: PretrainedConfig, anatomy: ModelAnatomy) -> tuple[LayerPart, ...]:
    """Returns the parts of half layers, none where the architecture has none and nobody asked for them."""
    return () if why_layers_stay_whole(config, anatomy) else find_halves(config, anatomy)


def why_layers_stay_whole(config: PretrainedConfig, anatomy: ModelAnatomy) -> str:
    """Returns why layers can't be cut in half; "" where they can."""
    try:
        find_halves(config, anatomy)
    except SlipstreamError as error:
        return str(error)
    return ""


def _find_halves(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> tuple[LayerPart, ...]:
    # Parameters that begin as zero or one would hide a missing part.
    perturb_parameters(model)
    known_parts: dict[tuple[str, str], LayerPart] = {}
    for index, run in enumerate(_record_layers(model, anatomy, tokens)):
        try:
            parts = _parts_of(run, {part.name for part in known_parts.values() if part.begins_half})
            for part in parts:
                if known_parts.setdefault((part.name, part.kind), part) != part:
                    raise _NotTwoHalvesError(f"its {part.name} is in the other half than in the layers before")
        except _NotTwoHalvesError as error:
            raise _NotTwoHalvesError(f"layer {index} ({type(run.layer).__name__}): {error}") from error
    _check_walk(model, anatomy, tuple(known_parts.values()), tokens)
    return tuple(known_parts.values())


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


class _LayerRun(NamedTuple):
    """The call of a layer, and those of its children with parameters in the order in which they ran."""

    layer: nn.Module
    call: ModuleCall
    children: list[ModuleCall]
    attending: str  # name of the child that attends; "": none


def _record_layers(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> list[_LayerRun]:
    layers = anatomy.layers_of(model)
    children = [{name: child for name, child in layer.named_children() if has_parameters(child)} for layer in layers]
    with torch.no_grad(), recorded_attention() as attending, ExitStack() as stack:
        calls = stack.enter_context(recorded_calls({str(index): layer for index, layer in enumerate(layers)}))
        inner_calls = [stack.enter_context(recorded_calls(modules)) for modules in children]
        model(input_ids=tokens, use_cache=False)
    runs = []
    for layer, call, inner in zip(layers, calls, inner_calls, strict=True):
        attends = (name for name, child in layer.named_children() if not set(child.modules()).isdisjoint(attending))
        runs.append(_LayerRun(layer, call, inner, next(attends, "")))
    return runs


def _parts_of(run: _LayerRun, beginnings: set[str]) -> list[LayerPart]:
    """Tries every child after the attention as the beginning of the second half, those of earlier layers first."""
    _check_children(run)
    names = [child.name for child in run.children]
    candidates = names[names.index(run.attending) + 1 :]
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


def _check_children(run: _LayerRun) -> None:
    if not run.attending:
        raise _NotTwoHalvesError("none of its children attends through transformers' AttentionInterface")
    layer_tensors = [*dict(run.layer.named_parameters(recurse=False)), *dict(run.layer.named_buffers(recurse=False))]
    if layer_tensors:
        raise _NotTwoHalvesError(f"{layer_tensors[0]} belongs to the layer itself, so to none of its halves")
    for name, child in run.layer.named_children():
        num_calls = sum(call.name == name for call in run.children)
        if has_parameters(child) and num_calls != 1:
            raise _NotTwoHalvesError(f"{name} runs {num_calls} times in one forward")


def _cut_at(run: _LayerRun, beginning: str) -> list[LayerPart]:
    middle = next(index for index, child in enumerate(run.children) if child.name == beginning)
    parts = []
    for index, child in enumerate(run.children):
        kind = type(run.layer.get_submodule(child.name)).__name__
        half = LayerHalf.ATTENTION if index < middle else LayerHalf.FEED_FORWARD
        tuple_length = len(child.output) if isinstance(child.output, tuple) else 0
        parts.append(LayerPart(child.name, kind, half, tuple_length, begins_half=index in (0, middle)))
    return parts


def _difference(run: _LayerRun, parts: Sequence[LayerPart]) -> float:
    """Returns the largest relative error of outputs and gradients; infinity if one is missing or a half can't run."""
    halves = [copy_with_shared_weights(run.layer) for _ in LayerHalf]
    for half, layer in zip(LayerHalf, halves, strict=True):
        keep_half(layer, parts, half)
    expected = _outputs_and_gradients(run, [run.layer], parts)
    try:
        results = _outputs_and_gradients(run, halves, parts)
    # The model's own code may raise anything, on placeholders that don't suit it.
    except Exception:
        return inf
    if results.keys() != expected.keys():
        return inf
    errors = relative_errors(results, expected, floor=1e-6).values()
    return inf if any(map(isnan, errors)) else max(errors)


def _outputs_and_gradients(
    run: _LayerRun, layers: Sequence[nn.Module], parts: Sequence[LayerPart]
) -> dict[str, Tensor]:
    """Runs the layers in sequence, as stages run them: with dropout whose random state is keyed by the half."""
    hidden: Any = hidden_states(run.call.args, run.call.kwargs).clone().requires_grad_()
    received = hidden
    for layer in layers:
        args, kwargs = with_hidden_states(run.call.args, run.call.kwargs, hidden)
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
