"""Turns a vision model or encoder-decoder of transformers into an nn.Sequential, where its pipeline plan allows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.attached_code import copy_with_shared_weights
from slipstream.model.hf_sequential.stack_connector import LayerStack, StackConnector, StackLayer, main_output
from slipstream.model.toy.toy_model import quiet_transformers, toy_config

PipelinePlan = Mapping[str, Any]  # as base_model_pp_plan: module -> (inputs, outputs), in the order they run
_TOY_LENGTH = 12  # tokens
SUPPORTED = (
    "Sequences are pipelined by microbatches only. Plans allow T5Gemma (encoder and decoder), EuroBERT, ESMC, "
    "UltraBERT and the vision encoder of DeepSeek-OCR-2. To a vision model without a plan give one, for ViT "
    "plan={'embeddings': (['pixel_values'], ['hidden_states']), 'layers': (['hidden_states'], ['hidden_states']), "
    "'layernorm': (['hidden_states'], ['hidden_states'])}. Causal LMs go to slipstream.Pipeline as they are"
)


def sequence_of(
    model: PreTrainedModel,
    inputs: Sequence[str] = (),
    *,
    plan: PipelinePlan | None = None,
    self_check: bool = True,
    **constants: Any,
) -> nn.Sequential:
    """Returns an nn.Sequential over the model's own modules, to be pipelined by microbatches.

    Its attention sees whole sequences or images, so it takes no token slices. The sequence takes a tuple of the tensors
    named `inputs` (one tensor if there is one name) and returns what the model's forward returns: its logits or,
    without a head, the last hidden states. Between two layers travel the hidden states and whatever else the layers
    need (masks, positions, the encoder's output), which the model's own code computes once. The sequence shares layers
    and weights with `model`: don't use the model elsewhere. Not collective.

    Args:
        model: a model of transformers whose config, or the configs of its encoder and decoder, have a
            `base_model_pp_plan`.
        inputs: the names of its forward's tensors; by default those it needs, and the attention mask.
        plan: a plan for a model whose config has none: modules of the base model in the order in which they run, one of
            them the list of layers, each with the names of its inputs and outputs.
        self_check: whether to compare the sequence with the model's own forward, at toy size in float64.
        constants: further arguments of the forward, the same for all batches.

    Returns:
        The sequence; `nn.Sequential` runs it on one device, and `slipstream.Pipeline` on several.

    Raises:
        SlipstreamError: the plan doesn't describe what the model does. The message names the supported models.
    """
    inputs = tuple(inputs) or default_inputs(model)
    if self_check:
        check_sequence(model, inputs, plan, constants)
    return _build(model, inputs, plan, constants)


def default_inputs(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the names of a model's inputs: its main input, with masks for tokens and the decoder's tokens."""
    main = str(model.main_input_name)
    if main != "input_ids":
        return (main,)
    tokens = ("input_ids", "attention_mask")
    return (*tokens, "decoder_input_ids") if model.config.is_encoder_decoder else tokens


def check_sequence(
    model: PreTrainedModel, inputs: Sequence[str], plan: PipelinePlan | None, constants: Mapping[str, Any]
) -> None:
    """Raises SlipstreamError unless a toy of the model returns, in float64, what its sequence returns."""
    find_stacks(model, plan)
    try:
        toy = toy_of(model)
        tensors = tuple(toy_inputs(toy, inputs).values())
        with torch.no_grad():
            wanted = main_output(toy(**dict(zip(inputs, tensors, strict=True)), **constants, use_cache=False))
            found = _build(toy, tuple(inputs), plan, constants)(tensors if len(inputs) > 1 else tensors[0])
    except SlipstreamError:
        raise
    except Exception as error:
        raise refusal(model, f"a toy of it could not be run ({type(error).__name__}: {error})") from error
    if found.shape != wanted.shape or not torch.equal(found, wanted):
        raise refusal(model, "its own forward does something between the modules of its plan that the plan leaves out")


def find_stacks(model: PreTrainedModel, plan: PipelinePlan | None) -> list[LayerStack]:
    """Returns the model's stacks of layers in the order in which they run; raises SlipstreamError without a plan."""
    parts = dict(_parts(model, plan))
    if not parts:
        raise refusal(model, "neither its config nor those of its parts have a base_model_pp_plan")
    if len(parts) > 2:
        names = ", ".join(parts)
        raise refusal(model, f"it has stacks of layers in {names}; expected one, or an encoder and a decoder")
    return [_stack(model, prefix, part_plan) for prefix, part_plan in parts.items()]


def _parts(model: PreTrainedModel, plan: PipelinePlan | None) -> Iterator[tuple[str, PipelinePlan]]:
    """Yields the name and plan of each part of the model with a plan and a list of layers."""
    base = model.base_model
    if plan is not None:
        yield next(name for name, module in model.named_modules() if module is base), plan
        return
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(outer) for outer in found):
            own = module.config.base_model_pp_plan
            if own and isinstance(getattr(module, "layers", None), nn.ModuleList):
                found.append(f"{name}." if name else "")
                yield name, own


