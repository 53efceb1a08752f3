"""The losses of the last stage: of every slice by itself, or of whole sequences once their last slice is there.

Or, in an evaluation, a function's results on every slice instead. And the loss that a step returns.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import kept_random_states
from slipstream.model import IGNORED, NARROW, Tensors, storage_id
from slipstream.model.attached_code import references
from slipstream.model.reached_tensors import NamedWeights, TakenStorages, graph_leaves
from slipstream.parallel import RankGroup
from slipstream.pipeline.cut_batch import SplitBatch, counted
from slipstream.pipeline.execution.rank_program import SliceKey
from slipstream.pipeline.execution.step_state import StepState
from slipstream.pipeline.pipeline_options import PAIR, LossFunction, SequenceLoss

TokenOutputs = Callable[[Tensor, Tensor], Tensor]  # (logits (b, T, V), targets (b, T)) -> (b, T, ...)
TokenLosses = Callable[[Tensor, Tensor], Tensor]  # (logits (b, T, V), targets (b, T)) -> (b, T), zero where none counts


class Losses(ABC):
    """How the last stage makes a loss of its outputs, slice by slice."""

    is_given = False
    """Whether it is a function of the user's, which is to be tried."""
    may_say_divisor = False
    """Whether it may say, once all parts have run, what their sum is divided by."""
    says_divisor = False
    """Whether it has done so in some call so far."""

    @abstractmethod
    def compute(self, outputs: Tensor, state: StepState, key: SliceKey) -> Tensors:
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

    def compute(self, outputs: Tensor, state: StepState, key: SliceKey) -> Tensors:
        """Returns (sum, count) of a slice, which F computes and R repeats."""
        _, m, i = key
        return self.function(outputs, state.batch.targets[m][i])

    def add(self, computed: Tensors, state: StepState, key: SliceKey, has_backward: bool) -> Tensor:
        """Adds a slice to the step's loss; returns the root of its backward, which begins with the weight of each
        target."""
        total, count = computed
        state.loss += total.detach()
        state.count += count
        return total


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

    def compute(self, outputs: Tensor, state: StepState, key: SliceKey) -> Tensors:
        """Returns a slice's sums of log-probabilities, one or two for each of the n sequences of its microbatch."""
        _, m, i = key
        sequences = state.batch.sequences[m]
        log_probabilities = -self.token_losses(outputs, state.batch.targets[m][i])
        sums = log_probabilities.new_zeros(sequences.count * self.loss.num_sums)
        return (sums.index_add(0, sequences.numbers[i].flatten(), log_probabilities.flatten()),)

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


@dataclass(frozen=True)
class CollectedOutputs(Losses):
    """The results that an evaluation collects of every slice in place of a loss."""

    function: TokenOutputs
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by microbatch and slice

    def compute(self, outputs: Tensor, state: StepState, key: SliceKey) -> Tensors:
        """Returns the collected tensor of a slice."""
        _, m, i = key
        return (self.function(outputs, state.batch.targets[m][i]),)

    def add(self, computed: Tensors, state: StepState, key: SliceKey, has_backward: bool) -> Tensor:
        """Collects it."""
        _, m, i = key
        (self.outputs[m, i],) = computed
        return self.outputs[m, i]


_MOST_NUMBERS = 2**20  # in the outputs that a loss function is tried on; of larger ones it is tried on these:
_MOST_TOKENS, _MOST_ROWS = 16, 4
_DIMENSIONS = {0: "rows", 1: "tokens"}
_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3}  # of relative differences; of other dtypes 0.05


@dataclass(frozen=True)
class OutputForms:
    """The shapes and dtypes of the last layer's outputs, and which dim of each has the tokens that slices cut."""

    shapes: Sequence[Sequence[int]]
    dtypes: Sequence[torch.dtype]
    token_dims: Sequence[int | None]
    is_tuple: bool = False


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
        self._has_replicas, self._adds_router_loss = num_replicas > 1, adds_router_loss
        self._num_sharing = num_sharing  # ranks, each with some tokens of every slice
        self._tried: set[object] = set()
        self._own: Sequence[Tensor] = ()  # parameters of the function, in which the trial's backward adds gradients

    def compute(self, outputs: Any, state: StepState, key: SliceKey) -> Tensors:
        """Returns (sum, count). Raises SlipstreamError where the function returns something else."""
        _, m, i = key
        total, count = _pair_of(self.function(outputs, state.batch.targets[m][i]))
        if count.requires_grad:
            raise SlipstreamError(_DIVISOR_WITH_GRADIENT)
        self.says_divisor |= count.is_floating_point()
        return total, count

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
        trial = _Trial(self.function, forms_of(piece, targets), targets, cut)
        with kept_random_states():
            torch.manual_seed(0)
            for draw in _DRAWS:
                if trial.runs_on(draw):
                    trial.check(has_backward, self._adds_router_loss)
                    self._check_reads(trial, batch.loss_scale if has_backward else None)
                    break
            else:
                self._check_held()

    def _check_reads(self, trial: _Trial, loss_scale: float | None) -> None:
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


