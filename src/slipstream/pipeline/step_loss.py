"""The loss that a step returns: a plain number, whose gradients are there already."""

from __future__ import annotations

import math
import sys
from copy import deepcopy
from typing import Any, Never

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.pipeline.batch import SplitBatch

_SCALERS = "torch.amp.grad_scaler"


class StepLoss(Tensor):
    """A scalar without a graph, that answers what would be done to a loss whose backward is still to come.

    What is computed from it is a StepLoss too, as scaled or averaged losses must be refused likewise; whatever needs a
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
        """Pickles a plain tensor, so that what is saved needs no Slipstream."""
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
    found: float = num_targets.item() if hasattr(num_targets, "item") else num_targets  # of a tensor
    if not 0 < found < math.inf:
        raise SlipstreamError(
            f"num_targets={found}: give the number of all batches' labels that count. Where none does in any, leave "
            "these batches out."
        )
    if isinstance(found, int) and found < batch.num_valid:
        raise SlipstreamError(
            f"num_targets={found}, but {batch.num_valid} targets of this batch alone count: give the number of "
            "all batches' labels that aren't -100, of a causal LM without each row's first, on all replicas."
        )
    return found


def _refuse_scaler() -> Never:
    raise SlipstreamError(
        "a GradScaler around pipe.step would divide the gradients by a scale that they never had: leave it out. For "
        "float16 give step(..., loss_scale=2.0**16), which scales the loss and its gradients back; bfloat16 needs none."
    )
