"""A loss that weighs each label by a value that travels with it, in a pipeline and by the unsplit model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream import Pipeline
from slipstream.model import IGNORED, Tensors, causal_cross_entropy
from slipstream.pipeline.execution.losses import SliceLosses
from slipstream.pipeline.execution.rank_program import SliceKey
from slipstream.pipeline.execution.step_state import StepState
from slipstream.pipeline.token_values import TokenRule, TokenValues

ADVANTAGE = TokenRule("advantage", is_shifted=True)


class WeightedLosses(SliceLosses):
    """Cross-entropies, each times the advantage of the label that it is of."""

    def compute(self, outputs: Tensor, state: StepState, key: SliceKey) -> Tensors:
        _, m, i = key
        targets, advantages = state.batch.targets[m][i], state.batch.values[ADVANTAGE.name].slices[m][i]
        losses = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * advantages.flatten()).sum(), (targets != IGNORED).sum()


def weighted_step(pipe: Pipeline, inputs: Tensor | list[Tensor], advantages: Tensor | list[Tensor]) -> Tensor:
    """Runs a step whose batch has advantages."""
    runtime = pipe._runtime
    for executor in runtime.executors:
        executor._losses = WeightedLosses(causal_cross_entropy)
    whole = runtime.read_batch(inputs, inputs)
    values = TokenValues(ADVANTAGE, advantages)
    return runtime.step(replace(whole, companions={**whole.companions, ADVANTAGE.name: values}), 1.0)


def unsplit_weighted_step(model: Any, inputs: Sequence[Tensor], advantages: Sequence[Tensor]) -> Tensor:
    """Loss and gradients of the whole model on sequences alone, label by label."""
    count = sum(len(row) - 1 for row in inputs)
    total = torch.zeros((), dtype=torch.float64)
    for row, weights in zip(inputs, advantages, strict=True):
        logits = model(row[None], use_cache=False).logits[0]
        for place in range(len(row) - 1):
            loss = functional.cross_entropy(logits[place], row[place + 1])
            total = total + loss * weights[place + 1] / count
    total.backward()
    return total.detach()
