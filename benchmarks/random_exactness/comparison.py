"""What a random case is compared by: the numbers of a short training, of the unsplit model and of a Pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream import ParameterShare, Pipeline, SlipstreamError

BOUND = 1e-9  # of the largest relative error
FLOOR = 1e-6  # of the largest number of a group: some gradients are zero in theory
LORA_PREFIX = "base_model.model."
Numbers = dict[str, Tensor]


@dataclass
class Step:
    """The batches whose gradients one update adds up; each is what a subject takes."""

    batches: Sequence[Any]
    max_norm: float | None = None
    evaluates: bool = True


class Subject(Protocol):
    """What is trained: the unsplit model, or a Pipeline of it."""

    def evaluate(self, batch: Any) -> Tensor: ...
    def step(self, batches: Sequence[Any]) -> Tensor: ...
    def gradients(self) -> Numbers: ...
    def clip(self, max_norm: float) -> Tensor: ...
    def update(self) -> None: ...
    def state(self) -> Numbers: ...


def train(subject: Subject, steps: Sequence[Step]) -> Iterator[tuple[str, Numbers]]:
    """Yields what is compared, in groups with names: losses, gradients, norms, the state after all updates."""
    if steps[0].evaluates:
        yield "evaluation", {"loss": subject.evaluate(steps[0].batches[0])}
    for number, step in enumerate(steps, start=1):
        yield f"loss of step {number}", {"loss": subject.step(step.batches)}
        yield f"gradients of step {number}", subject.gradients()
        if step.max_norm is not None:
            yield f"norm of step {number}", {"norm": subject.clip(step.max_norm)}
        subject.update()
    yield "state", subject.state()
    if steps[-1].evaluates:
        yield "evaluation after all steps", {"loss": subject.evaluate(steps[-1].batches[0])}


class Descent:
    """Updates what is trained by one optimizer, which it makes at the first update."""

    def __init__(self, has_state: bool = False) -> None:
        """`has_state` for AdamW in the place of gradient descent."""
        self._has_state = has_state
        self._optimizer: torch.optim.Optimizer | None = None

    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._optimizer is None:
            if not (given := list(parameters)):  # a stage of activations alone has none
                return
            # With AdamW's own eps, the rounding of a gradient that is zero in theory, 1e-16 as in attention to a single
            # token, would become an update of 1e-10, and a weight off by more than the bound.
            self._optimizer = (
                torch.optim.AdamW(given, lr=0.01, eps=1e-6) if self._has_state else torch.optim.SGD(given, lr=0.05)
            )
        self._optimizer.step()
        self._optimizer.zero_grad()


@dataclass
class Unsplit:
    """A model that computes the loss of a batch in its own way."""

    model: nn.Module
    sums: Callable[[nn.Module, Any], Iterator[tuple[Tensor, Tensor]]]  # (sum, number of targets), then what is added
    during: Callable[[], AbstractContextManager[object]] = nullcontext
    descent: Descent = field(default_factory=Descent)
    more_gradients: Callable[[], Numbers] = dict  # beside the model's, which are taken

    def evaluate(self, batch: Any) -> Tensor:
        self.model.eval()
        with torch.no_grad(), self.during():
            parts = list(self.sums(self.model, batch))
        self.model.train()
        return sum(total.detach() for total, _ in parts) / sum(count for _, count in parts)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Returns the loss of the last batch over the targets of all."""
        with self.during():
            found = [list(self.sums(self.model, batch)) for batch in batches]
            count = sum(number for parts in found for _, number in parts)
            for parts in found:
                losses = [total / count for total, _ in parts]
                torch.stack(losses).sum().backward()
        return torch.stack(losses).sum().detach()

    def gradients(self) -> Numbers:
        named = self.model.named_parameters(remove_duplicate=False)
        own = {name.removeprefix(LORA_PREFIX): p.grad.clone() for name, p in named if p.grad is not None}
        return own | self.more_gradients()

    def clip(self, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def update(self) -> None:
        self.descent.update(self.model.parameters())

    def state(self) -> Numbers:
        state = self.model.state_dict()
        return {name.removeprefix(LORA_PREFIX): each.clone() for name, each in state.items() if torch.is_tensor(each)}


@dataclass
class Piped:
    """A Pipeline, and how it is given a batch."""

    pipe: Pipeline
    arguments: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    counts: Callable[[Sequence[Any]], float | None] = lambda _: None
    options: dict[str, Any] = field(default_factory=dict)
    during: Callable[[], AbstractContextManager[object]] = nullcontext
    descent: Descent = field(default_factory=Descent)
    more_gradients: Callable[[], Numbers] = dict  # beside the model's, which are taken
    refused_within: Callable[[], AbstractContextManager[object]] | None = None  # where steps can't have gradients

    def evaluate(self, batch: Any) -> Tensor:
        given, named = self.arguments(batch)
        with self.during():
            return self.pipe.evaluate(*given, **named)

    def step(self, batches: Sequence[Any]) -> Tensor:
        number = self.counts(batches)
        more = {} if number is None else {"num_targets": number}
        with self.during():
            for batch in batches:
                given, named = self.arguments(batch)
                if self.refused_within is not None:
                    self._check_refused(self.refused_within, *given, **named, **more, **self.options)
                loss = self.pipe.step(*given, **named, **more, **self.options)
        return loss

    def _check_refused(self, within: Callable[[], AbstractContextManager[object]], *given: Any, **options: Any) -> None:
        """Raises AssertionError unless a step is refused within a mode that gives no gradients."""
        try:
            with within():
                self.pipe.step(*given, **options)
        except SlipstreamError as error:
            if f"within torch.{within.__name__}" not in str(error):
                raise
            return
        raise AssertionError(f"a step within {within.__name__} ran")

    def gradients(self) -> Numbers:
        found = self.more_gradients()
        for piece in self.pipe.parameter_shards():
            if piece.parameter.grad is not None:
                found[piece.name] = _local(piece.parameter.grad).clone()
        return found

    def places(self) -> dict[str, tuple[ParameterShare, int]]:
        """Returns which rows of which share of each parameter this rank has."""
        return {piece.name: (piece.share, piece.first_row) for piece in self.pipe.parameter_shards()}

    def clip(self, max_norm: float) -> Tensor:
        return self.pipe.clip_grad_norm_(max_norm)

    def update(self) -> None:
        self.descent.update(self.pipe.parameters())

    def state(self) -> Numbers:
        return self.pipe.state_dict()


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "to_local", lambda: tensor)()


