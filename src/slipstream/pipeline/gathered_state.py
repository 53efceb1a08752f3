"""Gathers a whole model's state from the stages of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.model import PipelineStage
from slipstream.parallel import ParameterShare, Ranks, receive_tensor, send_tensor
from slipstream.pipeline.parameters import Parameters


class _Part(NamedTuple):
    """The part of one tensor of the model's state that a rank has."""

    name: str
    share: ParameterShare
    shape: torch.Size
    dtype: torch.dtype


def gather_state(stages: Iterable[PipelineStage], ranks: Ranks, parameters: Parameters) -> dict[str, Tensor]:
    """Returns the unsplit model's state by its names on the leader, an empty dict on the others. Collective."""
    own_state = {name: parameters.whole(name, tensor) for stage in stages for name, tensor in stage.state().items()}
    mine = []
    for name, tensor in own_state.items():
        share = parameters.shares.get(name) or ParameterShare.whole(tuple(tensor.shape))
        if parameters.copies_of(name).rank == 0 and share.copy == 0:
            mine.append(_Part(name, share, tensor.shape, tensor.dtype))
    others = ranks.world.gather(mine)
    places = ranks.world.global_ranks
    group = ranks.world.process_group
    if not ranks.leads:
        for part in mine:
            send_tensor(own_state[part.name].to(ranks.device).contiguous(), places[0], group)
        return {}
    whole: dict[str, Tensor] = {}
    for source, sent in enumerate(others):
        for part in sent:
            if source == 0:
                tensor = own_state[part.name]
            else:
                tensor = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
                receive_tensor(tensor, places[source], group)
            _put(part, tensor.cpu(), whole)
    return whole


def _put(part: _Part, tensor: Tensor, whole: dict[str, Tensor]) -> None:
    if part.share.is_whole:
        whole.setdefault(part.name, tensor)
        return
    if part.name not in whole:
        whole[part.name] = torch.empty(part.share.shape, dtype=part.dtype)
    part.share.put(tensor, whole[part.name])
