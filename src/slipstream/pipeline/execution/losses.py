"""The losses of the last stage: of every slice by itself, or of whole sequences once their last slice is there.

Or, in an evaluation, what is kept of every slice instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import Tensors
from slipstream.pipeline.execution.step_state import SliceKey, StepState
from slipstream.pipeline.pipeline_options import LossFunction, SequenceLoss

TokenOutputs = Callable[[Tensor, Tensor], Tensor]  # (logits (b, T, V), targets (b, T)) -> (b, T, ...)
TokenLosses = Callable[[Tensor, Tensor], Tensor]  # (logits (b, T, V), targets (b, T)) -> (b, T), zero where none counts


@dataclass
class SliceLosses:
    """A loss that is a sum over tokens or rows, so that every slice has its part."""

    function: LossFunction

    def compute(self, outputs: Tensor, state: StepState, key: SliceKey) -> Tensors:
        """Returns (sum, count) of a slice: what F computes and R repeats."""
        _, m, i = key
        return self.function(outputs, state.batch.targets[m][i])

    def add(self, computed: Tensors, state: StepState, key: SliceKey, has_backward: bool) -> Tensor:
        """Adds a slice to the step's loss; returns the root of its backward, which begins with the weight of each
        target."""
        total, count = computed
        state.loss += total.detach()
        state.count += count
        return total


@dataclass(frozen=True)
class SequenceLosses:
    """A loss that is a function of sums over whole sequences.

    No backward of a microbatch begins on the last stage before its last forward (rule 2), and so the gradient of every
    sum is known by then, and is what all slices' backwards begin with.
    """

    loss: SequenceLoss
    token_losses: TokenLosses

    def compute(self, outputs: Tensor, state: StepState, key: SliceKey) -> Tensors:
        """Returns a slice's sums of log-probabilities, (n,) for the n sequences of its microbatch."""
        _, m, i = key
        sequences = state.batch.sequences[m]
        each = -self.token_losses(outputs, state.batch.targets[m][i])
        sums = each.new_zeros(sequences.count)
        return (sums.index_add(0, sequences.numbers[i].flatten(), each.flatten()),)

    def add(self, computed: Tensors, state: StepState, key: SliceKey, has_backward: bool) -> Tensor:
        """Adds a slice to the sums of its sequences, and after the last one their losses to the step's; returns the
        root of the slice's backward."""
        (sums,) = computed
        _, m, i = key
        total = sums.detach().double()
        state.sequence_sums[m] = state.sequence_sums[m] + total if m in state.sequence_sums else total
        if i == len(state.batch.slices[m]) - 1:
            self._finish(state, m, has_backward)
        return sums

    def _finish(self, state: StepState, m: int, has_backward: bool) -> None:
        found = state.log_probabilities[m] = state.sequence_sums.pop(m)
        log_probabilities = found.clone().requires_grad_(has_backward)
        with torch.set_grad_enabled(has_backward):
            losses = self._losses(log_probabilities, state.batch.sequences[m].values)
            total = losses.sum()
        state.loss += total.detach()
        state.count += len(losses)
        if has_backward:
            (gradient,) = torch.autograd.grad(total * state.batch.loss_scale / state.batch.num_valid, log_probabilities)
            state.loss_gradients[m] = gradient

    def _losses(self, log_probabilities: Tensor, values: Tensor | None) -> Tensor:
        """Returns the loss of each group of sequences. Raises SlipstreamError where the function returns something
        else."""
        given = (log_probabilities,) if values is None else (log_probabilities, values)
        losses: object = self.loss.function(*given)
        expected = len(log_probabilities) // self.loss.group_size
        if not isinstance(losses, Tensor) or losses.shape != (expected,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise SlipstreamError(
                f"the function of the SequenceLoss returned {shape} for {len(log_probabilities)} sequences; expected "
                f"({expected},), the loss of every {self.loss.group_size} sequences."
            )
        if log_probabilities.requires_grad and not losses.requires_grad:
            raise SlipstreamError(
                "the function of the SequenceLoss returned losses without a gradient: compute them by torch from the "
                "log-probabilities it is given, without detach() or item()."
            )
        return losses


@dataclass(frozen=True)
class KeptOutputs:
    """What an evaluation keeps of every slice in place of a loss."""

    function: TokenOutputs
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by microbatch and slice

    def compute(self, outputs: Tensor, state: StepState, key: SliceKey) -> Tensors:
        """Returns what is kept of a slice."""
        _, m, i = key
        return (self.function(outputs, state.batch.targets[m][i]),)

    def add(self, computed: Tensors, state: StepState, key: SliceKey, has_backward: bool) -> Tensor:
        """Keeps it."""
        _, m, i = key
        (self.outputs[m, i],) = computed
        return self.outputs[m, i]


Losses = SliceLosses | SequenceLosses | KeptOutputs
