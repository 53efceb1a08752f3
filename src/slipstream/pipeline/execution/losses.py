"""The losses of slices on the last stage, and the loss of a step that they add up to.

Or, in an evaluation, a function's results on every slice instead.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Never

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import HeadTiles, Tensors
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution.rank_program import SliceKey
from slipstream.pipeline.execution.step_state import StepState
from slipstream.pipeline.pipeline_options import LossFunction

SliceOutputs = Tensor | HeadTiles  # the last stage's outputs, or what they are computed from
TokenOutputs = Callable[[Tensor, Tensor], Tensor]  # (logits (b, T, V), targets (b, T)) -> (b, T, ...)


class Losses(ABC):
    """How the last stage makes a loss of its outputs, slice by slice."""

    is_given = False
    """Whether it is a function of the user's, which is to be tried."""
    may_say_divisor = False
    """Whether it may say, once all parts have run, what their sum is divided by."""
    says_divisor = False
    """Whether it has done so in some call so far."""

    @abstractmethod
    def compute(self, outputs: SliceOutputs, state: StepState, key: SliceKey) -> Tensors:
        """Returns the tensors that F computes of a slice, and R repeats."""

    @abstractmethod
    def add(self, computed: Tensors, state: StepState, key: SliceKey, has_backward: bool) -> Tensor:
        """Adds a slice's tensors to the step's loss; returns the root of the slice's backward."""

    def try_on(self, batch: SplitBatch, forms_of: Callable[[Any, Tensor], OutputForms], has_backward: bool) -> None:
        """Raises SlipstreamError where it can't be the loss of such a batch, before anything runs."""
        return


@dataclass
class SliceLosses(Losses):
    """A loss that is a sum over tokens or rows, so that every slice has its part."""

    function: LossFunction

    def compute(self, outputs: SliceOutputs, state: StepState, key: SliceKey) -> Tensors:
        """Returns (sum, count) of a slice, which F computes and R repeats."""
        _, m, i = key
        targets = state.batch.targets[m][i]
        if isinstance(outputs, HeadTiles):
            return outputs.summed(self.function, targets)
        return self.function(outputs, targets)

    def add(self, computed: Tensors, state: StepState, key: SliceKey, has_backward: bool) -> Tensor:
        """Adds a slice to the step's loss; returns the root of its backward, which begins with the weight of each
        target."""
        total, count = computed
        state.loss += total.detach()
        state.count += count
        return total


@dataclass(frozen=True)
class CollectedOutputs(Losses):
    """The results of every slice, which an evaluation collects instead of a loss."""

    function: TokenOutputs
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # results by (microbatch, slice)

    def compute(self, outputs: SliceOutputs, state: StepState, key: SliceKey) -> Tensors:
        """Returns the collected tensor of a slice."""
        _, m, i = key
        targets = state.batch.targets[m][i]
        if isinstance(outputs, HeadTiles):
            return (outputs.joined(self.function, targets),)
        return (self.function(outputs, targets),)

    def add(self, computed: Tensors, state: StepState, key: SliceKey, has_backward: bool) -> Tensor:
        """Collects a slice's results."""
        _, m, i = key
        (self.outputs[m, i],) = computed
        return self.outputs[m, i]


@dataclass(frozen=True)
class OutputForms:
    """The shapes and dtypes of the last layer's outputs, and which dim of each has the tokens that slices cut."""

    shapes: Sequence[Sequence[int]]
    dtypes: Sequence[torch.dtype]
    token_dims: Sequence[int | None]
    is_tuple: bool = False


def miscounted(count: int, expected: int) -> str:
    """Returns an error's text on a count that isn't the number of targets."""
    return (
        f"loss_fn counted {count} tokens, but {expected} targets are not -100. Its second value must be that number "
        "(of float targets, that of the rows): gradients are divided by it before the loss is known. A divisor of the "
        "function's own, such as a sum of weights, is a floating-point number."
    )


def no_divisor(count: float) -> str:
    """Returns an error's text on an impossible divisor."""
    return (
        f"loss_fn's second values add up to {count}, by which the loss of the whole batch is divided: they must add up "
        "to a positive number, as where the weight of some target isn't zero."
    )


