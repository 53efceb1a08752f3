"""A replica of a small model: its part of a batch, and the steps of a training loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.model import causal_cross_entropy
from slipstream.model.weight_gradients import add_weight_gradients_in_place
from slipstream.parallel import RankGroup
from slipstream.parallel.gradients import GradientReduction, MasterParameters
from support.architectures import labels_of, tokens

Named = tuple[str, nn.Parameter]
ROWS = 2  # of a batch, on each replica


def world() -> RankGroup:
    return RankGroup(dist.group.WORLD)


def held_by(group: RankGroup) -> Callable[[str], RankGroup]:
    """Says of every parameter that all ranks of a group hold it."""
    return lambda _: group


def batch(seed: int, replicas: int) -> tuple[Tensor, Tensor]:
    """Sequences and labels for all replicas, of which the first counts fewer tokens than the last."""
    inputs = tokens(batch=ROWS * replicas, length=24, seed=seed)
    labels = labels_of(inputs)
    for replica in range(replicas):
        labels[ROWS * replica, : 20 - 5 * replica] = -100
    return inputs, labels


def local_loss(model: nn.Module, inputs: Tensor, labels: Tensor, data: RankGroup) -> Tensor:
    """This replica's part of the global mean: its rows' sum over the valid tokens of all rows."""
    rows = slice(ROWS * data.rank, ROWS * (data.rank + 1))
    total, _ = causal_cross_entropy(model(input_ids=inputs[rows], use_cache=False).logits[:, :-1], labels[rows, 1:])
    return total / (labels[:, 1:] != -100).sum()


def in_stages(model: nn.Module) -> dict[int, list[Named]]:
    """Parameters as a rank with two stages has them."""
    named = list(model.named_parameters())
    return {0: named[: len(named) // 2], 1: named[len(named) // 2 :]}


def none_partial(_: str) -> tuple[int, ...]:
    return ()


class Replica:
    """A model with its masters, and the steps of a loop."""

    def __init__(
        self,
        model: nn.Module,
        data: RankGroup,
        shard: bool,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 10_000,
        on_host: bool = False,
    ) -> None:
        add_weight_gradients_in_place(model)
        self.model, self.data = model, data
        self.masters = MasterParameters([*model.named_parameters()], held_by(data), shard, dtype, bucket_bytes, on_host)
        self.gradients = GradientReduction(in_stages(model), held_by(data), RankGroup(), none_partial, self.masters)

    def step(self, seed: int, scale: float = 1.0) -> None:
        inputs, labels = batch(seed, self.data.size)
        self.gradients.begin(scale)
        (scale * local_loss(self.model, inputs, labels, self.data)).backward()
        self.reduce()

    def reduce(self) -> None:
        for stage in (1, 0):
            self.gradients.reduce(stage)
        self.gradients.finish()

    def adamw(self, lr: float = 1e-2) -> torch.optim.AdamW:
        return torch.optim.AdamW([master for _, master in self.masters.named_parameters()], lr=lr)

    def train(self, num_steps: int) -> torch.optim.AdamW:
        optimizer = self.adamw()
        for seed in range(num_steps):
            optimizer.zero_grad()
            self.step(seed)
            optimizer.step()
            self.masters.publish()
        return optimizer

    def own(self, whole: Tensor, name: str) -> Tensor:
        """This replica's rows."""
        rows = self.masters.rows(name)
        return whole[rows.start : rows.stop]
