"""Gather the stages' weights on one rank and write them as transformers does."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from slipstream.model.stage import Stage
from slipstream.model.toy import quiet_transformers
from slipstream.pipeline.ranks import Ranks


def save_pretrained(folder: str | Path, config: PretrainedConfig, stages: list[Stage], ranks: Ranks) -> None:
    """Collective: rank 0 holds the whole model in host memory for a moment and writes config and safetensors."""
    state = gather_state(stages, ranks)
    if ranks.rank == 0:
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        with torch.device("meta"), quiet_transformers():
            skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
        with quiet_transformers():
            skeleton.save_pretrained(folder, state_dict=state)
    ranks.gather(None)  # nobody goes on before the folder is whole


def gather_state(stages: list[Stage], ranks: Ranks) -> dict[str, Tensor]:
    """The unsplit model's state by its own names, on rank 0; empty on the others."""
    own = {name: tensor.cpu() for stage in stages for name, tensor in stage.state().items()}
    if ranks.size == 1:
        return own
    specs = ranks.gather([(name, tensor.shape, tensor.dtype) for name, tensor in own.items()])
    if ranks.rank != 0:
        for tensor in own.values():
            dist.send(tensor.to(ranks.device), ranks.global_ranks[0], group=ranks.group)
        return {}
    for source in range(1, ranks.size):
        for name, shape, dtype in specs[source]:
            tensor = torch.empty(shape, dtype=dtype, device=ranks.device)
            dist.recv(tensor, ranks.global_ranks[source], group=ranks.group)
            own.setdefault(name, tensor.cpu())
    return own
