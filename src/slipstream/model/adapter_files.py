"""Reads an adapter that PEFT has saved, and compares it with the model that is to have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.adapters import Adapter, check_method

# PEFT saves parameters under their names with this before them.
_PREFIX = "base_model.model."


_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read_adapter_config(folder: str | Path, base: str | None = None, setting: str = "lora") -> Any:
    """Returns PEFT's configuration of an adapter in a folder, to be trained further.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        base: where the model is that the adapter is trained on from now on. None: as the folder says.
        setting: the one that gave the folder, for messages.

    Raises:
        SlipstreamError: where there is none, or it can't be trained exactly.
    """
    from peft import PeftConfig

    place = Path(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (place / name).is_file():
            raise SlipstreamError(
                f"{setting}={folder} has no {name}; give a folder that `save_pretrained` of PEFT, or a run's export "
                "(its folder `adapter/`), has written."
            )
    try:
        config = PeftConfig.from_pretrained(str(place))
    except (ValueError, TypeError, KeyError) as error:
        raise SlipstreamError(f"{place / _CONFIG} can't be read by the installed PEFT: {error}") from None
    if config.peft_type.value != "LORA":
        raise SlipstreamError(
            f"{setting}={folder} is an adapter by {config.peft_type.value}; only one by LORA can be loaded here. Load "
            "it with peft.PeftModel.from_pretrained(..., is_trainable=True), and give that model to the Pipeline."
        )
    check_method(config)
    config.inference_mode = False
    config.base_model_name_or_path = base or config.base_model_name_or_path
    return config


def saved_names(adapted: Any, adapter: Adapter) -> dict[str, str]:
    """Returns under which name PEFT saves each parameter of an adapter, by the names in the model inside `adapted`, a
    whole PeftModel that may be on the meta device."""
    from peft.utils import get_peft_model_state_dict

    state = adapted.state_dict(keep_vars=True)
    name = adapter.name
    saved = get_peft_model_state_dict(adapted, state_dict=state, adapter_name=name, save_embedding_layers=False)
    by_tensor = {id(tensor): key for key, tensor in saved.items()}
    named = adapted.get_base_model().named_parameters(remove_duplicate=False)
    return {name: by_tensor[id(parameter)] for name, parameter in named if id(parameter) in by_tensor}


def check_saved_weights(folder: str | Path, adapted: Any, adapter: Adapter) -> None:
    """Raises SlipstreamError unless a folder's weights are those of the adapter of a whole model, by name and shape."""
    names = saved_names(adapted, adapter)
    base = adapted.get_base_model()
    expected = {key: tuple(base.get_parameter(name).shape) for name, key in names.items()}
    with _opened(folder) as saved:
        shapes = {key: tuple(saved.get_slice(key).get_shape()) for key in saved.keys()}  # noqa: SIM118
    ends = {_PREFIX + name: tuple(base.get_parameter(name).shape) for name in _base_weights_of_ends(base)}
    expected |= {key: shape for key, shape in ends.items() if key in shapes}
    for problem, keys in {
        "lacks": expected.keys() - shapes.keys(),
        "has in addition": shapes.keys() - expected.keys(),
        "has in another shape": {key for key in expected.keys() & shapes.keys() if expected[key] != shapes[key]},
    }.items():
        if keys:
            raise SlipstreamError(
                f"{Path(folder) / _WEIGHTS} isn't an adapter of this model: it {problem} {min(keys)}. Give the "
                "model that the adapter was trained on."
            )


def load_saved_weights(folder: str | Path, model: nn.Module, names: Mapping[str, str]) -> None:
    """Fills the adapter's parameters that a part of a model has; `names` are those of `saved_names`. PEFT saves the
    weights that an embedding and a head with an adapter had, and loads them, too."""
    with _opened(folder) as saved, torch.no_grad():
        every = set(saved.keys())
        for name, parameter in model.named_parameters():
            key = names.get(name, _PREFIX + name)
            if key in every:
                parameter.copy_(saved.get_tensor(key))


def saves_ends(model: PreTrainedModel) -> bool:
    """Returns whether PEFT saves the weights beneath adapters of the embedding and of the head: where these have the
    names that it knows."""
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    return any(name.split(".")[-3] in EMBEDDING_LAYER_NAMES for name in _base_weights_of_ends(model))


def _base_weights_of_ends(model: PreTrainedModel) -> list[str]:
    """Returns the names of the weights beneath adapters of the embedding and of the head."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if hasattr(end, "base_layer")]
    modules = ((name, module) for name, module in model.named_modules() if any(module is end for end in ends))
    return [
        f"{name}.base_layer.{parameter}"
        for name, module in modules
        for parameter, _ in module.base_layer.named_parameters()
    ]


def _opened(folder: str | Path) -> Any:
    file = Path(folder) / _WEIGHTS
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(f"{file} is corrupt or truncated ({error}); copy or download it again.") from error
