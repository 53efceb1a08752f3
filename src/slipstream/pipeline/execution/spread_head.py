"""Runs V, L and VW: the logits, the loss and the gradients of a head whose rows are spread over the ranks.

And E and EW, where the same rows embed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from slipstream.comm import Transport
from slipstream.model import PipelineStage, TensorSpec
from slipstream.model.vocabulary import HeadRows, RowSoftmax, combine
from slipstream.pipeline.execution.rank_program import SliceKey, key_of
from slipstream.pipeline.execution.step_state import StepState, Stopwatch
from slipstream.schedule import Action, Op, Schedule, SkipSend, VocabularyMessages


class PartOfSlice(NamedTuple):
    """A slice's softmax, kept by V for VW, and the message in which the head's input came."""

    hidden: Tensor
    softmax: RowSoftmax
    message: SkipSend


class SpreadHeadActions:
    """The actions of one rank's rows in a step, and the exchanges of the model's two ends with all ranks' rows."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        state: StepState,
        stopwatch: Stopwatch,
    ) -> None:
        self._schedule, self._stages, self._state, self._stopwatch = schedule, stages, state, stopwatch
        self.embeds = schedule.spreads_embedding
        stage, has_backward = next(iter(stages.values())), schedule.has_backward

        # Not a method: the cycle of references would keep the step's tensors until garbage is collected.
        def specs(message: SkipSend) -> list[TensorSpec]:
            piece = state.batch.slices[message.microbatch][message.slice]
            return stage.rows_messages(message.op, piece, has_backward)

        self.messages = VocabularyMessages(rank, schedule, transport, specs)
        self._parts: dict[SliceKey, PartOfSlice] = {}

    def run(self, action: Action) -> None:
        """Runs a V, L, VW, E or EW."""
        rules = {Op.V: self._logits, Op.L: self._loss, Op.VW: self._weights, Op.E: self._look_up}
        rules.get(action.op, self._add_lookups)(action)

    def leftovers(self) -> list[str]:
        leftovers = [f"parts of the vocabulary: {list(self._parts)}"] if self._parts else []
        return leftovers + self.messages.leftovers()

    def spread(self, action: Action, hidden: Tensor) -> None:
        """Sends to every rank the output of the last stage's F, or the gradient of the first stage's input."""
        self.messages.hand_on(action, (hidden,))

    def _look_up(self, action: Action) -> None:
        """Runs E."""
        began = self._stopwatch.mark()
        embeddings = self._rows(action.stage).look_up(self._ids(action))
        self._stopwatch.record(action, began)
        self.messages.hand_on(action, (embeddings,))

    def embedded(self, forward: Action) -> Tensor:
        """Returns the first stage's input: the sum of all ranks' embeddings."""
        total: Tensor | None = None
        for message in self.messages.incoming(forward):
            (part,) = self.messages.take(message)
            total = part.clone() if total is None else total.add_(part)
            self.messages.release(message)
        assert total is not None
        return total

    def _add_lookups(self, action: Action) -> None:
        """Runs EW."""
        (message,) = self.messages.incoming(action)
        (gradient,) = self.messages.take(message)
        began = self._stopwatch.mark()
        self._rows(action.stage).add_lookups(self._ids(action), gradient)
        self._stopwatch.record(action, began)
        self.messages.release(message)

    def _logits(self, action: Action) -> None:
        """Runs V."""
        (message,) = self.messages.incoming(action)
        (hidden,) = self.messages.take(message)
        began = self._stopwatch.mark()
        targets = self._targets(action)
        part = self._rows(action.stage).softmax(hidden, targets, self._schedule.has_backward)
        self._stopwatch.record(action, began)
        if self._schedule.has_backward:
            statistics = part._replace(mean=None, target=None)  # which go to the last stage
            self._parts[key_of(action)] = PartOfSlice(hidden, statistics, message)
        else:
            self.messages.release(message)
        self.messages.hand_on(action, tuple(tensor for tensor in part[:3] if tensor is not None))

    def _loss(self, action: Action) -> None:
        """Runs L: adds the slice's loss to the step's, and leaves the gradient for the last stage's backward."""
        incoming = self.messages.incoming(action)
        parts = [RowSoftmax(*self.messages.take(message)) for message in incoming]
        began = self._stopwatch.mark()
        combined = combine(parts, self._targets(action), self._state.batch.loss_weight)
        self._state.loss += combined.total
        self._state.count += combined.num_valid
        self._stopwatch.record(action, began)
        for message in incoming:
            self.messages.release(message)
        if combined.gradient is not None:
            self._state.gradients[key_of(action)] = (combined.gradient,)
            self.messages.hand_on(action, (combined.logsumexp,))

    def _weights(self, action: Action) -> None:
        """Runs VW."""
        (message,) = self.messages.incoming(action)
        (logsumexp,) = self.messages.take(message)
        hidden, part, came = self._parts.pop(key_of(action))
        began, weight = self._stopwatch.mark(), self._state.batch.loss_weight
        self._rows(action.stage).add_gradients(hidden, self._targets(action), part, logsumexp, weight)
        self._stopwatch.record(action, began)
        self.messages.release(came)
        self.messages.release(message)

    def _rows(self, stage: int) -> HeadRows:
        rows = self._stages[stage].vocabulary
        assert rows is not None
        return rows

    def _ids(self, action: Action) -> Tensor:
        ids: Tensor = self._state.batch.slices[action.microbatch][action.slice].input_ids
        return ids

    def _targets(self, action: Action) -> Tensor:
        return self._state.batch.targets[action.microbatch][action.slice]
