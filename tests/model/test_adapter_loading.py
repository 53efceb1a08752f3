"""An adapter that each rank adds to its own layers is that of the whole model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

from slipstream import SlipstreamError
from slipstream.model import ModelEnd, find_anatomy, meta_model
from slipstream.model.adapters import add_adapter, quiet_peft
from slipstream.model.loading import pretrained_model
from support.adapters import lora
from support.architectures import ARCHITECTURES, build

ADAPTERS = {
    "fused experts": ("mixtral", lora(target_modules="all-linear")),
    "copies of both ends": ("llama", lora(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])),
    "all biases": ("gpt2", lora(target_modules=["c_attn"], layers_to_transform=[1], bias="all", fan_in_fan_out=True)),
    "one layer and a copy": (
        "llama",
        lora(target_modules=["q_proj"], layers_to_transform=[1], modules_to_save=["model.norm"]),
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_parts_of_a_model_get_what_the_whole_gets(name: str, tmp_path: Path) -> None:
    config, adapter = ARCHITECTURES[ADAPTERS[name][0]], ADAPTERS[name][1]
    build(config).save_pretrained(tmp_path)
    anatomy = find_anatomy(config)

    def trained(parts: list[Any]) -> dict[str, torch.Tensor]:
        model = pretrained_model(str(tmp_path), config, anatomy, parts, torch.float64)
        add_adapter(model, meta_model(config), copy.deepcopy(adapter), seed=3)
        return {key: each for key, each in model.named_parameters() if each.requires_grad}

    whole = trained([ModelEnd.EMBEDDING, 0, 1, 2, 3, ModelEnd.HEAD])
    cut = [trained([ModelEnd.EMBEDDING, 0, 1]), trained([2, 3, ModelEnd.HEAD])]
    assert whole
    assert sorted(whole) == sorted(key for part in cut for key in part)
    assert all(torch.equal(whole[key], each) for part in cut for key, each in part.items())
    with quiet_peft():
        own = get_peft_model(build(config), copy.deepcopy(adapter), autocast_adapter_dtype=False).get_base_model()
    assert sorted(whole) == sorted(name for name, each in own.named_parameters() if each.requires_grad)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"modules_to_save": ["lm_haed"]}, r"no module 'lm_haed'.*lm_head"),
        ({"target_modules": ["q_prj"]}, r"q_prj.*q_proj"),
    ],
)
def test_names_that_match_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    config = ARCHITECTURES["llama"]
    with pytest.raises(SlipstreamError, match=said):
        add_adapter(meta_model(config), meta_model(config), lora(**changes), 0)


def test_a_copy_of_a_tied_weight_is_refused() -> None:
    config = ARCHITECTURES["llama, tied"]
    with pytest.raises(SlipstreamError, match=r"shares its weight with"):
        add_adapter(meta_model(config), meta_model(config), lora(modules_to_save=["lm_head"]), 0)
