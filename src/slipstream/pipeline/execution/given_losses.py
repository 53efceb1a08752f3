"""A loss function of the user's: what it returns, whether that can be added up over parts, and what divides it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, Tensors
from slipstream.pipeline.execution.losses import SliceLosses
from slipstream.pipeline.execution.step_state import SliceKey, StepState
from slipstream.pipeline.pipeline_options import PAIR, LossFunction

_MOST_TOKENS, _MOST_ROWS = 16, 4  # of what a loss function is tried on
_DIMENSIONS = {0: "rows", 1: "tokens"}

Piece = tuple[Any, Tensor]  # outputs and targets


class GivenLosses(SliceLosses):
    """The losses of a function of the user's, which is looked at while it runs.

    A count of integers is the number of targets. One of floating-point numbers is a divisor of the function's own, such
    as the sum of the weights of classes; it is known only once all parts have run.
    """

    def __init__(self, function: LossFunction, num_replicas: int) -> None:
        super().__init__(function)
        self.says_divisor = False  # in some call so far
        self.problem = ""  # why what it returns can't be added up, where it can't
        self._has_replicas, self._is_tried = num_replicas > 1, False

    def compute(self, outputs: Any, state: StepState, key: SliceKey) -> Tensors:
        """Returns (sum, count). Raises SlipstreamError where the function returns something else."""
        _, m, i = key
        targets, batch = state.batch.targets[m][i], state.batch
        total, count = _pair_of(self.function(outputs, targets))
        self.says_divisor |= count.is_floating_point()
        if not self._is_tried and (piece := _piece(outputs, targets)) is not None:
            cut = [1] if len(batch.slices[m]) > 1 else []
            cut += [0] if len(batch.slices) > 1 or self._has_replicas else []
            with torch.no_grad():
                self._try(piece, cut)
        return total, count

    def _try(self, piece: Piece, cut: list[int]) -> None:
        """Tries whether what the function returns of two pieces, joined along each dimension that is cut, is the sum of
        what it returns of each, and that it is no mean.

        Not of functions that take no other shapes, nor of those that return something else in a second call.
        """
        other = _halved(piece[0]), piece[1]
        try:
            first, again, second = (self._values(each) for each in (piece, piece, other))
            twice = self._values(_joined(piece, piece, 0))
            both = {dim: self._values(_joined(piece, other, dim)) for dim in cut}
        except Exception:  # a user's function may do anything with other shapes
            self._is_tried = True
            return
        if not all(map(math.isfinite, (*first, *second, *twice))):
            return  # numbers that a rehearsal made up
        self._is_tried = True
        if first != again:
            return
        bound = 1e-6 if _dtype_of(piece[0]) == torch.float64 else 0.05
        for dim, found in both.items():
            for name, one, two, joined in zip(("sum", "count"), first, second, found, strict=True):
                if abs(joined - one - two) > bound * (abs(one) + abs(two)):
                    parts = _DIMENSIONS[dim]
                    self.problem = (
                        f"the {name} that loss_fn returns is {one:.6g} of some {parts}, {two:.6g} of others, and "
                        f"{joined:.6g} of both together: it must be a sum over {parts}, as every part of a batch has "
                        f"its own. {PAIR}"
                    )
                    return
        is_mean = abs(twice[0] - first[0]) <= bound * abs(first[0]) and twice[1] > 1.5 * first[1] > 0
        if is_mean and first[0]:
            self.problem = (
                f"the sum that loss_fn returns is {first[0]:.6g} of some rows, and the same of all of them twice: it "
                f"is a mean, which would be divided by the count once more. {PAIR}"
            )

    def _values(self, piece: Piece) -> tuple[float, float]:
        total, count = _pair_of(self.function(*piece))
        return float(total), float(count)


def _pair_of(returned: Any) -> tuple[Tensor, Tensor]:
    """Returns the sum and the count of a loss function. Raises SlipstreamError where that isn't what it returned."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise SlipstreamError(f"loss_fn returned {_described(returned)}. {PAIR}")
    total, count = returned
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise SlipstreamError(f"the first value of loss_fn is {_described(total)}, not a sum, (). {PAIR}")
    if not isinstance(count, (Tensor, int, float)) or (isinstance(count, Tensor) and count.numel() != 1):
        raise SlipstreamError(f"the second value of loss_fn is {_described(count)}, not one number. {PAIR}")
    count = torch.as_tensor(count, device=total.device)
    if count.dtype in (torch.float16, torch.bfloat16):
        raise SlipstreamError(
            f"the second value of loss_fn is of {count.dtype}, too coarse to divide by: count in integers, or weights "
            "in float32."
        )
    return total.squeeze() if total.dim() else total, count.detach().squeeze()


def _described(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _tensors(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _like(outputs: Any, tensors: list[Tensor]) -> Any:
    return tuple(tensors) if isinstance(outputs, (tuple, list)) else tensors[0]


def _dtype_of(outputs: Any) -> torch.dtype:
    tensors: tuple[Tensor, ...] = _tensors(outputs)
    return tensors[0].dtype


def _piece(outputs: Any, targets: Tensor) -> Piece | None:
    """Returns a few rows and tokens from the first target that counts; None where none does, or the shapes say nothing
    about rows."""
    tensors = _tensors(outputs)
    rows = targets.shape[0] if targets.dim() else 0
    if not all(isinstance(each, Tensor) and each.dim() and each.shape[0] == rows for each in tensors):
        return None
    row = token = 0
    if not targets.is_floating_point():
        places = (targets != IGNORED).nonzero()
        if not len(places):
            return None
        row, token = int(places[0, 0]), int(places[0, 1]) if targets.dim() > 1 else 0
    place: tuple[slice, ...] = (slice(row, row + _MOST_ROWS),)
    if targets.dim() > 1 and all(each.dim() > 1 and each.shape[1] == targets.shape[1] for each in tensors):
        place = (*place, slice(token, token + _MOST_TOKENS))
    return _like(outputs, [each.detach()[place] for each in tensors]), targets[place]


def _halved(outputs: Any) -> Any:
    return _like(outputs, [each / 2 if each.is_floating_point() else each for each in _tensors(outputs)])


def _joined(one: Piece, two: Piece, dim: int) -> Piece:
    pairs = zip(_tensors(one[0]), _tensors(two[0]), strict=True)
    return _like(one[0], [torch.cat(pair, dim) for pair in pairs]), torch.cat([one[1], two[1]], dim)
