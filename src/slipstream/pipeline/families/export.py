"""Gather the stages' weights on one rank and write them as transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from slipstream.model import meta_model
from slipstream.model.toy import quiet_transformers
from slipstream.parallel import ParameterShare
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.ranks import Ranks
from slipstream.pipeline.stage import Stage


def save_pretrained(folder: str | Path, config: PretrainedConfig, state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Writes config and safetensors on the leader, which has the whole model's state. Collective."""
    if ranks.leads:
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        with quiet_transformers():
            meta_model(config, dtype).save_pretrained(folder, state_dict=dict(state))
    ranks.world.barrier()  # no rank continues before the folder is complete


@dataclass(frozen=True)
class _Part:
    """The part of one tensor of the model's state that a rank has."""

    name: str
    share: ParameterShare
    shape: torch.Size
    dtype: torch.dtype


def gather_state(stages: list[Stage], ranks: Ranks, parameters: Parameters) -> dict[str, Tensor]:
    """Returns the unsplit model's state by its names on the leader, an empty dict on the others. Collective."""
    own = {name: _whole(tensor) for stage in stages for name, tensor in stage.state().items()}
    parts = [
        _Part(
            name, parameters.shares.get(name) or ParameterShare.whole(tuple(tensor.shape)), tensor.shape, tensor.dtype
        )
        for name, tensor in own.items()
    ]
    mine = [part for part in parts if ranks.data.rank == 0 and part.share.copy == 0]
    others = ranks.world.gather(mine)
    if not ranks.leads:
        for part in mine:
            tensor = own[part.name].to(ranks.device).contiguous()
            dist.send(tensor, ranks.world.global_ranks[0], ranks.world.process_group)
        return {}
    whole: dict[str, Tensor] = {}
    for source, sent in enumerate(others):
        for part in sent:
            tensor = own[part.name] if source == 0 else _received(part, source, ranks)
            _put(part, tensor.cpu(), whole)
    return whole


def _whole(tensor: Tensor) -> Tensor:
    """Collective over the replicas where the tensor is spread over them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _received(part: _Part, source: int, ranks: Ranks) -> Tensor:
    tensor = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
    dist.recv(tensor, ranks.world.global_ranks[source], ranks.world.process_group)
    return tensor


def _put(part: _Part, tensor: Tensor, whole: dict[str, Tensor]) -> None:
    if part.share.is_whole:
        whole.setdefault(part.name, tensor)
        return
    if part.name not in whole:
        whole[part.name] = torch.empty(part.share.shape, dtype=part.dtype)
    part.share.put(tensor, whole[part.name])
