"""`slipstream train` as a rank that computes its layers several times from step 12 on if it is rank 1, where five steps
say what is usual: slow_rank.py train config.yaml ..."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from slipstream.cli import main
from slipstream.train.metrics import reporter
from slipstream.train.trainer import Trainer

reporter._STEPS = 5
step = 0
compute, take = LlamaMLP.forward, Trainer._train_step


def compute_often(self: LlamaMLP, hidden: torch.Tensor) -> Any:
    with torch.no_grad():
        for _ in range(16 if step >= 12 else 0):
            compute(self, hidden)
    return compute(self, hidden)


def note_step(self: Trainer, number: int) -> Any:
    global step
    step = number
    return take(self, number)


if os.environ["RANK"] == "1":
    LlamaMLP.forward = compute_often  # type: ignore[method-assign]
    Trainer._train_step = note_step  # type: ignore[method-assign]
main()
