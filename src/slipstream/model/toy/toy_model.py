"""Builds an architecture at toy size, for the self-checks and to see in which order its parts run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from slipstream.model.hooks.length_dependent_rope import keep_frequencies
from slipstream.model.toy.toy_comparison import REFERENCE_ATTENTION
from slipstream.model.toy.toy_sizes import (
    shrink_layers,
    shrink_number,
    shrink_other_parts,
    shrink_widths,
    take_layer_overrides,
    token_numbers,
    width_of,
)

TOY_LENGTH = 48  # tokens; every threshold of the architecture is brought below it


def toy_config(config: PretrainedConfig, shrinks_numbers: bool = True) -> PretrainedConfig:
    """Returns `config` with few small layers of every kind it has, and windows and rope thresholds below TOY_LENGTH.

    Head size, rope type and all switches stay as they are, and without `shrinks_numbers` all windows and blocks.
    """
    whole = copy.deepcopy(config)
    toy = whole.get_text_config()
    overrides = take_layer_overrides(toy)
    width = width_of(toy)
    shrink_widths(toy, overrides)
    overrides = shrink_layers(toy, overrides)
    for fields in (toy, *overrides.values()) if shrinks_numbers else ():
        for number in token_numbers(fields, TOY_LENGTH):
            if number.is_known:
                shrink_number(fields, number)
    _shrink_positions(toy)
    shrink_other_parts(whole, toy, width)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if getattr(toy, name, None) is not None:
            setattr(toy, name, 0)
    if getattr(toy, "rescale_every", 0):  # RWKV's: it would halve the toy's own weights, before stages take them
        toy.rescale_every = 0
    if overrides:
        toy.per_layer_config = overrides
    toy.use_cache = whole.use_cache = False
    if getattr(toy, "output_router_logits", False):  # for a loss that isn't run, and fails without a layer's experts
        toy.output_router_logits = False
    return whole


def toy_model(config: PretrainedConfig) -> PreTrainedModel:
    """Returns a reference model of the architecture at toy size, with eager attention where it takes no other."""
    try:
        return reference_model(toy_config(config))
    except KeyError as error:
        if REFERENCE_ATTENTION not in str(error):
            raise
        return reference_model(toy_config(config), attention="eager")


def shapes_model(config: PretrainedConfig) -> PreTrainedModel:
    """Returns the whole model on the meta device, which takes no memory and computes shapes alone."""
    with torch.device("meta"):
        model = reference_model(config, experts="batched_mm")  # the products of which depend on no number
    keep_frequencies(model)
    return model


def reference_model(
    config: PretrainedConfig, attention: str | None = REFERENCE_ATTENTION, experts: str = "eager"
) -> PreTrainedModel:
    """Returns a model in float64 on the CPU, with the model's own eager attention, in evaluation mode.

    Some models do more than attend where the implementation is called "eager", such as selecting keys: give that name
    to compare with what they compute, leave it out to see which modules attend, and give None for the config's own.
    """
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # from_config writes the dtype into it
            dtype=torch.float64,  # of the parameters; rope's tables stay float32, and routers that are made so
            attn_implementation=attention,
            experts_implementation=experts,  # grouped matrix products don't support float64
        )
    widen_parameters(model)
    return model.eval()


def widen_parameters(model: nn.Module) -> None:
    """Makes float64 of parameters that some models make in float32 whatever the dtype is, such as those of routers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.double()


def perturb_parameters(model: nn.Module) -> None:
    """Adds a little noise to every parameter: initial scales of 1 and biases of 0 would hide mistakes."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)  # in float32: five times as fast
            parameter.add_(noise, alpha=0.1)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppresses transformers' messages and progress bars about steps the user did not ask for."""
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def toy_tokens(config: PretrainedConfig, length: int = TOY_LENGTH) -> torch.Tensor:
    """Returns random token ids (2, length) for a toy of `config`."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = toy_config(config).get_text_config().vocab_size
    return torch.randint(1, vocabulary, (2, length), generator=generator)


def _shrink_positions(toy: PretrainedConfig) -> None:
    """Lets rope types that change beyond a trained length change within the toy: after its first slice."""
    threshold = TOY_LENGTH // 2
    rope = getattr(toy, "rope_parameters", None) or {}
    for parameters in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if "original_max_position_embeddings" in parameters:
            parameters["original_max_position_embeddings"] = threshold
        if parameters.get("rope_type") == "dynamic":
            toy.max_position_embeddings = threshold
    if hasattr(toy, "original_max_position_embeddings"):
        toy.original_max_position_embeddings = threshold
