"""The losses of whole sequences, once the last slice of each is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import kept_random_states
from slipstream.model import HeadTiles, Tensors, graph_leaves
from slipstream.parallel import RankGroup
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution.losses import Losses, OutputForms, SliceOutputs
from slipstream.pipeline.execution.rank_program import SliceKey
from slipstream.pipeline.execution.step_state import StepState
from slipstream.pipeline.loss_sequences import SUMS
from slipstream.pipeline.pipeline_options import SequenceLoss

TokenLosses = Callable[[Tensor, Tensor], Tensor]  # (logits (b, T, V), targets (b, T)) -> (b, T), 0 if ignored


@dataclass
class SequenceLosses(Losses):
    """A loss that is a function of sums over whole sequences.

    No backward of a microbatch begins on the last stage before its last forward (rule 2), and so the gradient of every
    sum is known by then, and all slices' backwards begin with it. Ranks that share slices add up their sums, so that
    all have the loss, which counts on the first.
    """

    is_given = True
    loss: SequenceLoss
    token_losses: TokenLosses
    sharing: RankGroup
    _is_tried: bool = field(default=False, init=False)

    def compute(self, outputs: SliceOutputs, state: StepState, key: SliceKey) -> Tensors:
        """Returns a slice's sums of log-probabilities, one or two for each of the n sequences of its microbatch."""
        _, m, i = key
        sequences = state.batch.sequences[m]
        targets = state.batch.targets[m][i]
        if isinstance(outputs, HeadTiles):
            log_probabilities = -outputs.joined(self.token_losses, targets)
        else:
            log_probabilities = -self.token_losses(outputs, targets)
        sums = log_probabilities.new_zeros(sequences.count * self.loss.num_sums)
        places = state.batch.values[SUMS.name].slices[m][i]
        return (sums.index_add(0, places.flatten(), log_probabilities.flatten()),)

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

    def try_on(self, batch: SplitBatch, forms_of: Callable[[Any, Tensor], OutputForms], has_backward: bool) -> None:
        """Raises SlipstreamError where the function isn't given the values that it takes, or reads a parameter:
        gradients go to log-probabilities alone."""
        if not has_backward:
            return
        sequences = batch.sequences[0]
        self._check_values(sequences.values)
        if self._is_tried:
            return
        self._is_tried = True
        device = batch.targets[0][0].device
        drawn = torch.rand(sequences.count * self.loss.num_sums, dtype=torch.float64, device=device)
        log_probabilities = (-drawn).requires_grad_()
        try:
            with kept_random_states(), torch.enable_grad():
                losses = self._losses(self._by_sequence(log_probabilities), sequences.values)
        except Exception:
            # The numbers are made up; those of a step may do.
            return
        for leaf in graph_leaves([losses]):
            if leaf is not log_probabilities:
                raise SlipstreamError(
                    f"the function of the SequenceLoss reads a parameter, {tuple(leaf.shape)}, which would get no "
                    "gradient: it may take log-probabilities and sequence_values alone. Detach it, if it is a constant."
                )

    def _finish(self, state: StepState, m: int, has_backward: bool) -> None:
        sums = self.sharing.sum(state.sequence_sums.pop(m))
        state.log_probabilities[m] = self._by_sequence(sums)
        log_probabilities = sums.clone().requires_grad_(has_backward)
        with torch.set_grad_enabled(has_backward):
            losses = self._losses(self._by_sequence(log_probabilities), state.batch.sequences[m].values)
            total = losses.sum()
        if self.sharing.rank == 0:
            state.loss += total.detach()
            state.count += len(losses)
        if has_backward:
            (gradient,) = torch.autograd.grad(total * state.batch.loss_scale / state.batch.num_valid, log_probabilities)
            state.loss_gradients[m] = gradient

    def _check_values(self, values: Tensor | None) -> None:
        if values is None and self.loss.needs_values:
            raise SlipstreamError(
                "the function of the SequenceLoss takes sequence_values, which aren't given: give step(..., "
                "sequence_values=...), such as the log-probabilities by a reference. Data of plain sequences trains a "
                "Pipeline without this loss_fn."
            )

    def _by_sequence(self, sums: Tensor) -> Tensor:
        return sums.view(-1, 2) if self.loss.prompts else sums

    def _losses(self, log_probabilities: Tensor, values: Tensor | None) -> Tensor:
        """Returns the loss of each group of sequences. Raises SlipstreamError where the function returns something
        else."""
        self._check_values(values)
        arguments = (log_probabilities,) if values is None else (log_probabilities, values)
        losses: object = self.loss.function(*arguments)
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
