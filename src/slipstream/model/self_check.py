"""Compares a toy of an architecture, cut into stages and slices, with the whole toy, layer by layer, in float64.

No config says whether an architecture can be sliced: attention may bypass the interface, state may run along the
tokens, positions may come from elsewhere. Running it shows all of these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from slipstream.model.hooks import TokenSlice
from slipstream.model.layer_arguments import first_output, hidden_states
from slipstream.model.layer_range import LayerRange
from slipstream.model.model_anatomy import ModelAnatomy, find_anatomy
from slipstream.model.model_cutting import copy_with_shared_weights
from slipstream.model.toy import TOY_LENGTH, full_precision, recorded_attention, toy_model, toy_tokens

TOLERANCE = 1e-5  # sums that a model forms in float32 differ by up to 1e-6, a mistake by 1e-4 or more
_CUTS = (0, 5, 20, 41, TOY_LENGTH)  # unequal slices; the first ends below every threshold of the toy


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
    _refuse_whole_batch_losses(config)
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
        output_error = _compare_outputs(whole, sliced)
        gradient_error = _compare_gradients(whole.gradients, sliced.gradients)
    except Exception as error:
        raise _refusal(config, whole.without_attention or _explained(error)) from error
    num_layers = len(whole.outputs) - 2
    return SelfCheck(config.model_type, num_layers, output_error, gradient_error, time.perf_counter() - began)


def _explained(error: Exception) -> str:
    if isinstance(error, SlipstreamError):
        return str(error)
    return f"a toy of it fails when cut into stages and slices ({type(error).__name__}: {error})"


@dataclass
class _ModelRun:
    """The gradients, and the outputs by place in the order of the forward: "input of layer 0", ..., "logits"."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    without_attention: str = ""  # says which layer never attended through the interface


