"""A parameter whose gradient is that of a tensor beside it: what is sent, what W multiplies, another's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import Layers, Pipeline, Runtime
from support.architectures import BOUND, gradient_error

TOKENS, WIDTH = 3, 4
Table = Callable[[nn.Parameter], Tensor]
TABLES = {
    "as it is": lambda table: table,
    "viewed": lambda table: table.view(TOKENS * WIDTH).view(1, TOKENS, WIDTH),
    "of its own dtype": lambda table: table.double().view_as(table),
}


class WithTables(nn.Module):
    """Adds parameters of a row's own shape: autograd may leave them the very gradient of what they are added to, and
    adds the next ones to it in place."""

    def __init__(self, read: Table, is_first: bool, count: int) -> None:
        super().__init__()
        self.linear, self.read, self.is_first = nn.Linear(WIDTH, WIDTH), read, is_first
        self.tables = nn.ParameterList(torch.randn(1, TOKENS, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.is_first else self.linear(x)
        for table in self.tables:
            x = x + self.read(table)
        return torch.tanh(self.linear(x) if self.is_first else x)


def squares(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return ((output - targets) ** 2).sum(), torch.tensor(targets.shape[0])


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize(("is_first", "count"), [(True, 1), (False, 1), (False, 2)], ids=["input", "product", "two"])
@pytest.mark.parametrize("read", TABLES.values(), ids=TABLES)
def test_gradients_added_in_place_reach_no_other(
    read: Table, is_first: bool, count: int, schedule: str, stages_per_rank: int
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(WithTables(read, is_first, count) for _ in range(4))).double()
    whole = copy.deepcopy(layers)
    inputs, targets = torch.randn(2, 4, TOKENS, WIDTH, dtype=torch.float64)
    settings: dict[str, Any] = {"num_microbatches": 4, "num_ranks": 2, "stages_per_rank": stages_per_rank}
    settings |= {"loss_fn": squares, "layers": Layers(example=inputs), "runtime": Runtime(self_check=False)}
    pipe = Pipeline(layers, schedule, **settings)
    pipe.step(inputs, targets)
    (squares(whole(inputs), targets)[0] / len(inputs)).backward()
    assert gradient_error(whole, pipe) < BOUND
