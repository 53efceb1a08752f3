"""Small mixtures of experts, and the whole model's step with the load-balancing loss of each layer by itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import GraniteMoeConfig, PretrainedConfig, PreTrainedModel, Qwen2MoeConfig

from slipstream.model import causal_cross_entropy
from slipstream.model.toy import perturb_parameters
from support.architectures import ARCHITECTURES, VOCABULARY, build
from support.hybrids import HYBRIDS

COEFFICIENT = 0.5  # so that the loss counts
MIXTURES: dict[str, PretrainedConfig] = {
    "qwen2_moe, a dense layer": Qwen2MoeConfig(**ARCHITECTURES["qwen2_moe"].to_diff_dict() | {"mlp_only_layers": [1]}),
    "mixtral": ARCHITECTURES["mixtral"],
    "qwen3_next": HYBRIDS["qwen3_next"],
    "jamba": HYBRIDS["jamba"],
    "gpt_oss": ARCHITECTURES["gpt_oss"],
    "granitemoe": GraniteMoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}


def mixture(name: str) -> PreTrainedModel:
    config = copy.deepcopy(MIXTURES[name])
    config.output_router_logits, config.router_aux_loss_coef = True, COEFFICIENT
    model = build(config).double()
    perturb_parameters(model)
    model.router_aux_loss_coef = COEFFICIENT
    return model


def switch_loss(logits: Tensor, top_k: int) -> Tensor:
    """Equations 4 to 6 of the paper, of one layer's logits (tokens, experts)."""
    num_experts = logits.shape[-1]
    chances = logits.softmax(-1)
    choices = one_hot(chances.topk(top_k).indices, num_experts).sum(1).to(chances.dtype)
    return num_experts * (choices.mean(0) * chances.mean(0)).sum()


def unsplit_step(model: PreTrainedModel, batches: list[tuple[Tensor, Tensor]]) -> None:
    """The gradients of the microbatches' tokens and labels, each loss weighted by its labels that count.

    With replicas these are the microbatches of all.
    """
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
    for inputs, labels in batches:
        output = model(input_ids=inputs, use_cache=False, output_router_logits=True)
        total, valid = causal_cross_entropy(output.logits[:, :-1], labels[:, 1:])
        added = [switch_loss(each.flatten(0, -2), model.num_experts_per_tok) for each in output.router_logits]
        (total / count + int(valid) / count * COEFFICIENT * torch.stack(added).mean()).backward()
