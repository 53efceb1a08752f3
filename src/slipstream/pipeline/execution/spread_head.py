"""Runs V, L and VW: the logits, the loss and the gradients of a head whose rows are spread over the ranks.

And E and EW, where the same rows embed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from slipstream.model import HeadRows, PipelineStage, RowSoftmax, combine_softmax
from slipstream.pipeline.execution.far_tensors import FarTensors
from slipstream.pipeline.execution.rank_program import ProgramStep, SliceKey
from slipstream.pipeline.execution.step_state import StepState, Stopwatch
from slipstream.schedule import Action, Op, Schedule


class PartOfSlice(NamedTuple):
    """A slice's softmax, kept by V for VW, and the message in which the head's input came."""

    hidden: Tensor
    softmax: RowSoftmax
    message: Action


class SpreadHeadActions:
    """The actions of one rank's rows in a step, and the exchanges of the model's two ends with all ranks' rows."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        far: FarTensors,
        state: StepState,
        stopwatch: Stopwatch,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        self._state = state
        self._stopwatch = stopwatch
        self.embeds = schedule.spreads_embedding
        self._far = far
        self._parts: dict[SliceKey, PartOfSlice] = {}

    def run(self, step: ProgramStep) -> None:
        """Runs a V, L, VW, E or EW."""
        rules = {Op.V: self._logits, Op.L: self._loss, Op.VW: self._weights, Op.E: self._look_up}
        rules.get(step.action.op, self._add_lookups)(step)

    def leftovers(self) -> list[str]:
        return [f"parts of the vocabulary: {list(self._parts)}"] if self._parts else []

    def spread(self, step: ProgramStep, *tensors: Tensor) -> None:
        """Sends a result to all rows that work on it, or to the end of the model."""
        for send in step.results:
            self._far.hand_on(send, tensors)

    def _look_up(self, step: ProgramStep) -> None:
        """Runs E."""
        action = step.action
        began = self._stopwatch.mark()
        embeddings = self._rows(action.stage).look_up(self._ids(action))
        self._stopwatch.record(action, began)
        self.spread(step, embeddings)

    def embedded(self, step: ProgramStep) -> Tensor:
        """Returns the first stage's input: the sum of all ranks' embeddings."""
        total: Tensor | None = None
        for send in step.inputs:
            (part,) = self._far.take(send, step)
            total = part.clone() if total is None else total.add_(part)
            self._far.release(send)
        assert total is not None
        return total

    def _add_lookups(self, step: ProgramStep) -> None:
        """Runs EW."""
        action, (send,) = step.action, step.inputs
        (gradient,) = self._far.take(send, step)
        began = self._stopwatch.mark()
        self._rows(action.stage).add_lookups(self._ids(action), gradient)
        self._stopwatch.record(action, began)
        self._far.release(send)

    def _logits(self, step: ProgramStep) -> None:
        """Runs V."""
        action, (send,) = step.action, step.inputs
        (hidden,) = self._far.take(send, step)
        began = self._stopwatch.mark()
        targets = self._targets(action)
        part = self._rows(action.stage).softmax(hidden, targets, self._schedule.has_backward)
        self._stopwatch.record(action, began)
        if self._schedule.has_backward:
            # The mean and the target go to the last stage, and only the rest is needed here for the gradient.
            statistics = part._replace(mean=None, target=None)
            self._parts[step.key] = PartOfSlice(hidden, statistics, send)
        else:
            self._far.release(send)
        self.spread(step, *(tensor for tensor in part[:3] if tensor is not None))

    def _loss(self, step: ProgramStep) -> None:
        """Runs L: adds the slice's loss to the step's, and leaves the gradient for the last stage's backward."""
        action = step.action
        parts = [RowSoftmax(*self._far.take(send, step)) for send in step.inputs]
        began = self._stopwatch.mark()
        combined = combine_softmax(parts, self._targets(action), self._state.batch.loss_weight)
        self._state.loss += combined.total
        self._state.count += combined.num_valid
        self._stopwatch.record(action, began)
        for send in step.inputs:
            self._far.release(send)
        if combined.gradient is not None:
            self._state.gradients[step.key] = (combined.gradient,)
            self.spread(step, combined.logsumexp)

    def _weights(self, step: ProgramStep) -> None:
        """Runs VW."""
        action, (send,) = step.action, step.inputs
        (logsumexp,) = self._far.take(send, step)
        hidden, part, came = self._parts.pop(step.key)
        began = self._stopwatch.mark()
        weight = self._state.batch.loss_weight
        self._rows(action.stage).add_gradients(hidden, self._targets(action), part, logsumexp, weight)
        self._stopwatch.record(action, began)
        self._far.release(came)
        self._far.release(send)

    def _rows(self, stage: int) -> HeadRows:
        rows = self._stages[stage].vocabulary
        assert rows is not None
        return rows

    def _ids(self, action: Action) -> Tensor:
        ids: Tensor = self._state.batch.slices[action.microbatch][action.slice].input_ids
        return ids

    def _targets(self, action: Action) -> Tensor:
        return self._state.batch.targets[action.microbatch][action.slice]
