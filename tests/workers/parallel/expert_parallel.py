"""Cases of expert parallelism: experts on different ranks, between which every layer exchanges tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from slipstream import Pipeline, make_mesh
from slipstream.model.toy import perturb_parameters
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    VOCABULARY,
    build,
    gradients,
    labels_of,
    no_rounding_inside,
    unsplit_step,
)
from support.architectures import tokens as random_tokens
from support.parallel.group_cases import by_name, run_cases

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LIKE_DEEPSEEK = _COMMON | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**_COMMON, num_experts=8),
    "mixtral": ARCHITECTURES["mixtral"],
    "gpt_oss": GptOssConfig(**_COMMON, num_local_experts=4, sliding_window=7),
    "deepseek_v3": DeepseekV3Config(
        **_LIKE_DEEPSEEK | {"num_key_value_heads": 4, "head_dim": None},
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "glm4_moe": Glm4MoeConfig(**_LIKE_DEEPSEEK),
}
ROWS = 2  # of each replica
SLICES = [20, 9, 30, 5]


def model_of(name: str) -> PreTrainedModel:
    """A model with biases that aren't zero, those that correct its routers among them."""
    model = build(MODELS[name])
    perturb_parameters(model)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return model


def batch(replicas: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    inputs = random_tokens(ROWS * replicas, seed=seed)
    return inputs, labels_of(inputs)


def own(pipe: Pipeline, whole: Tensor) -> Tensor:
    return whole[ROWS * pipe.replica : ROWS * (pipe.replica + 1)]


def wrong_by(pipe: Pipeline, wanted: Mapping[str, Tensor]) -> float:
    """The largest error of this rank's parts of gradients."""
    floor = 1e-6 * max(float(each.abs().max()) for each in wanted.values())
    errors = [0.0]
    for shard in pipe.parameter_shards():
        part, grad = shard.share.take(wanted[shard.name]), shard.parameter.grad
        assert grad is not None, shard.name
        part = part[shard.first_row : shard.first_row + len(grad)]
        errors.append(float((grad - part).abs().max()) / max(float(wanted[shard.name].abs().max()), floor))
    return max(errors)


def norm_of(wanted: Mapping[str, Tensor]) -> float:
    return float(torch.sqrt(torch.stack([each.square().sum() for each in wanted.values()]).sum()))


def check_step(pipe: Pipeline, whole: PreTrainedModel, inputs: Tensor, labels: Tensor) -> None:
    """One step's loss, gradients and norm are those of the whole model in one process."""
    expected = float(unsplit_step(whole, inputs, labels))
    assert abs(float(pipe.step(own(pipe, inputs), own(pipe, labels))) - expected) < BOUND * expected
    wanted = gradients(whole)
    assert {shard.name for shard in pipe.parameter_shards()} <= wanted.keys()
    assert wrong_by(pipe, wanted) < BOUND
    norm = float(pipe.clip_grad_norm_(torch.inf))
    assert abs(norm - norm_of(wanted)) < BOUND * norm


@no_rounding_inside()
def exact(name: str, make: Callable[[], DeviceMesh], **options: Any) -> None:
    settings = {"slices": SLICES, "num_microbatches": 2, "mesh": make()} | options
    pipe = Pipeline(model_of(name), **settings)
    check_step(pipe, model_of(name), *batch(pipe.num_replicas))


def replicas(ep: int = 2) -> DeviceMesh:
    return make_mesh(dp=dist.get_world_size(), ep=ep)


def of_model(name: str) -> Callable[[], None]:
    case = partial(exact, name, replicas)
    case.__name__ = name  # type: ignore[attr-defined]
    return case


CASES = by_name(*(of_model(name) for name in MODELS))

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:])
