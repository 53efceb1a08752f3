"""Compares a toy of an architecture, cut into stages and slices, with the whole toy, layer by layer, in float64.

No config says whether an architecture can be sliced: attention may bypass the interface, state may run along the
tokens, positions may come from elsewhere. Running it shows all of these.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.model.causal_lm_stage import CausalLMStage
from slipstream.model.hooks.layer_arguments import first_output, hidden_states
from slipstream.model.hooks.token_slice import TokenSlice
from slipstream.model.layer_range import LayerRange
from slipstream.model.model_anatomy import ModelAnatomy, find_anatomy
from slipstream.model.model_cutting import copy_with_shared_weights
from slipstream.model.toy import TOY_LENGTH, toy_model, toy_tokens
from slipstream.model.toy_comparison import full_precision, output_weights, recorded_attention, relative_errors

TOLERANCE = 1e-5  # sums that a model forms in float32 differ by up to 1e-6, a mistake by 1e-4 or more
_CUTS = (0, 5, 20, 41, TOY_LENGTH)  # unequal slices; the first ends below every threshold of the toy
_INPUT = "input of layer 0"
_Slices = dict[str, list[Tensor]]


@dataclass(frozen=True)
class SelfCheck:
    """The result of a self-check: the largest relative errors of layer outputs and gradients, and its duration."""

    model_type: str
    num_layers: int
    output_error: float
    gradient_error: float
    seconds: float


def check_sliceable(config: PretrainedConfig, anatomy: ModelAnatomy | None = None) -> SelfCheck:
    """Checks that slices and stages are exact for an architecture, in about a second. Not collective.

    Args:
        config: the model's configuration; a toy with the same architecture and random weights runs on the CPU.
        anatomy: the architecture's anatomy, if it is known already.

    Returns:
        The largest relative differences between the sliced and the unsliced toy, in float64.

    Raises:
        SlipstreamError: an output or gradient differs; the message names the layer or the feature that causes it.
    """
    began = time.perf_counter()
    if getattr(config, "output_router_logits", False):  # of mixtures of experts: not a sum over tokens
        reason = "output_router_logits=True adds a load-balancing loss over the whole batch, which slices don't sum to"
        raise _refusal(config, f"{reason}. Set output_router_logits=False")
    try:
        anatomy = anatomy or find_anatomy(config)
        with full_precision():
            whole = _run_whole(toy_model(config), anatomy, toy_tokens(config))
    except SlipstreamError:
        raise
    except Exception as error:
        raise _refusal(config, f"a toy of it could not be run ({type(error).__name__}: {error})") from error
    try:
        with full_precision():
            sliced = _run_sliced(toy_model(config), anatomy, toy_tokens(config))
        errors = relative_errors(sliced.outputs, whole.outputs)
        output_error = _largest_error("{} of the sliced model differs from the whole one", errors)
        for name in whole.gradients:
            if name not in sliced.gradients:
                raise SlipstreamError(f"{name} gets no gradient when the model is sliced")
        errors = relative_errors(sliced.gradients, whole.gradients, floor=1e-6)
        gradient_error = _largest_error("the gradient of {} differs from the whole model's", errors)
    except SlipstreamError as error:
        raise _refusal(config, whole.without_attention or str(error)) from error
    except Exception as error:
        reason = f"a toy of it fails when cut into stages and slices ({type(error).__name__}: {error})"
        raise _refusal(config, whole.without_attention or reason) from error
    num_layers = len(whole.outputs) - 2
    return SelfCheck(config.model_type, num_layers, output_error, gradient_error, time.perf_counter() - began)


@dataclass
class _ModelRun:
    """The gradients, and the outputs by place in the order of the forward: "input of layer 0", ..., "logits"."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    without_attention: str = ""  # says which layer never attended through the interface


