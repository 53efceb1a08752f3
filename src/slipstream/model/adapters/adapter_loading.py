"""Adds an adapter to the part of a model that a rank has, with weights that don't depend on which part that is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.adapters.adapter_check import Adapter
from slipstream.model.hooks import keyed_seed


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silences the warning about what PEFT reads of models of transformers, which these call deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def targeted_modules(whole: PreTrainedModel, config: Any) -> list[str]:
    """Returns the names of the modules that get an adapter. `whole` is changed; it may be on the meta device.

    Raises SlipstreamError where there is none, or PEFT refuses the configuration.
    """
    import peft

    try:
        peft.inject_adapter_in_model(copy.deepcopy(config), whole, low_cpu_mem_usage=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        linear = sorted({name.rpartition(".")[2] for name, each in whole.named_modules() if hasattr(each, "weight")})
        raise SlipstreamError(
            f"the adapter can't be added to {type(whole).__name__}: {error} The model's modules with weights are "
            f"{', '.join(linear)}; or give target_modules=all-linear."
        ) from None
    return [name for name, module in whole.named_modules() if hasattr(module, "lora_A")]


def adapted_model(model: PreTrainedModel, adapter: Adapter) -> Any:
    """Returns PEFT's model around a whole model, which it takes over and which may be on the meta device."""
    from peft import get_peft_model

    settings = {"adapter_name": adapter.name, "autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
    with quiet_peft():
        return get_peft_model(model, copy.deepcopy(adapter.config), **settings)


def add_adapter(model: PreTrainedModel, whole: PreTrainedModel, config: Any, seed: int) -> None:
    """Adds an adapter by LoRA to what there is of a model, in place, and freezes the rest.

    Each module's adapter is drawn by the seed and the module's name, so that any cut of the model gives the same.
    `whole` is the model on the meta device, which is changed.
    """
    import peft

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    here = {name for name, module in model.named_modules() if next(module.parameters(), None) is not None}
    targets = [name for name in targeted_modules(whole, config) if name in here]
    if not targets:
        return
    own = copy.deepcopy(config)
    own.target_modules = set(targets)
    own.exclude_modules = own.layers_to_transform = own.layers_pattern = None  # targets are those that remain
    with quiet_peft():
        peft.get_peft_model(model, own, autocast_adapter_dtype=False)
    for name in targets:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_seed(seed, name))
            model.get_submodule(name).reset_lora_parameters("default", config.init_lora_weights)
