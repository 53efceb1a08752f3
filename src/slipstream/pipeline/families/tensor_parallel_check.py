"""Checks tensor parallelism before training: a toy of the architecture shared by the ranks, against the whole toy.

A plan says how weights are cut, not what the code between them reads: a size that stays whole, a norm over features
that a rank has only some of, a bias counted on every rank. Running it shows all of these.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import LostRankError, SlipstreamError
from slipstream.model import IGNORED, TOLERANCE, causal_cross_entropy, find_anatomy
from slipstream.model.toy.toy_comparison import full_precision
from slipstream.model.toy.toy_model import perturb_parameters, reference_model, toy_config, toy_tokens
from slipstream.parallel import RankGroup
from slipstream.parallel.tensor import TensorParallel, find_tensor_plan, vocabulary_cross_entropy

_INTERMEDIATE_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "n_inner",
)


def check_tensor_parallel(
    config: PretrainedConfig, given_plan: Mapping[str, str] | None, group: RankGroup, sequence: bool
) -> None:
    """Compares the loss and all gradients of the toy in float64. Collective over the tensor axis.

    Raises SlipstreamError, on every rank, that names the parameter whose gradient would be wrong, or what can't run.
    """
    try:
        with torch.random.fork_rng(devices=[]), full_precision():
            wrong = _first_wrong(config, given_plan, group, sequence)
    except (SlipstreamError, LostRankError):  # a rank that has ended says nothing about the model
        raise
    except Exception as error:  # the model's own code
        raise _refusal(config, group, f"a toy of it fails ({type(error).__name__}: {error})") from error
    found = next(filter(None, group.gather(wrong)), None)
    if found is not None:
        raise _refusal(config, group, found)


def _first_wrong(
    config: PretrainedConfig, given_plan: Mapping[str, str] | None, group: RankGroup, sequence: bool
) -> str | None:
    device = torch.device("cuda", torch.cuda.current_device()) if group.uses_nccl else torch.device("cpu")
    whole = reference_model(_toy_config(config, group.size))
    perturb_parameters(whole)  # so that a bias that is counted twice shows
    whole.to(device)
    inputs = toy_tokens(config)[:, :-1].to(device)  # an odd number of tokens, so that some are padded
    labels = inputs.masked_fill(torch.arange(inputs.shape[1], device=device) % 7 == 3, IGNORED)
    anatomy = find_anatomy(config)
    shared = copy.deepcopy(whole)
    plan = find_tensor_plan(shared, shared.config, group.size, anatomy, given_plan)
    parallel = TensorParallel(plan, group, sequence)
    parallel.shard(shared)
    parallel.install(shared, lambda: None, lambda: None)
    parallel.begin(inputs.shape[1])
    expected = _step(whole, inputs, labels, causal_cross_entropy)
    found = _step(shared, inputs, labels, vocabulary_cross_entropy(group, parallel.first_id, IGNORED))
    if not abs(found - expected) < TOLERANCE * abs(expected):
        return f"its loss differs from the whole model's by {float(abs(found - expected)):.1e}"
    return _first_wrong_gradient(whole, shared, parallel)


def _step(model: PreTrainedModel, inputs: Tensor, labels: Tensor, loss_function: Any) -> Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    total, count = loss_function(logits[:, :-1], labels[:, 1:])
    (total / count).backward()
    mean: Tensor = total.detach() / count
    return mean


def _first_wrong_gradient(whole: PreTrainedModel, shared: PreTrainedModel, parallel: TensorParallel) -> str | None:
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    floor = 1e-6 * max(gradient.abs().max() for gradient in expected.values())
    errors, parameters = {}, dict(shared.named_parameters())
    for name, gradient in expected.items():
        mine = parameters[name].grad
        found = torch.zeros_like(parameters[name]) if mine is None else mine
        if ranks := parallel.added_over(name):
            found = parallel.group.all_gather(found)[list(ranks)].sum(0)
        difference = (found - parallel.share(name).take(gradient)).abs().max()
        errors[name] = float(difference / max(gradient.abs().max(), floor))
    for name, error in errors.items():
        if not error < TOLERANCE:
            return f"the gradient of {name} differs from the whole model's by {error:.1e}"
    return None


def _toy_config(config: PretrainedConfig, tensor_ranks: int) -> PretrainedConfig:
    """Returns the toy's config with heads and features that the ranks can share.

    As many ranks have one key-value head as have it with `config`.
    """
    toy = toy_config(config)
    num_heads = config.num_attention_heads
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_size = toy.hidden_size // toy.num_attention_heads
    toy.num_attention_heads = tensor_ranks * (1 if num_key_value_heads == num_heads else 2)
    toy.hidden_size = head_size * toy.num_attention_heads
    if getattr(toy, "num_key_value_heads", None) is not None:
        is_shared = tensor_ranks % num_key_value_heads == 0 and num_key_value_heads < tensor_ranks
        toy.num_key_value_heads = num_key_value_heads if is_shared else tensor_ranks
    for name in _INTERMEDIATE_SIZES:
        if isinstance(getattr(toy, name, None), int):
            setattr(toy, name, 4 * tensor_ranks)
    return toy


def _refusal(config: PretrainedConfig, group: RankGroup, reason: str) -> SlipstreamError:
    return SlipstreamError(
        f"model_type {config.model_type!r} can't be shared by {group.size} tensor ranks: {reason}. Give a tensor_plan "
        "that leaves out what can't be cut, and gives what stays whole between cut layers the style "
        "'replicated_with_grad_allreduce'; or use a mesh with tp=1."
    )