def _stack(model: PreTrainedModel, prefix: str, plan: PipelinePlan) -> LayerStack:
    names = [f"{prefix}.{name}" if prefix else name for name in plan]
    modules = dict(model.named_modules(remove_duplicate=False))
    have = [name for name in names if name in modules]
    lists = [name for name in have if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1:
        raise refusal(model, f"of the plan's modules {', '.join(names)} exactly one must be a list of layers")
    place = have.index(lists[0])
    return LayerStack(lists[0], tuple(have[:place]), tuple(have[place + 1 :]))


def _build(
    model: PreTrainedModel, inputs: tuple[str, ...], plan: PipelinePlan | None, constants: Mapping[str, Any]
) -> nn.Sequential:
    """Returns begin, layers, end; or begin, encoder's layers, middle, decoder's layers, end."""
    stacks = find_stacks(model, plan)
    trial = toy_inputs(model, inputs)
    described = {name: tensor.shape[1:] for name, tensor in trial.items()}
    tensors, behind = tuple(trial.values()), None
    sequence: dict[str, nn.Module] = {}
    for place, stack in enumerate(stacks):
        connector = StackConnector(copy_with_shared_weights(model), stacks, place, described, constants, behind)
        with torch.no_grad(), torch.random.fork_rng():
            tensors = connector(tensors)
        behind = connector.layer_calls
        sequence["middle" if place else "begin"] = connector
        name = ("encoder", "decoder")[place] if len(stacks) == 2 else "layer"
        layers = model.get_submodule(stack.layers).children()
        calls = connector.layer_calls.arguments if connector.layer_calls else ()
        sequence |= {f"{name}{i}": StackLayer(*each) for i, each in enumerate(zip(layers, calls, strict=True))}
    sequence["end"] = StackConnector(copy_with_shared_weights(model), stacks, len(stacks), described, constants, behind)
    return nn.Sequential(OrderedDict(sequence))


def refusal(model: PreTrainedModel, reason: str) -> SlipstreamError:
    return SlipstreamError(f"{type(model).__name__} can't be made a sequence of layers: {reason}. {SUPPORTED}.")


def toy_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same class with few small layers and random weights, in float64 and evaluation mode."""
    config = _shrunk(model.config)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        return type(model)(config).double().eval()


def toy_inputs(model: PreTrainedModel, names: Sequence[str]) -> dict[str, Tensor]:
    """Returns a random tensor of two rows for each name; the last tokens of the second row are padding."""
    generator = torch.Generator().manual_seed(0)
    return {name: _input(model, name, generator).to(model.device) for name in names}


def _input(model: PreTrainedModel, name: str, generator: torch.Generator) -> Tensor:
    config: Any = model.config
    if name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return torch.randn(2, config.num_channels, height, width, generator=generator).to(model.dtype)
    if name == "inputs_embeds":
        return torch.randn(2, _TOY_LENGTH, config.get_text_config().hidden_size, generator=generator).to(model.dtype)
    if name.endswith("attention_mask"):
        return (torch.arange(_TOY_LENGTH) < torch.tensor([[_TOY_LENGTH], [_TOY_LENGTH - 3]])).long()
    return torch.randint(1, config.get_text_config().vocab_size, (2, _TOY_LENGTH), generator=generator)


def _shrunk(config: PretrainedConfig) -> PretrainedConfig:
    toy: Any = toy_config(config)
    for name, value in list(vars(toy).items()):
        if isinstance(value, PretrainedConfig):
            setattr(toy, name, _shrunk(value))
    encoder = getattr(toy, "encoder", None)
    if encoder is not None and hasattr(getattr(toy, "decoder", None), "cross_attention_hidden_size"):
        toy.decoder.cross_attention_hidden_size = encoder.hidden_size
    return toy