def largest_difference(
    expected: Sequence[tuple[str, Numbers]], found: Iterator[tuple[str, Numbers]], piped: Piped
) -> tuple[float, str]:
    """Returns the largest relative error, infinite where something is missing, and where it is.

    Stops at the first group that differs, as all after it follow from it.
    """
    worst, where = 0.0, ""
    for (group, wanted), (name, got) in zip(expected, found, strict=True):
        assert group == name, (group, name)
        error, place = _of_group(group, wanted, got, piped)
        error = _of_all_ranks(error)
        if not error <= worst:
            worst, where = error, f"{group}: {place}"
        if not error < BOUND:
            break
    return worst, where


def _of_group(group: str, wanted: Numbers, got: Numbers, piped: Piped) -> tuple[float, str]:
    is_state, is_gradient = group == "state", group.startswith("gradients")
    if is_state and dist.is_initialized() and dist.get_rank() > 0:
        return 0.0, ""
    if missing := _missing(wanted, got, is_gradient):
        return math.inf, f"{missing} is missing"
    places = piped.places() if is_gradient else {}
    floor = FLOOR * max((float(each.abs().max()) for each in wanted.values() if each.numel()), default=1.0)
    worst, where = 0.0, ""
    for name, own in got.items():
        if name not in wanted:
            if is_gradient and bool(own.count_nonzero()):
                return math.inf, f"{name} has a gradient and should have none"
            continue
        whole = wanted[name]
        if name in places:
            share, first = places[name]
            expected = share.take(whole)[first:][: len(own)] if whole.dim() else whole
        else:
            expected = whole
        if expected.shape != own.shape:
            return math.inf, f"{name} has the shape {tuple(own.shape)}, not {tuple(expected.shape)}"
        if not own.numel():
            continue
        size = max(float(whole.abs().max()), floor)
        error = float((own.double() - expected.double()).abs().max()) / size if size else 0.0
        if math.isnan(error):
            error = 0.0 if torch.equal(own.isnan(), expected.isnan()) else math.inf
        if error > worst:
            worst, where = error, name
    return worst, where


def _missing(wanted: Numbers, got: Numbers, is_gradient: bool) -> str:
    """Returns the first name that no rank has; the second name of a shared weight may be left out."""
    names = set(got)
    if is_gradient and dist.is_initialized():
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, names)
        names = set().union(*gathered)
    values = [wanted[name] for name in names if name in wanted]
    for name, each in wanted.items():
        if name in names or not each.count_nonzero():
            continue
        if any(other.shape == each.shape and torch.equal(other, each) for other in values):
            continue
        return name
    return ""


def _of_all_ranks(error: float) -> float:
    if not dist.is_initialized():
        return error
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, error)
    return max(gathered)


def recorded(trace: Iterator[tuple[str, Numbers]]) -> list[tuple[str, Numbers]]:
    """Returns what the unsplit model gives."""
    return [(group, {name: each.detach().clone() for name, each in numbers.items()}) for group, numbers in trace]


def perturbed(model: nn.Module) -> nn.Module:
    """Returns the model with parameters that are off by a few roundings."""
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype)
                parameter.mul_(1 + 1e-15 * noise)
    return model


def rounding_error(expected: Sequence[tuple[str, Numbers]], found: Iterator[tuple[str, Numbers]]) -> float:
    """Returns the largest relative error of the unsplit model against itself, with parameters a few roundings off."""
    worst = 0.0
    for (_, wanted), (_, got) in zip(expected, found, strict=True):
        floor = FLOOR * max((float(each.abs().max()) for each in wanted.values() if each.numel()), default=1.0)
        for name in (name for name, each in wanted.items() if each.numel() and each.is_floating_point()):
            size = max(float(wanted[name].abs().max()), floor)
            worst = max(worst, float((got[name] - wanted[name]).abs().max()) / size if size else 0.0)
    return worst
