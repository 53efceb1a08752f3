"""What the adapter of a shared layer needs beside the layer's own operators: equal dropout, and norms of whole rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from slipstream.model.adapters import adapter_dropouts, dora_layers
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.tensor.replication_tracker import ReplicationTracker


def share_dropout(module: nn.Module, whose: ReplicationTracker) -> None:
    """Makes the dropout of an adapter's input the same on all ranks, which all have that input.

    A row's input is its rank's features, so its dropout is the rank's own.
    """
    before: list[bool] = []

    def begin(*_: Any) -> None:
        before[:] = [whose.is_own]
        whose.switch(is_own=False)

    def end(*_: Any) -> None:
        whose.switch(is_own=before[0])

    for dropout in adapter_dropouts(module):
        dropout.register_forward_pre_hook(begin)
        dropout.register_forward_hook(end)


def sum_up_norms(module: nn.Module, group: RankGroup) -> None:
    """Makes DoRA divide by the norms of whole rows of a weight, of which each rank has some columns.

    A forward is then collective. DoRA takes these norms for constants, so nothing is exchanged in the backward.
    """
    for layer in dora_layers(module):
        _sum_up(layer, group)


def _sum_up(layer: Any, group: RankGroup) -> None:
    of_columns = layer.get_weight_norm

    def of_rows(*args: Any, **kwargs: Any) -> Tensor:
        return group.sum(of_columns(*args, **kwargs).detach().square()).sqrt()

    layer.get_weight_norm = of_rows