class _Values(NamedTuple):
    total: float
    number: float  # the count
    is_divisor: bool
    gradients: list[Tensor]  # of outputs; none: the sum has no graph
    divides_with_gradient: bool


class _Trial:
    """The values of a loss function on made-up outputs, and on these joined with others."""

    def __init__(self, function: LossFunction, forms: OutputForms, targets: Tensor, cut: Sequence[int]) -> None:
        self._function, self._forms, self._targets, self._cut = function, forms, targets, cut
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
        except Exception:  # a user's function may do anything with made-up outputs
            return False
        return math.isfinite(self._first.total)

    def check(self, has_backward: bool, adds_router_loss: bool) -> None:
        """Raises SlipstreamError for errors that the values show."""
        first, expected = self._first, counted(self._targets)
        if first.divides_with_gradient and has_backward:
            raise SlipstreamError(_DIVISOR_WITH_GRADIENT)
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
        except Exception:  # of a function that takes no other shapes
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
            total, _ = _pair_of(self._function(copies if self._forms.is_tuple else copies[0], self._targets))
        return taken.found, graph_leaves([total])

    def _compare(self) -> None:
        """Compares the values of two pieces with those of both joined, and of one twice."""
        first, second = self._first, self._values(self._others, self._targets)
        for dim in [dim for dim in self._cut if dim in self._dims]:
            joined, parts = self._joined(self._others, dim), _DIMENSIONS[dim]
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
            copies = tuple(leaf.clone() for leaf in leaves)  # which it may change in place
            total, count = _pair_of(self._function(copies if self._forms.is_tuple else copies[0], targets))
            gradients: list[Tensor] = []
            if total.requires_grad:
                wanted = [
                    leaf if leaf.requires_grad else torch.zeros_like(total, requires_grad=True) for leaf in leaves
                ]
                gradients += torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        number, is_divisor = float(count.detach()), count.is_floating_point()
        return _Values(float(total.detach()), number, is_divisor, gradients, count.requires_grad)

    def _joined(self, others: Tensors, dim: int) -> _Values:
        """Returns the values of the first outputs beside others of the same targets."""
        places = self._dims[dim]
        outputs = tuple(torch.cat(pair, place) for *pair, place in zip(self._outputs, others, places, strict=True))
        return self._values(outputs, torch.cat([self._targets] * 2, dim))


_DRAWS: Sequence[Callable[[Sequence[int]], Tensor]] = (  # logits, or other outputs that a loss function may want
    torch.randn,
    lambda shape: torch.rand(shape) * 0.9 + 0.05,
    lambda shape: torch.randn(shape).softmax(-1),
    lambda shape: torch.randn(shape).softmax(1 if len(shape) > 1 else 0),
)


_DIVISOR_WITH_GRADIENT = (
    "the second value of loss_fn has a gradient, but the loss of all parts is divided by a number, which is known only "
    "once all have run. Return it with .detach(), if it is to be a constant, or as part of the sum."
)


def _described_parameters(parameters: Sequence[Tensor]) -> str:
    """Returns a clause on the parameters of a loss function."""
    return f"loss_fn has a parameter of its own, {tuple(parameters[0].shape)}"


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


def _pair_of(returned: Any) -> tuple[Tensor, Tensor]:
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


class LossDivisor:
    """Finds the divisor of the sum of a step's losses: the targets that count, or a given function's sum."""

    def __init__(self, losses: Losses) -> None:
        self.may_be_own = losses.may_say_divisor
        """Whether a step may find what its gradients are to be divided by, on all ranks alike."""
        self.of_gradients = 1.0
        """What gradients of the last step are still to be divided by."""

    def find(self, count: float, is_own: bool, batch: SplitBatch) -> float:
        """Returns it, of the counts of all ranks. Raises SlipstreamError where these can't be it."""
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
    count: float = num_targets.item() if hasattr(num_targets, "item") else num_targets  # of a tensor
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
