"""A run that checkpoint tests interrupt: a real model with AdamW, and its state spread over any number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from slipstream.checkpoint import TensorShard
from slipstream.parallel import ParameterShare
from support.architectures import ARCHITECTURES, build, labels_of, tokens, unsplit_step


class Run(NamedTuple):
    model: PreTrainedModel
    optimizer: torch.optim.AdamW


def start(seed: int = 0) -> Run:
    """The optimizer has its state from the beginning, so that it can be filled."""
    model = build(ARCHITECTURES["llama"], seed).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return Run(model, optimizer)


def train(run: Run, step: int) -> None:
    """One step on a batch of its own."""
    inputs = tokens(seed=step)
    run.optimizer.zero_grad()
    unsplit_step(run.model, inputs, labels_of(inputs))
    run.optimizer.step()


def pieces_of(run: Run, rank: int, num_ranks: int) -> list[TensorShard]:
    """Each rank has whole parameters and writes every `num_ranks`-th; of the moments it has its rows."""
    pieces = []
    for index, (name, parameter) in enumerate(run.model.named_parameters()):
        share = ParameterShare.whole(tuple(parameter.shape))
        writes = index % num_ranks == rank
        pieces.append(TensorShard(name, share, parameter, writes=writes))
        for key, value in run.optimizer.state[parameter].items():
            if value.ndim == 0:
                pieces.append(TensorShard(f"optimizer.{key}.{name}", ParameterShare.whole(()), value, writes=writes))
                continue
            rows = value.tensor_split(num_ranks)
            first_row = sum(map(len, rows[:rank]))
            pieces.append(TensorShard(f"optimizer.{key}.{name}", share, rows[rank], first_row))
    return pieces
