"""Gathers the stages' weights on one rank and writes them as transformers does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from slipstream.model import meta_model
from slipstream.model.toy import quiet_transformers
from slipstream.parallel import ParameterShare, Ranks
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.stage import Stage


def save_pretrained(folder: str | Path, config: PretrainedConfig, state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Writes config and safetensors on the leader, which has the whole model's state. Collective."""
    if ranks.leads:
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        with quiet_transformers():
            meta_model(config, dtype).save_pretrained(folder, state_dict=dict(state))
    ranks.world.barrier()  # no rank continues before the folder is complete


class _Part(NamedTuple):
    """The part of one tensor of the model's state that a rank has."""

    name: str
    share: ParameterShare
    shape: torch.Size
    dtype: torch.dtype


def gather_state(stages: Iterable[Stage], ranks: Ranks, parameters: Parameters) -> dict[str, Tensor]:
    """Returns the unsplit model's state by its names on the leader, an empty dict on the others. Collective."""
    own = {name: _whole(tensor) for stage in stages for name, tensor in stage.state().items()}
    mine = []
    for name, tensor in own.items():
        share = parameters.shares.get(name) or ParameterShare.whole(tuple(tensor.shape))
        if ranks.data.rank == 0 and share.copy == 0:
            mine.append(_Part(name, share, tensor.shape, tensor.dtype))
    others, places, group = ranks.world.gather(mine), ranks.world.global_ranks, ranks.world.process_group
    if not ranks.leads:
        for part in mine:
            dist.send(own[part.name].to(ranks.device).contiguous(), places[0], group)
        return {}
    whole: dict[str, Tensor] = {}
    for source, sent in enumerate(others):
        for part in sent:
            if source == 0:
                tensor = own[part.name]
            else:
                tensor = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
                dist.recv(tensor, places[source], group)
            _put(part, tensor.cpu(), whole)
    return whole


def _whole(tensor: Tensor) -> Tensor:
    """Returns the tensor with all its rows. Collective over the replicas where it is spread over them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _put(part: _Part, tensor: Tensor, whole: dict[str, Tensor]) -> None:
    if part.share.is_whole:
        whole.setdefault(part.name, tensor)
        return
    if part.name not in whole:
        whole[part.name] = torch.empty(part.share.shape, dtype=part.dtype)
    part.share.put(tensor, whole[part.name])
