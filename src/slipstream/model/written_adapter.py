"""Writes a trained adapter as PEFT reads it, or merges it into the weights beneath."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.adapter_files import saves_ends
from slipstream.model.adapters import Adapter
from slipstream.model.added_adapter import adapted_model, quiet_peft
from slipstream.model.loading import meta_model
from slipstream.model.quantised import round_to_4_bits
from slipstream.model.tensors import tied_names


def write_adapter(folder: str | Path, config: PretrainedConfig, adapter: Adapter, state: Mapping[str, Tensor]) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained` reads them.

    Raises SlipstreamError where the state isn't that of the adapted model.
    """
    from peft.utils import get_peft_model_state_dict

    model = _filled(config, adapter, state)
    ends: dict[str, bool] = {"save_embedding_layers": saves_ends(model.get_base_model())}
    adapter_state = get_peft_model_state_dict(model, adapter_name=adapter.name, **ends)
    on_host = {name: tensor.detach().cpu() for name, tensor in adapter_state.items()}
    try:
        model.save_pretrained(folder, selected_adapters=[adapter.name], **ends)
        place = Path(folder) if adapter.name == "default" else Path(folder, adapter.name)
        _check_file(place / "adapter_model.safetensors", on_host)
    # safetensors raises this for errors of the disk.
    except SafetensorError as error:
        raise OSError(str(error)) from error


def merged_state(config: PretrainedConfig, adapter: Adapter, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of the model without adapters, whose weights have them added. `state` stays as it is.

    Raises SlipstreamError where the state isn't that of the adapted model, and for weights that aren't finite.
    """
    try:
        merged = _filled(config, adapter, state).merge_and_unload(safe_merge=True)
    except ValueError as error:
        # Some weights aren't finite, or the method can't be merged.
        raise SlipstreamError(f"the adapter can't be merged into the model: {error}") from error
    return {name: tensor.detach() for name, tensor in merged.state_dict().items()}


def merged_with_base(model: PreTrainedModel, adapter: Adapter, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of a model, which it takes over, with the trained weights of an adapter merged into it; where
    the adapter is one of weights in 4 bits, into the values that these stand for.

    Raises SlipstreamError where these aren't the adapter's.
    """
    from peft import get_peft_model

    if adapter.on_4_bits:
        round_to_4_bits(model)
    with quiet_peft():
        adapted: Any = get_peft_model(model, copy.deepcopy(adapter.config), autocast_adapter_dtype=False)
    named = adapted.get_base_model().named_parameters()
    # with bias="all" PEFT trains biases that a copy has replaced, too
    expected = {name for name, parameter in named if parameter.requires_grad and ".original_module." not in name}
    if other := sorted(expected ^ trained.keys()):
        raise SlipstreamError(f"the checkpoint's weights aren't those of its adapter: {other[0]} is in one of the two.")
    adapted.get_base_model().load_state_dict(dict(trained), strict=False)
    return {name: tensor.detach() for name, tensor in adapted.merge_and_unload().state_dict().items()}


def _filled(config: PretrainedConfig, adapter: Adapter, state: Mapping[str, Tensor]) -> Any:
    """Returns the whole model with its adapter, over the tensors of a state."""
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    whole = meta_model(config, dtype)
    filled = dict(state)
    for names in tied_names(whole):
        present = [name for name in names if name in state]
        filled |= dict.fromkeys(names, state[present[0]]) if present else {}
    model = adapted_model(whole, adapter)
    base = model.get_base_model()
    result = base.load_state_dict(filled, strict=False, assign=True)
    lacking = [name for name in result.missing_keys if base.get_parameter(name).is_meta]
    if lacking or result.unexpected_keys:
        what = f"lacks {lacking[0]}" if lacking else f"has in addition {result.unexpected_keys[0]}"
        raise SlipstreamError(f"the weights aren't those of the model with its adapter {adapter.name!r}: it {what}.")
    base.tie_weights()
    return model.eval()


def _check_file(file: Path, expected: Mapping[str, Tensor]) -> None:
    """Raises SlipstreamError unless the file has the expected tensors, to the bit."""
    try:
        with safe_open(file, framework="pt") as written:
            names = set(written.keys())
            same = names == expected.keys() and all(
                torch.equal(written.get_tensor(name), tensor) for name, tensor in expected.items()
            )
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(f"{file} was written, but can't be read back: {error}. Check the disk.") from error
    if not same or not expected:
        raise SlipstreamError(f"{file} doesn't hold the adapter that was trained. Check the disk.")
