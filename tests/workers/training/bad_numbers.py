"""Runs `slipstream` with two bad steps: in the 6th the gradient of rank 1 alone is no number, the 16th is a spike."""

from __future__ import annotations

import os

from torch import Tensor

from slipstream.cli import main
from slipstream.pipeline import Pipeline

own = Pipeline.clip_grad_norm_
num_calls = 0


def clip(self: Pipeline, max_norm: float) -> Tensor:
    global num_calls
    num_calls += 1
    norm = own(self, max_norm)
    if num_calls == 6 and os.environ["RANK"] == "1":
        return norm * float("nan")
    return norm * 1000 if num_calls == 16 else norm


Pipeline.clip_grad_norm_ = clip  # type: ignore[method-assign]
main()
