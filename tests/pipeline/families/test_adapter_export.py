"""What is saved of a model with an adapter has the logits that were trained, as PEFT and as transformers load it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from slipstream.model.adapters import quiet_peft
from support.adapters import SLICES, adapted, lora
from support.architectures import ARCHITECTURES, build, labels_of, tokens
from support.pipelines import make_pipe

_TARGETS: dict[str, Any] = {"target_modules": ["v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
CONFIGS = {
    "llama": ("llama", lora(modules_to_save=["lm_head"])),
    "fused experts": ("mixtral", lora(target_modules="all-linear")),
    "tied, dora": ("llama, tied", lora(use_dora=True)),
    "LoHa": ("llama", peft.LoHaConfig(r=4, **_TARGETS)),
    "LoKr": ("llama", peft.LoKrConfig(r=4, **_TARGETS)),
    "OFT": ("llama", peft.OFTConfig(r=0, oft_block_size=4, **_TARGETS)),
    "HRA": ("llama", peft.HRAConfig(r=4, **_TARGETS)),
    "IA3": (
        "llama",
        peft.IA3Config(
            target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_adapter_and_merged_model_have_the_trained_logits(name: str, tmp_path: Path) -> None:
    architecture, config = CONFIGS[name]
    base, saved, merged = (tmp_path / each for each in ("base", "adapter", "merged"))
    build(ARCHITECTURES[architecture]).save_pretrained(base)
    model = adapted(config, architecture)
    config.base_model_name_or_path = str(base)
    whole = copy.deepcopy(model)
    pipe = make_pipe(model, "zb-h1", slices=SLICES, num_ranks=2)
    pipe.step(tokens(), labels_of(tokens()))
    with torch.no_grad():
        for _, parameter in pipe.named_parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    pipe.save_pretrained(saved)
    pipe.save_pretrained(merged, merged=True)
    trained = dict(pipe.state_dict())
    whole.get_base_model().load_state_dict(trained, strict=False)  # a tied weight has one name
    with torch.no_grad(), quiet_peft():
        expected = whole(input_ids=tokens()).logits
        loaded = PeftModel.from_pretrained(build(ARCHITECTURES[architecture]), saved, autocast_adapter_dtype=False)
        found = {
            "PeftModel": loaded,
            "AutoPeftModel": AutoPeftModelForCausalLM.from_pretrained(saved, dtype=torch.float64),
            "merged": AutoModelForCausalLM.from_pretrained(merged),
        }
        for what, each in found.items():
            each.set_experts_implementation("eager")  # the only one in float64
            torch.testing.assert_close(each(input_ids=tokens()).logits, expected, rtol=1e-6, atol=1e-6, msg=what)
        assert not torch.allclose(build(ARCHITECTURES[architecture])(input_ids=tokens()).logits, expected, atol=1e-3)
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert sorted(trained) == sorted(pipe.state_dict())
    assert all(torch.equal(trained[key], now) for key, now in pipe.state_dict().items())  # merging changed nothing
