"""Adds an adapter to a model or a part of one, the same in every cut."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import keyed_seed
from slipstream.model.adapter_files import load_saved_weights, saved_names
from slipstream.model.adapters import ORTHOGONAL, Adapter, check_tied


class Targets(NamedTuple):
    """The modules that get an adapter, by their names in the model that has it."""

    modules: list[str]  # names of modules with factors
    parameters: dict[str, str]  # names of fused weights with factors -> names of their modules
    copies: list[str]  # modules with a trained copy
    config: Any  # PEFT's config; fused experts are named by their parameters
    saved: dict[str, str]  # parameter -> its name in PEFT's files


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silences warnings of an attribute of models that PEFT reads, and of patterns of fused weights, which it looks for
    among modules before weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        yield


def find_targets(whole: PreTrainedModel, config: Any) -> Targets:
    """Returns the modules that get an adapter. `whole` is changed; it may be on the meta device.

    Raises SlipstreamError where there is nothing, where PEFT refuses the configuration, and for a tied weight.
    """
    linear = sorted({name.rpartition(".")[2] for name, module in whole.named_modules() if hasattr(module, "weight")})
    modules = [name for name, _ in whole.named_modules()]
    for pattern in config.modules_to_save or ():
        # PEFT looks for the ends of names.
        if not any(name.endswith(pattern) for name in modules):
            raise SlipstreamError(
                f"modules_to_save: the model has no module {pattern!r}. Its modules with weights are "
                f"{', '.join(linear)}."
            )
    try:
        with warnings.catch_warnings():
            # This warning is about a case that is refused below.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            adapted = adapted_model(whole, adapter := Adapter("default", config))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise SlipstreamError(
            f"the adapter can't be added to {type(whole).__name__}: {error} The model's modules with weights are "
            f"{', '.join(linear)}; or give target_modules=all-linear."
        ) from None
    check_tied(whole)
    targets = Targets([], {}, [], adapted.peft_config["default"], saved_names(adapted, adapter))
    for name, module in whole.named_modules():
        if hasattr(module, "parameter_name"):
            targets.parameters[name] = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        elif hasattr(module, "lora_A"):
            targets.modules.append(name)
        elif hasattr(module, "modules_to_save"):
            targets.copies.append(name)
    return targets


def adapted_model(model: PreTrainedModel, adapter: Adapter) -> Any:
    """Returns PEFT's model around a whole model, which it takes over and which may be on the meta device."""
    from peft import get_peft_model

    config = copy.deepcopy(adapter.config)
    # PEFT takes the name from the model, and warns where another was in the configuration.
    model.name_or_path = config.base_model_name_or_path or ""
    config.base_model_name_or_path = model.name_or_path or None
    settings = {"adapter_name": adapter.name, "autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
    with quiet_peft():
        return get_peft_model(model, config, **settings)


def add_adapter(
    model: PreTrainedModel, whole: PreTrainedModel, config: Any, seed: int, saved: str | Path | None = None
) -> None:
    """Adds an adapter by LoRA to a model or a part of one, in place, and freezes the rest.

    Each module's adapter is drawn by the seed and the module's name, so that any cut of the model gives the same; or it
    is read from the folder `saved`. `whole` is the model on the meta device, which is changed.
    """
    here = {name for name, module in model.named_modules() if next(module.parameters(), None) is not None}
    targets = find_targets(whole, config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    modules = [name for name in targets.modules if name in here]
    weights = {name: weight for name, weight in targets.parameters.items() if name.replace(".base_layer", "") in here}
    if modules or weights:
        _add_factors(model, targets.config, modules, sorted(weights.values()))
    for name in [*modules, *weights]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_seed(seed, name))
            _draw(model.get_submodule(name), config.init_lora_weights)
    for name in targets.copies:
        if name in here:
            _train_copy(model, name)
    if config.bias == "all":
        _train_biases(model)
    if saved is not None:
        load_saved_weights(saved, model, targets.saved)


def _draw(module: Any, init: bool | str) -> None:
    """Draws a module's factors. Those of an embedding have one distribution, whatever the linear layers' is."""
    if init == ORTHOGONAL and "default" in module.lora_A:
        module.orthogonal_init("default")
    else:
        module.reset_lora_parameters("default", init)


def _add_factors(model: PreTrainedModel, config: Any, modules: list[str], weights: list[str]) -> None:
    import peft

    part = copy.deepcopy(config)
    part.target_modules = set(modules)
    part.target_parameters = weights or None
    # The targets are named one by one, so nothing is left to exclude.
    part.exclude_modules = part.layers_to_transform = part.layers_pattern = None
    part.modules_to_save = None
    with quiet_peft():
        peft.get_peft_model(model, part, autocast_adapter_dtype=False)


def _train_biases(model: PreTrainedModel) -> None:
    """Trains every bias, as PEFT does, but those of modules beside which a copy is trained: these aren't used."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") and ".original_module." not in name:
            parameter.requires_grad_(True)


def _train_copy(model: PreTrainedModel, name: str) -> None:
    """Puts a trained copy beside a module, by itself: PEFT refuses names of modules that a rank doesn't have."""
    from peft.utils import ModulesToSaveWrapper

    parent, _, child = name.rpartition(".")
    wrapper: nn.Module = ModulesToSaveWrapper(model.get_submodule(name), "default")
    for parameter in wrapper.get_submodule("modules_to_save").parameters():
        parameter.requires_grad_(True)
    setattr(model.get_submodule(parent), child, wrapper)