def _run_whole(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> _ModelRun:
    outputs: dict[str, list[Tensor]] = {}
    with _recording(model, anatomy, outputs), recorded_attention() as attending:
        logits = model(input_ids=tokens, use_cache=False).logits
    outputs["logits"] = [logits.detach()]
    (logits * _weights(logits)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return _ModelRun(_joined(outputs), gradients, _name_layer_without_attention(model, anatomy, attending))


def _name_layer_without_attention(model: PreTrainedModel, anatomy: ModelAnatomy, attending: list[nn.Module]) -> str:
    for index, layer in enumerate(anatomy.layers_of(model)):
        if not set(layer.modules()) & set(attending):
            return (
                f"layer {index} ({type(layer).__name__}) never attends through transformers' AttentionInterface, so "
                "what it needs from earlier tokens (other attention, a recurrent state) can't be provided"
            )
    return ""


def _run_sliced(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> _ModelRun:
    """Runs two stages on four slices: forwards, then backwards in reverse order."""
    cpu, num_layers = torch.device("cpu"), len(anatomy.layers_of(model))
    middle = (num_layers + 1) // 2
    cuts = [LayerRange(0, middle), LayerRange(middle, num_layers)] if num_layers > 1 else [LayerRange(0, 1)]
    stages = [CausalLMStage(copy_with_shared_weights(model), anatomy, owned, cpu) for owned in cuts]
    stores = [ContextStore(TOY_LENGTH) for _ in stages]
    outputs: dict[str, list[Tensor]] = {}
    runs: list[list[tuple[Tensor | None, Tensor]]] = []
    for index, (start, end) in enumerate(pairwise(_CUTS)):
        piece = _slice(tokens, start, end, index)
        hidden: Tensor | None = None
        ends: list[tuple[Tensor | None, Tensor]] = []
        for stage, store in zip(stages, stores, strict=True):
            received = None if hidden is None else hidden.detach().requires_grad_()
            with _recording(stage.model, anatomy, outputs, stage.owned):
                output = hidden = stage.forward(piece, received, store)
            ends.append((received, output))
        _check_attention(stages, anatomy, stores, index + 1)
        runs.append(ends)
    outputs["logits"] = [ends[-1][1].detach() for ends in runs]
    weights = torch.split(_weights(torch.cat(outputs["logits"], dim=1)), [b - a for a, b in pairwise(_CUTS)], dim=1)
    for ends, gradient in reversed(list(zip(runs, weights, strict=True))):
        for received, output in reversed(ends):
            torch.autograd.backward(output, gradient)
            if received is not None and received.grad is not None:
                gradient = received.grad
    return _ModelRun(_joined(outputs), _stage_gradients(stages))


def _slice(tokens: Tensor, start: int, end: int, index: int) -> TokenSlice:
    position_ids = torch.arange(start, end).expand(len(tokens), -1)
    return TokenSlice(tokens[:, start:end], position_ids, None, start, TOY_LENGTH, TOY_LENGTH - 1, index=index)


def _weights(logits: Tensor) -> Tensor:
    """Returns fixed random weights of the logits, so that every logit and every token counts."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(logits.shape, dtype=logits.dtype, generator=generator)


@contextmanager
def _recording(
    model: nn.Module, anatomy: ModelAnatomy, outputs: dict[str, list[Tensor]], owned: LayerRange | None = None
) -> Iterator[None]:
    """Collects the first layer's input and every owned layer's output, a list of slices each."""
    layers = anatomy.layers_of(model)
    hooks = []
    for index in range(len(layers)) if owned is None else owned.layers:
        if index == 0:
            hooks.append(layers[0].register_forward_pre_hook(partial(_record_input, outputs), with_kwargs=True))
        hooks.append(layers[index].register_forward_hook(partial(_record_output, outputs, f"layer {index}")))
    yield
    for hook in hooks:
        hook.remove()


def _record_input(
    outputs: dict[str, list[Tensor]], _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    outputs.setdefault("input of layer 0", []).append(hidden_states(args, kwargs).detach())


def _record_output(outputs: dict[str, list[Tensor]], place: str, _layer: nn.Module, _args: Any, output: Any) -> None:
    outputs.setdefault(place, []).append(first_output(output).detach())


def _joined(outputs: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    return {place: torch.cat(slices, dim=1) for place, slices in outputs.items()}


def _check_attention(
    stages: list[CausalLMStage], anatomy: ModelAnatomy, stores: list[ContextStore], num_slices: int
) -> None:
    """Raises SlipstreamError where a layer doesn't attend equally often in every slice."""
    for stage, store in zip(stages, stores, strict=True):
        layers = anatomy.layers_of(stage.model)
        for index in stage.owned.layers:
            inside = set(layers[index].modules())
            calls = [call for call in store.calls if call[0] in inside]  # type: ignore[index]
            if any(len(store.reads(call)) != num_slices for call in calls):
                raise SlipstreamError(f"layer {index} does not attend equally often in every slice")


def _stage_gradients(stages: list[CausalLMStage]) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        gradients |= {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        for tied in stage.tied:
            if tied.head is not None and tied.head.grad is not None:
                gradients[tied.name] = gradients.get(tied.name, torch.zeros(())) + tied.head.grad
    return gradients


def _compare_outputs(whole: _ModelRun, sliced: _ModelRun) -> float:
    worst = 0.0
    for place, expected in whole.outputs.items():
        error = ((sliced.outputs[place] - expected).abs().max() / expected.abs().max()).item()
        worst = max(worst, error)
        if not error < TOLERANCE:
            hint = ": its positions do not follow position_ids" if place.startswith("input") else ""
            raise SlipstreamError(f"{place} of the sliced model differs from the whole one by {error:.1e}{hint}")
    return worst


def _compare_gradients(whole: dict[str, Tensor], sliced: dict[str, Tensor]) -> float:
    floor = 1e-6 * max(gradient.abs().max() for gradient in whole.values())
    worst = 0.0
    for name, expected in whole.items():
        if name not in sliced:
            raise SlipstreamError(f"{name} gets no gradient when the model is sliced")
        error = ((sliced[name] - expected).abs().max() / max(expected.abs().max(), floor)).item()
        worst = max(worst, error)
        if not error < TOLERANCE:
            raise SlipstreamError(f"the gradient of {name} differs from the whole model's by {error:.1e}")
    return worst


def _refuse_whole_batch_losses(config: PretrainedConfig) -> None:
    """Raises SlipstreamError for the load-balancing loss of mixtures of experts, which isn't a sum over tokens."""
    if getattr(config, "output_router_logits", False):
        raise _refusal(
            config,
            "output_router_logits=True adds a load-balancing loss over the whole batch, which slices don't sum to. "
            "Set output_router_logits=False",
        )


def _refusal(config: PretrainedConfig, reason: str) -> SlipstreamError:
    return SlipstreamError(
        f"model_type {config.model_type!r} can't be trained in token slices: {reason}. "
        "`slipstream check` runs this check for any model; Llama, Qwen, Mistral, Gemma, GPT-2 and the like pass it."
    )