class LossDivisor:
    """Finds the divisor of the sum of a step's losses: the targets that count, or a given function's sum."""

    def __init__(self, losses: Losses) -> None:
        self.may_be_own = losses.may_say_divisor
        """Whether a step may find what its gradients are to be divided by, on all ranks alike."""
        self.of_gradients = 1.0
        """What gradients of the last step are still to be divided by."""

    def find(self, count: float, is_own: bool, batch: SplitBatch) -> float:
        """Returns the sum of the counts of all ranks. Raises SlipstreamError where these can't be a divisor."""
        if not is_own and int(count) != batch.num_valid:
            raise SlipstreamError(miscounted(int(count), batch.num_valid))
        if is_own:
            self._check_own(count, batch)
        self.may_be_own = is_own
        if batch.num_targets is not None or not is_own:
            self.of_gradients = 1.0
            return batch.divisor
        self.of_gradients = count / batch.divisor
        return count

    def _check_own(self, count: float, batch: SplitBatch) -> None:
        """Raises SlipstreamError for a divisor of the loss function's own that none can be."""
        if not self.may_be_own:
            raise SlipstreamError(
                "the second value of loss_fn was an integer in earlier steps, and is a floating-point number now: a "
                "divisor of the function's own must be one from the first step on."
            )
        asked = batch.num_targets
        if asked is None:
            if not 0 < count < math.inf:
                raise SlipstreamError(no_divisor(count))
        elif isinstance(asked, int) and count != batch.num_valid:
            raise SlipstreamError(
                f"num_targets={asked} with a loss_fn that says its own divisor, {count:.6g} for the "
                f"{batch.num_valid} targets of this batch: give the sum of its second values over all batches, as a "
                "float. A SlipstreamTrainer can't: give gradient_accumulation_steps=1."
            )
        elif not -math.inf < count <= asked * (1 + 1e-5):
            raise SlipstreamError(
                f"num_targets={asked}, but loss_fn's second values add up to {count:.6g} in this batch alone: give "
                "their sum over all batches whose gradients add up."
            )


_SCALERS = "torch.amp.grad_scaler"


class StepLoss(Tensor):
    """A scalar without a graph, that refuses operations meant for a loss whose backward is still to come.

    Tensors computed from it are StepLosses too, as scaled or averaged losses must be refused as well; whatever needs a
    gradient of its own may have its backward.
    """

    @classmethod
    def of(cls, loss: Tensor) -> StepLoss:
        """Returns the loss, on the same memory."""
        return loss.detach().as_subclass(cls)

    def backward(self, *args: Any, **options: Any) -> None:
        """Raises SlipstreamError, unless something was added to the loss that needs a gradient."""
        if self.requires_grad:
            super().backward(*args, **options)  # type: ignore[no-untyped-call]
            return
        raise SlipstreamError(
            "pipe.step has already run the backward, and its gradients are in .grad: leave out loss.backward(), also "
            "accelerator.backward(loss)."
        )

    def __mul__(self, other: Any) -> Tensor:
        """Multiplies. Raises SlipstreamError where a GradScaler does it: it would only divide the gradients."""
        if sys._getframe(1).f_globals.get("__name__") == _SCALERS:
            _refuse_scaler()
        return super().__mul__(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain tensor, so that saved files need no Slipstream."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))


def checked_num_targets(batch: SplitBatch, num_targets: Any) -> float | None:
    """Returns the number of targets in all batches whose gradients add up, where it is given. A float is the sum of
    divisors of a loss function's own, which a step knows only in the end.

    Raises SlipstreamError where it can't be that number, and for a loss of whole sequences.
    """
    if num_targets is None:
        return None
    if batch.sequences:
        raise SlipstreamError("num_targets with a SequenceLoss, which is a mean over sequences: leave it out.")
    count: float = num_targets.item() if hasattr(num_targets, "item") else num_targets  # a float, also from a tensor
    if not 0 < count < math.inf:
        raise SlipstreamError(
            f"num_targets={count}: give the number of all batches' labels that count. Where none does in any, leave "
            "these batches out."
        )
    if isinstance(count, int) and count < batch.num_valid:
        raise SlipstreamError(
            f"num_targets={count}, but {batch.num_valid} targets of this batch alone count: give the number of "
            "all batches' labels that aren't -100, of a causal LM without each row's first, on all replicas."
        )
    return count


def _refuse_scaler() -> Never:
    raise SlipstreamError(
        "a GradScaler around pipe.step would divide the gradients by a scale that they never had: leave it out. For "
        "float16 give step(..., loss_scale=2.0**16), which scales the loss and its gradients back; bfloat16 needs none."
    )
