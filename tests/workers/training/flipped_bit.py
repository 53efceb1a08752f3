"""Runs `slipstream` where a bit of one rank's weights or optimizer state flips: flipped_bit.py RANK STEP WHAT ..."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from slipstream.cli import main
from slipstream.train.corruption import StateCheck
from slipstream.train.trainer import Trainer

rank, step, what = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1)
own_train_step, own_after_step = Trainer._train_step, StateCheck.after_step


def flip(shards: Any) -> None:
    """Flips a bit of one element's mantissa: the lowest one may be rounded away by the next update."""
    tensor = next(each.tensor for each in shards if each.key.startswith(what) and each.tensor.numel() > 8)
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[5] ^= 1 << 20


def train_step(self: Trainer, number: int) -> Any:
    if number == step and os.environ["RANK"] == str(rank):
        flip(self._parts.shards())
    return own_train_step(self, number)


def after_step(self: StateCheck, number: int) -> bool:
    if number == -step and os.environ["RANK"] == str(rank):  # between the update and its check
        flip(self._shards())
    return own_after_step(self, number)


Trainer._train_step = train_step  # type: ignore[method-assign]
StateCheck.after_step = after_step  # type: ignore[method-assign]
main()
