"""Small models, whole and shared by the processes of a group, and the gradients of both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Glm4Config,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from slipstream.model import IGNORED, causal_cross_entropy, find_anatomy, meta_model
from slipstream.model.adapted_modules import is_wrapper
from slipstream.model.weight_gradients import add_weight_gradients_in_place, defer_weight_gradients
from slipstream.parallel import RankGroup
from slipstream.parallel.tensor import TensorParallel, adapted_plan, find_tensor_plan, vocabulary_cross_entropy
from support.architectures import ARCHITECTURES, VOCABULARY, build, labels_of, llama

LENGTH = 23  # which neither 2 nor 4 divides
BATCH = 2
_SMALL = {key: value for key, value in vars(ARCHITECTURES["llama"]).items() if key in ("hidden_size", "head_dim")} | {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def _two_layers(config: PretrainedConfig) -> PretrainedConfig:
    config = copy.deepcopy(config)
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


CONFIGS: dict[str, PretrainedConfig] = {
    name: _two_layers(ARCHITECTURES[name])
    for name in ("llama", "llama, tied", "qwen3", "gpt2", "mixtral", "gemma2", "gemma3", "gpt_neox", "olmo2")
} | {
    "phi3": _two_layers(ARCHITECTURES["phi3, longrope"]),
    "llama, biases": _two_layers(llama(attention_bias=True, mlp_bias=True)),
    "llama, padding": _two_layers(llama(pad_token_id=40)),
    "llama, as many keys as queries": _two_layers(llama(num_key_value_heads=4)),
    "gemma2, tied, one key head": Gemma2Config(**_SMALL | {"num_key_value_heads": 1}, query_pre_attn_scalar=8),
    "qwen2_moe, a dense layer": Qwen2MoeConfig(
        **_SMALL, **_EXPERTS, shared_expert_intermediate_size=16, mlp_only_layers=[1]
    ),
    "qwen3_moe": Qwen3MoeConfig(**_SMALL, **_EXPERTS),
    "glm4": Glm4Config(**_SMALL),
    "starcoder2, biases": Starcoder2Config(**{k: v for k, v in _SMALL.items() if k != "head_dim"}, use_bias=True),
}
OPT = OPTConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)


class Shared:
    """A copy of a whole model, of which this process has its share."""

    def __init__(
        self,
        whole: PreTrainedModel,
        group: RankGroup,
        sequence: bool = False,
        enter: Callable[[], None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
        given: Mapping[str, str] | None = None,
        installs: bool = True,
    ) -> None:
        self.model = copy.deepcopy(whole)
        anatomy = find_anatomy(whole.config)
        plan = find_tensor_plan(meta_model(whole.config), whole.config, group.size, anatomy, given)
        if any(map(is_wrapper, self.model.modules())):
            plan = adapted_plan(plan, self.model)
        self.parallel = TensorParallel(plan, group, sequence)
        self.parallel.shard(self.model)
        if installs:
            self.parallel.install(self.model, enter, leave)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.parallel.begin(inputs.shape[1])
        logits = self.model(input_ids=inputs, use_cache=False).logits
        loss = vocabulary_cross_entropy(self.parallel.group, self.parallel.first_id, IGNORED)
        total, count = loss(logits[:, :-1], labels[:, 1:])
        return total / count

    def step(self, inputs: Tensor, labels: Tensor, defers: bool) -> Tensor:
        """Forward and backward; weight gradients by autograd, or in place and deferred."""
        if defers:
            add_weight_gradients_in_place(self.model)
        with defer_weight_gradients() if defers else nullcontext([]) as work:
            loss = self.loss(inputs, labels)
            loss.backward()
        for each in work:
            each()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Of the whole model, put together from what all processes have; each place must be covered."""
        parallel, mine = self.parallel, {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None, name
            ranks = parallel.added_over(name)
            gathered = parallel.group.all_gather(parameter.grad) if ranks else None
            total = parameter.grad if gathered is None else gathered[list(ranks)].sum(0)
            mine[name] = parallel.share(name), total
        found: dict[str, Tensor] = {}
        for theirs in reversed(parallel.group.gather(mine)):  # the first copy is the one that stays
            for name, (share, total) in theirs.items():
                found.setdefault(name, torch.full(share.shape, torch.nan, dtype=total.dtype))
                share.put(total, found[name])
        for name, (share, total) in mine.items():
            assert torch.allclose(share.take(found[name]), total, rtol=1e-9, atol=1e-15), f"copies of {name} differ"
        return found


def whole_model(name: str, **changes: object) -> PreTrainedModel:
    """Moved off the biases of 0 and scales of 1 that would hide mistakes."""
    config = copy.deepcopy(OPT if name == "opt" else CONFIGS[name])
    for key, value in changes.items():
        setattr(config, key, value)
    model = build(config, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
    return model


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(4))
    return inputs, labels_of(inputs)


def whole_step(model: PreTrainedModel, inputs: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    total, count = causal_cross_entropy(model(input_ids=inputs, use_cache=False).logits[:, :-1], labels[:, 1:])
    (total / count).backward()
    return total.detach() / count, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
