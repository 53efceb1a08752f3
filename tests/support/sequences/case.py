"""A model given as an nn.Sequential, its batch and its loss, and what a step of it gives without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from support.architectures import gradients

Inputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class SequenceCase:
    """How to build a model and a batch, and the loss of some rows of that batch as (sum, number of targets)."""

    build: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Inputs, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def model(self) -> nn.Sequential:
        """The model in float64, with the same weights every time."""
        torch.manual_seed(1)
        return self.build().double()

    @property
    def num_layers(self) -> int:
        return len(self.build())

    def unsplit(self, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of the nn.Sequential itself, microbatch by microbatch, as batch norm normalises them."""
        model = self.model()
        inputs, targets = self.batch()
        num_valid, loss = (targets != -100).sum(), torch.zeros((), dtype=torch.float64)
        for rows in torch.arange(len(targets)).tensor_split(num_microbatches):
            part = tuple(tensor[rows] for tensor in inputs) if isinstance(inputs, tuple) else inputs[rows]
            total, _ = self.loss_fn(model(part), targets[rows])
            (total / num_valid).backward()
            loss += total.detach() / num_valid
        return loss, gradients(model)
