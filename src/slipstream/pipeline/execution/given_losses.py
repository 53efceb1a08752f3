"""The losses of a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import kept_random_states
from slipstream.model import HeadTiles, NamedWeights, Tensors, references, storage_id
from slipstream.pipeline.cut_batch import SplitBatch, counted
from slipstream.pipeline.execution.loss_trial import DIVISOR_WITH_GRADIENT, DRAWS, LossTrial, pair_of
from slipstream.pipeline.execution.losses import OutputForms, SliceLosses
from slipstream.pipeline.execution.rank_program import SliceKey
from slipstream.pipeline.execution.step_state import StepState
from slipstream.pipeline.pipeline_options import LossFunction


@dataclass(frozen=True)
class StageWeights:
    """The weights of the last stage, which has the loss, and those of the model that are elsewhere, where known."""

    here: NamedWeights
    elsewhere: NamedWeights

    def check_reads(self, storages: Collection[int]) -> None:
        """Raises SlipstreamError where a loss function reads one of these storages that is elsewhere."""
        for name in self.elsewhere.among(storages):
            raise SlipstreamError(
                f"loss_fn reads {name}, a weight of another stage than the last, which has the loss: its gradient "
                "would be lost, and its updates not be seen. Leave it out, or train on one stage."
            )


class GivenLosses(SliceLosses):
    """The losses of a function of the user's, which is tried before anything runs.

    A count of integers is the number of targets. One of floating-point numbers is a divisor of the function's own, such
    as the sum of the weights of classes; it is known only once all parts have run.
    """

    is_given = True
    may_say_divisor = True

    def __init__(
        self,
        function: LossFunction,
        weights: StageWeights,
        num_replicas: int,
        adds_router_loss: bool = False,
        num_sharing: int = 1,
    ) -> None:
        super().__init__(function)
        self._weights = weights
        self._has_replicas = num_replicas > 1
        self._adds_router_loss = adds_router_loss
        self._num_sharing = num_sharing  # ranks, each with some tokens of every slice
        self._tried: set[object] = set()
        self._own: Sequence[Tensor] = ()  # the function's own parameters, with gradients only from trials

    def compute(self, outputs: Any, state: StepState, key: SliceKey) -> Tensors:
        """Returns (sum, count). Raises SlipstreamError where the function returns something else."""
        _, m, i = key
        targets = state.batch.targets[m][i]
        if isinstance(outputs, HeadTiles):
            total, count = outputs.summed(self._pair, targets)
        else:
            total, count = self._pair(outputs, targets)
        if count.requires_grad:
            raise SlipstreamError(DIVISOR_WITH_GRADIENT)
        self.says_divisor |= count.is_floating_point()
        return total, count

    def _pair(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        return pair_of(self.function(outputs, targets))

    def try_on(self, batch: SplitBatch, forms_of: Callable[[Any, Tensor], OutputForms], has_backward: bool) -> None:
        """Tries the function on targets of a batch and made-up outputs, unless it was on a batch that is cut alike.

        Raises SlipstreamError where it returns no sum and number or a sum without a gradient, counts something else, or
        can't be added up over the rows or tokens that are cut: where the sum, the number or the gradients of two pieces
        that are joined aren't those of each. Not of functions that fail on made-up outputs, nor of those that return
        something else in a second call.
        """
        shortest = min(t.shape[1] for targets in batch.targets for t in targets) if self._num_sharing > 1 else 1
        if shortest < self._num_sharing:
            raise SlipstreamError(
                f"a slice of {shortest} tokens with a loss_fn, shared by {self._num_sharing} ranks: some would have "
                f"none of them. Give slices of at least {self._num_sharing} tokens, or leave loss_fn out."
            )
        if self._own and batch.loss_scale != 1:
            self._refuse_scale(batch.loss_scale)
        cut = [1] if self._num_sharing > 1 or any(len(slices) > 1 for slices in batch.slices) else []
        cut += [0] if len(batch.slices) > 1 or self._has_replicas else []
        key = *cut, has_backward
        if key in self._tried:
            return
        pairs = (pair for pieces in zip(batch.slices, batch.targets, strict=True) for pair in zip(*pieces, strict=True))
        piece, targets = next((pair for pair in pairs if counted(pair[1])), (None, None))
        if targets is None:
            return
        self._tried.add(key)
        trial = LossTrial(self.function, forms_of(piece, targets), targets, cut)
        with kept_random_states():
            torch.manual_seed(0)
            for draw in DRAWS:
                if trial.runs_on(draw):
                    trial.check(has_backward, self._adds_router_loss)
                    self._check_reads(trial, batch.loss_scale if has_backward else None)
                    break
            else:
                self._check_held()

    def _check_reads(self, trial: LossTrial, loss_scale: float | None) -> None:
        """Raises SlipstreamError where the function reads weights of other stages, or parameters of its own whose
        gradients, of which an evaluation has none, wouldn't be whole."""
        storages, leaves = trial.reached()
        self._weights.check_reads(storages)
        own = [leaf for leaf in leaves if not self._weights.here.among({storage_id(leaf)})]
        if not own or loss_scale is None:
            return
        described = _described_parameters(own)
        if self._has_replicas or self._num_sharing > 1:
            raise SlipstreamError(
                f"{described}, to which each replica, or each rank that shares slices, would add the gradient of its "
                "own rows or tokens alone. Use dp=1 and cp=1, or make it a part of the model."
            )
        if trial.says_divisor:
            raise SlipstreamError(
                f"{described}, and says a divisor of its own, by which the model's gradients alone are divided. Count "
                "the targets that aren't -100, or make it a part of the model."
            )
        self._own = own
        if loss_scale != 1:
            self._refuse_scale(loss_scale)

    def _check_held(self) -> None:
        """Raises SlipstreamError where a function that couldn't be tried holds weights of other stages."""
        held = {storage_id(each) for each in references([self.function]) if isinstance(each, nn.Parameter)}
        self._weights.check_reads(held)

    def _refuse_scale(self, loss_scale: float) -> None:
        raise SlipstreamError(
            f"loss_scale={loss_scale:g}, but {_described_parameters(self._own)}, whose gradient wouldn't be divided by "
            "it, as the model's are. Leave loss_scale out."
        )


def _described_parameters(parameters: Sequence[Tensor]) -> str:
    """Returns a clause on the parameters of a loss function."""
    return f"loss_fn has a parameter of its own, {tuple(parameters[0].shape)}"
