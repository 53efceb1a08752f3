"""What a rank holds between the actions of a step, and the two ends of a slice's autograd graph on a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slipstream.attention import ContextStore
from slipstream.model.recompute import Replay
from slipstream.model.weight_gradients import WeightGradient
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.offload import Offloaded
from slipstream.schedule.action import Action

Key = tuple[int, int, int]  # stage, microbatch, slice


def key_of(action: Action) -> Key:
    return action.stage, action.microbatch, action.slice


@dataclass
class Flight:
    """What a step holds between its actions; all of it is empty when the step ends."""

    batch: Batch
    loss: Tensor  # sum over this rank's slices so far, float64
    count: Tensor
    input_gradients: dict[Key, Tensor] = field(default_factory=dict)  # for the stage before
    roots: dict[Key, Tensor | GradientEdge | None] = field(default_factory=dict)  # of the backward; None: all frozen
    replays: dict[Key, Replay] = field(default_factory=dict)  # of slices that are recomputed or offloaded
    offloaded: dict[Key, Offloaded] = field(default_factory=dict)
    handed: dict[Key, Tensor] = field(default_factory=dict)  # from a stage of the same rank: its output
    gradients: dict[Key, Tensor] = field(default_factory=dict)  # of a stage's output, from the same rank
    outgoing: dict[Action, Tensor] = field(default_factory=dict)  # computed, not yet sent
    weights: dict[Key, list[WeightGradient]] = field(default_factory=dict)  # left by I for W
    stores: dict[tuple[int, int], ContextStore] = field(default_factory=dict)  # by stage and microbatch

    def leftovers(self) -> list[str]:
        held = {name: value for name, value in vars(self).items() if isinstance(value, dict) and value}
        return [f"{name}: {list(value)}" for name, value in held.items()]


def entrance(hidden: Tensor, leave: Callable[[Tensor], None]) -> Tensor:
    """The input of a stage as its graph's beginning: `leave` gets its gradient, and nothing keeps its memory."""
    token = torch.empty(0, requires_grad=True)
    found: Tensor = _Entrance.apply(token, hidden, leave)  # type: ignore[no-untyped-call]
    return found


class _Entrance(torch.autograd.Function):
    """The identity; a leaf would hold its data as long as the graph lives."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, hidden: Tensor, leave: Callable[[Tensor], None]) -> Tensor:
        ctx.leave = leave
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.leave(gradient)
        return None, None, None


def root_of(output: Tensor) -> Tensor | GradientEdge | None:
    """Where the backward of a forward's output begins: not the hidden states, whose memory the next stage needs."""
    if not output.requires_grad:
        return None
    return output if output.dim() == 0 else get_gradient_edge(output)