def _run_whole(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> _ModelRun:
    outputs: _Slices = defaultdict(list)
    layers = anatomy.layers_of(model)
    with _recording(layers, range(len(layers)), outputs), recorded_attention() as attending:
        logits = model(input_ids=tokens, use_cache=False).logits
    outputs["logits"] = [logits.detach()]
    (logits * output_weights(logits)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    without_attention = (
        f"layer {index} ({type(layer).__name__}) never attends through transformers' AttentionInterface, so "
        "what it needs from earlier tokens (other attention, a recurrent state) can't be provided"
        for index, layer in enumerate(layers)
        if not set(layer.modules()) & set(attending)
    )
    return _ModelRun(_joined(outputs), gradients, next(without_attention, ""))


def _run_sliced(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> _ModelRun:
    """Runs two stages on four slices: forwards, then backwards in reverse order."""
    cpu, num_layers = torch.device("cpu"), len(anatomy.layers_of(model))
    middle = (num_layers + 1) // 2
    cuts = [LayerRange(0, middle), LayerRange(middle, num_layers)] if num_layers > 1 else [LayerRange(0, 1)]
    stages = [CausalLMStage(copy_with_shared_weights(model), anatomy, owned, cpu) for owned in cuts]
    stores = [ContextStore(TOY_LENGTH) for _ in stages]
    outputs: _Slices = defaultdict(list)
    runs: list[list[tuple[Tensor | None, Tensor]]] = []
    for index, (start, end) in enumerate(pairwise(_CUTS)):
        positions = torch.arange(start, end).expand(len(tokens), -1)
        piece = TokenSlice(tokens[:, start:end], positions, None, start, TOY_LENGTH, TOY_LENGTH - 1, index=index)
        hidden: Tensor | None = None
        ends: list[tuple[Tensor | None, Tensor]] = []
        for stage, store in zip(stages, stores, strict=True):
            received = None if hidden is None else hidden.detach().requires_grad_()
            with _recording(anatomy.layers_of(stage.model), stage.layers_here, outputs):
                output = hidden = stage.forward(piece, received, store)
            ends.append((received, output))
            _check_attention(stage, store, index + 1)
        runs.append(ends)
    outputs["logits"] = [ends[-1][1].detach() for ends in runs]
    weights = torch.split(output_weights(torch.cat(outputs["logits"], 1)), [b - a for a, b in pairwise(_CUTS)], dim=1)
    for ends, gradient in reversed(list(zip(runs, weights, strict=True))):
        for received, output in reversed(ends):
            torch.autograd.backward(output, gradient)
            if received is not None and received.grad is not None:
                gradient = received.grad
    return _ModelRun(_joined(outputs), _stage_gradients(stages))


@contextmanager
def _recording(layers: list[nn.Module], owned: range, outputs: _Slices) -> Iterator[None]:
    """Collects the first layer's input and every owned layer's output, a list of slices each."""

    def record(index: int, _layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if index == 0:
            outputs[_INPUT].append(hidden_states(args, kwargs).detach())
        outputs[f"layer {index}"].append(first_output(output).detach())

    with ExitStack() as hooks:
        for index in owned:
            hooks.enter_context(layers[index].register_forward_hook(partial(record, index), with_kwargs=True))
        yield


def _joined(outputs: _Slices) -> dict[str, Tensor]:
    return {place: torch.cat(slices, dim=1) for place, slices in outputs.items()}


def _check_attention(stage: CausalLMStage, store: ContextStore, num_slices: int) -> None:
    """Raises SlipstreamError where a layer doesn't attend equally often in every slice."""
    for index, layer in zip(stage.layers_here, stage.layers, strict=True):
        inside = set(layer.modules())
        calls = [call for call in store.reads if call[0] in inside]  # type: ignore[index]
        if any(len(store.reads[call]) != num_slices for call in calls):
            raise SlipstreamError(f"layer {index} does not attend equally often in every slice")


def _stage_gradients(stages: list[CausalLMStage]) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        gradients |= {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        for tied in stage.tied:
            if tied.head is not None and tied.head.grad is not None:
                gradients[tied.name] = gradients.get(tied.name, torch.zeros(())) + tied.head.grad
    return gradients


def _largest_error(difference: str, errors: Mapping[str, float]) -> float:
    """Returns the largest error; raises SlipstreamError for the first that isn't below TOLERANCE."""
    for name, error in errors.items():
        if not error < TOLERANCE:
            hint = ": its positions do not follow position_ids" if name == _INPUT else ""
            raise SlipstreamError(f"{difference.format(name)} by {error:.1e}{hint}")
    return max(errors.values())


def _refusal(config: PretrainedConfig, reason: str) -> SlipstreamError:
    return SlipstreamError(
        f"model_type {config.model_type!r} can't be trained in token slices: {reason}. "
        "`slipstream check` runs this check for any model; Llama, Qwen, Mistral, Gemma, GPT-2 and the like pass it."
    )
