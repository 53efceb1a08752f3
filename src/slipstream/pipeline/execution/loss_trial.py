"""Tries a user's loss function on made-up outputs: whether it adds up over the parts of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, NARROW, TakenStorages, Tensors, graph_leaves
from slipstream.pipeline.cut_batch import counted
from slipstream.pipeline.execution.losses import OutputForms, miscounted, no_divisor
from slipstream.pipeline.pipeline_options import PAIR, LossFunction

# A loss function is tried on whole outputs of up to so many numbers, else on a part with so many tokens and rows.
_MOST_NUMBERS = 2**20
_MOST_TOKENS, _MOST_ROWS = 16, 4
_DIMENSIONS = {0: "rows", 1: "tokens"}
_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative differences; 0.05 for other dtypes


class _Values(NamedTuple):
    total: float
    number: float  # the second value, as a float
    is_divisor: bool
    gradients: list[Tensor]  # gradients of the outputs; empty for a sum without a graph
    divides_with_gradient: bool


class LossTrial:
    """The values of a loss function on made-up outputs, and on these joined with others."""

    def __init__(self, function: LossFunction, forms: OutputForms, targets: Tensor, cut: Sequence[int]) -> None:
        self._function = function
        self._forms = forms
        self._targets = targets
        self._cut = cut
        self._shapes = [[*shape] for shape in forms.shapes]
        has_rows = all(shape[:1] == [*targets.shape[:1]] for shape in self._shapes)
        self._dims = {0: [0] * len(self._shapes)} if has_rows and targets.dim() else {}
        if targets.dim() > 1 and None not in forms.token_dims:
            self._dims[1] = [dim for dim in forms.token_dims if dim is not None]
        self._bound = _BOUNDS.get(forms.dtypes[0], 0.05)
        self._is_narrow = sum(map(math.prod, self._shapes)) > _MOST_NUMBERS
        if self._is_narrow:
            self._narrow()

    def _narrow(self) -> None:
        """Takes a few rows and tokens alone, from the first target that counts."""
        for dim, most in ((0, _MOST_ROWS), (1, _MOST_TOKENS)):
            if dim in self._dims:
                is_number = self._targets.is_floating_point()
                start = 0 if is_number else int((self._targets != IGNORED).nonzero()[0, dim])
                self._targets = self._targets.narrow(dim, start, min(most, self._targets.shape[dim] - start))
                for shape, place in zip(self._shapes, self._dims[dim], strict=True):
                    shape[place] = self._targets.shape[dim]

    def runs_on(self, draw: Callable[[Sequence[int]], Tensor]) -> bool:
        """Returns whether the function gives numbers of outputs that are drawn so. Raises SlipstreamError where it
        returns no loss."""
        self._outputs, self._others = self._drawn(draw), self._drawn(draw)
        try:
            self._first = self._values(self._outputs, self._targets)
        except SlipstreamError:
            raise
        # A user's function may raise anything on made-up outputs.
        except Exception:
            return False
        return math.isfinite(self._first.total)

    def check(self, has_backward: bool, adds_router_loss: bool) -> None:
        """Raises SlipstreamError for errors that the values show."""
        first = self._first
        expected = counted(self._targets)
        if first.divides_with_gradient and has_backward:
            raise SlipstreamError(DIVISOR_WITH_GRADIENT)
        if first.is_divisor and not math.isfinite(first.number):
            raise SlipstreamError(no_divisor(first.number))
        if first.number != expected and first.is_divisor and adds_router_loss:
            raise SlipstreamError(
                "router_loss with a loss_fn that says its own divisor: routers' losses are weighed by numbers of "
                "tokens. Leave router_loss out, or count targets."
            )
        if first.number != expected and not first.is_divisor and (self._cut or not self._is_narrow):
            raise SlipstreamError(miscounted(int(first.number), expected))
        if has_backward and not first.gradients:
            raise SlipstreamError(
                "the sum that loss_fn returns has no gradient: compute it from the outputs by torch, without detach(), "
                f"item() or no_grad(). {PAIR}"
            )
        try:
            if self._values(self._outputs, self._targets)[:2] == first[:2]:
                self._compare()
        except SlipstreamError:
            raise
        # Some functions accept no other shapes than those of their model.
        except Exception:
            return

    @property
    def says_divisor(self) -> bool:
        """Whether the function's second value is a divisor of its own."""
        return self._first.is_divisor

    def reached(self) -> tuple[set[int], list[Tensor]]:
        """Returns the storages of what the function's operations take, and the leaves beside outputs that need a
        gradient."""
        copies = tuple(output.clone() for output in self._outputs)
        with torch.enable_grad(), TakenStorages() as taken:
            total, _ = pair_of(self._function(copies if self._forms.is_tuple else copies[0], self._targets))
        return taken.found, graph_leaves([total])

    def _compare(self) -> None:
        """Compares the values of two pieces with those of both joined, and of one twice."""
        first = self._first
        second = self._values(self._others, self._targets)
        for dim in [dim for dim in self._cut if dim in self._dims]:
            joined = self._joined(self._others, dim)
            parts = _DIMENSIONS[dim]
            rule = f"it must be a sum over {parts}, as every part of a batch has its own. {PAIR}"
            sums = "sum", first.total, second.total, joined.total
            for name, one, two, both in (sums, ("count", first.number, second.number, joined.number)):
                if not abs(both - one - two) <= self._bound * (abs(one) + abs(two)):
                    raise SlipstreamError(
                        f"the {name} that loss_fn returns is {one:.6g} of some {parts}, {two:.6g} of others, and "
                        f"{both:.6g} of both together: {rule}"
                    )
            for *pair, whole, place in zip(
                first.gradients, second.gradients, joined.gradients, self._dims[dim], strict=False
            ):
                apart = torch.cat(pair, place)
                if apart.numel() and not (whole - apart).abs().max() <= self._bound * apart.abs().max():
                    raise SlipstreamError(
                        f"the gradients of the sum that loss_fn returns differ between some {parts} alone and the same "
                        f"next to others: {rule}"
                    )
        if 0 in self._dims and first.total:
            twice = self._joined(self._outputs, 0)
            is_mean = abs(twice.total - first.total) <= self._bound * abs(first.total)
            if is_mean and twice.number > 1.5 * first.number > 0:
                raise SlipstreamError(
                    f"the sum that loss_fn returns is {first.total:.6g} of some rows, and the same of all of them "
                    f"twice: it is a mean, which would be divided by the count once more. {PAIR}"
                )

    def _drawn(self, draw: Callable[[Sequence[int]], Tensor]) -> Tensors:
        drawn = zip(map(draw, self._shapes), self._forms.dtypes, strict=True)
        device = self._targets.device
        return tuple(
            (t if dtype.is_floating_point or dtype.is_complex else t > 0).to(device, dtype) for t, dtype in drawn
        )

    def _values(self, outputs: Tensors, targets: Tensor) -> _Values:
        leaves = [o.clone().requires_grad_(o.is_floating_point() or o.is_complex()) for o in outputs]
        with torch.enable_grad():
            # The function gets copies, as it may change its arguments in place.
            copies = tuple(leaf.clone() for leaf in leaves)
            total, count = pair_of(self._function(copies if self._forms.is_tuple else copies[0], targets))
            gradients: list[Tensor] = []
            if total.requires_grad:
                wanted = [
                    leaf if leaf.requires_grad else torch.zeros_like(total, requires_grad=True) for leaf in leaves
                ]
                gradients += torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        number = float(count.detach())
        is_divisor = count.is_floating_point()
        return _Values(float(total.detach()), number, is_divisor, gradients, count.requires_grad)

    def _joined(self, others: Tensors, dim: int) -> _Values:
        """Returns the values of the first outputs beside others of the same targets."""
        places = self._dims[dim]
        outputs = tuple(torch.cat(pair, place) for *pair, place in zip(self._outputs, others, places, strict=True))
        return self._values(outputs, torch.cat([self._targets] * 2, dim))


