"""What holds of adapters in models that are shared by the processes of a group: each case runs in all of them."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream import SlipstreamError
from slipstream.model.adapters import adapter_dropouts
from slipstream.parallel import RankGroup
from support.architectures import BOUND, gradient_error
from support.parallel.shared_models import Shared, batch, whole_model, whole_step

_ROWS_TOO: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "task_type": "CAUSAL_LM"}
_ENDS = ["lm_head", "embed_tokens"]


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes)


ADAPTERS = {  # by name: the model, and its adapter
    "all linear layers": ("llama", lora(use_rslora=True)),
    "DoRA": ("llama", lora(use_dora=True)),
    "DoRA of both ends": ("llama", lora(use_dora=True, target_modules=["o_proj", *_ENDS])),
    "both ends": ("llama", lora(target_modules=["q_proj", *_ENDS])),
    "trained copies": ("llama", lora(modules_to_save=[*_ENDS, "norm", "down_proj"], target_modules=["k_proj"])),
    "transposed and packed": ("gpt2", lora(target_modules=["c_attn", "c_proj"], bias="all", fan_in_fan_out=True)),
    "DoRA, transposed": ("gpt2", lora(target_modules=["c_attn", "c_proj"], use_dora=True, fan_in_fan_out=True)),
    "biases": (
        "starcoder2, biases",
        lora(bias="lora_only", modules_to_save=["c_proj"], target_modules=["q_proj", "o_proj"]),
    ),
    "biases of columns": ("starcoder2, biases", lora(lora_bias=True, target_modules=["q_proj", "c_fc"])),
    "beside experts": ("qwen2_moe, a dense layer", lora()),
    "norms of heads": ("qwen3_moe", lora(target_modules=["q_proj", "k_proj", "o_proj"])),
    "IA3": ("llama", peft.IA3Config(feedforward_modules=["down_proj", "q_proj"], **_ROWS_TOO)),
    "LoHa": ("llama", peft.LoHaConfig(r=4, **_ROWS_TOO)),
}


def adapted(model: PreTrainedModel, config: peft.PeftConfig) -> PreTrainedModel:
    """The model with an adapter whose weights are all drawn."""
    inside: PreTrainedModel = peft.get_peft_model(model, config, autocast_adapter_dtype=False).get_base_model().double()
    generator = torch.Generator().manual_seed(1)
    for parameter in inside.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return inside


def compare(name: str, group: RankGroup) -> None:
    """Loss and gradients are the whole model's, over tokens that all ranks have or that are spread, and with weight
    gradients that wait."""
    of, config = ADAPTERS[name]
    whole = adapted(whole_model(of), config)
    inputs, labels = batch()
    expected_loss, expected = whole_step(whole, inputs, labels)
    for sequence, defers in ((False, False), (False, True), (True, True)):
        shared = Shared(whole, group, sequence)
        loss = shared.step(inputs, labels, defers)
        assert abs(loss - expected_loss) < BOUND, f"{name}, {sequence}, {defers}: the loss"
        found = shared.gradients()
        assert found.keys() == expected.keys()
        error = gradient_error(expected, found)
        assert error < BOUND, f"{name}, sequence={sequence}, defers={defers}: {error}"


def what_cannot_be_cut_is_refused(group: RankGroup) -> None:
    for of, config, said in (
        ("qwen3_moe", lora(), "tensor ranks share these experts, whose adapter they can't"),
        ("gpt2", lora(lora_bias=True, target_modules=["c_proj"], fan_in_fan_out=True), "would count the bias of"),
        ("llama", lora(target_modules=["q_proj"], modules_to_save=["mlp"]), "name those parts in its place"),
        ("starcoder2, biases", peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[]), "IA3 scales"),
    ):
        with pytest.raises(SlipstreamError, match=said):
            Shared(adapted(whole_model(of), config), group)


def dropout_is_that_of_the_whole_input(group: RankGroup) -> None:
    """A column's dropout, of an input that all ranks have, is equal on all; a row's, of each rank's features, isn't."""
    whole = adapted(whole_model("llama"), lora(lora_dropout=0.5))
    for sequence in (False, True):
        number = [0]

        def seed(rank: int, number: list[int] = number) -> None:
            number[0] += 1
            torch.manual_seed(1000 * number[0] + rank)

        shared = Shared(whole, group, sequence, lambda: seed(group.rank), lambda: seed(99))
        shared.model.train()
        dropped: dict[str, Tensor] = {}
        for name, module in shared.model.named_modules():
            for dropout in adapter_dropouts(module):
                dropout.register_forward_hook(_keep(dropped, name))
        torch.manual_seed(group.rank)
        shared.loss(*batch())
        assert len(dropped) == 7 * 2
        for name, mine in dropped.items():
            agree = all(torch.equal(mine, other) for other in group.gather(mine))
            assert agree is not name.endswith(("o_proj", "down_proj")), (name, sequence)


def _keep(dropped: dict[str, Tensor], name: str) -> Any:
    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        dropped[name] = output.detach() == 0

    return keep
