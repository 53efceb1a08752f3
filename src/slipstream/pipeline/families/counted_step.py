"""The account of a step on one rank: what its slices hold, by counted operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from torch import nn

from slipstream.cost import Costs
from slipstream.errors import SlipstreamError
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.planning import StartRequest, may_split, usual_order
from slipstream.planner import Plan
from slipstream.schedule import make_schedule, split_backwards

# One microbatch is held after the other, so that a second one shows what any number holds.
_MOST_MICROBATCHES = 2
_COUNTED = ("none", "selective", "full", "stage", "stage+full")  # policies with known bytes
# Upper bounds of what is kept: of a parameter, with its gradient and AdamW's state; of a token, for every row and every
# column of a weight. A step that is far smaller needs no counting, which takes a second.
_PARAMETER_BYTES, _TOKEN_BYTES = 20, 64


@dataclass(frozen=True)
class CountedStep:
    """What a step of one rank holds; see `StepAccount`.

    Args:
        options: of the Pipeline.
        compiled: modules whose backward is one piece.
        request: of the plan, for sequences of any length.
        costs: takes the tokens of a sequence and the rows of a microbatch. Returns the costs of the model's parts.
        outline: returns the model without weights.
    """

    options: PipelineOptions
    compiled: Sequence[str]
    request: StartRequest
    costs: Callable[[int, int], Costs]
    outline: Callable[[], nn.Module]

    def peak(self, slices: Sequence[int], num_rows: int, changes: Mapping[str, str]) -> float:
        """See `StepAccount`."""
        memory = self.options.memory.model_copy(update=dict(changes))
        if memory.recompute not in _COUNTED:
            raise SlipstreamError(f"what memory.recompute={memory.recompute} saves isn't counted")
        order = usual_order(self.options, 1)
        assert isinstance(order.schedule, str), "a given order has its own slices"
        num_microbatches = min(self.request.num_microbatches, _MOST_MICROBATCHES)
        schedule = make_schedule(order.schedule, 1, num_microbatches, len(slices), order.stages_per_rank)
        if may_split(replace(self.options, memory=memory), self.compiled):
            schedule = split_backwards(schedule)
        length = sum(slices)
        costs = self.costs(length, num_rows)
        request = replace(
            self.request,
            seq_len=length,
            microbatch_size=num_rows,
            num_microbatches=num_microbatches,
            context=memory.context,
            optimizer=memory.optimizer,
            offload=memory.offload,
            loss_tokens=memory.loss_tokens or 0,
        )
        plan = Plan(schedule=schedule, slices=tuple(slices), recompute=str(memory.recompute))
        return max(request.usual_peaks(costs, plan))

    def surely_fits(self, num_tokens: int, room: float) -> bool:
        """See `StepAccount`."""
        num_parameters, width = self._sizes
        return _PARAMETER_BYTES * num_parameters + _TOKEN_BYTES * width * num_tokens <= room

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """The parameters, and the rows and columns of all weights."""
        shapes = [parameter.shape for parameter in self.outline().parameters()]
        widths = (prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
        return sum(map(prod, shapes)), sum(widths)