DRAWS: Sequence[Callable[[Sequence[int]], Tensor]] = (  # outputs for trials: logits, and others
    torch.randn,
    lambda shape: torch.rand(shape) * 0.9 + 0.05,
    lambda shape: torch.randn(shape).softmax(-1),
    lambda shape: torch.randn(shape).softmax(1 if len(shape) > 1 else 0),
)


DIVISOR_WITH_GRADIENT = (
    "the second value of loss_fn has a gradient, but the loss of all parts is divided by a number, which is known only "
    "once all have run. Return it with .detach(), if it is to be a constant, or as part of the sum."
)


def pair_of(returned: Any) -> tuple[Tensor, Tensor]:
    """Returns the sum and the count of a loss function. Raises SlipstreamError where it returned something else."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise SlipstreamError(f"loss_fn returned {_described(returned)}. {PAIR}")
    total, count = returned
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise SlipstreamError(f"the first value of loss_fn is {_described(total)}, not a sum, (). {PAIR}")
    if not isinstance(count, (Tensor, int, float)) or (isinstance(count, Tensor) and count.numel() != 1):
        raise SlipstreamError(f"the second value of loss_fn is {_described(count)}, not one number. {PAIR}")
    count = torch.as_tensor(count, device=total.device)
    if count.dtype in NARROW:
        raise SlipstreamError(
            f"the second value of loss_fn is of {count.dtype}, too coarse to divide by: count in integers, or weights "
            "in float32."
        )
    return total.squeeze() if total.dim() else total, count.squeeze()


def _described(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
