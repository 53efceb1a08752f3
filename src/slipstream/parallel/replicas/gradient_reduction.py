"""Reduces a step's gradients: first over tensor ranks where they are partial, then over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.replicas.buckets import Bucket, NamedParameter, PendingReduction, in_buckets
from slipstream.parallel.replicas.master_parameters import MasterParameters


class _StageCollectives(NamedTuple):
    """One stage's collectives, in order: buckets to sum over tensor ranks, then to sum or to scatter over replicas."""

    partial: list[tuple[RankGroup, Bucket]]
    summed: list[Bucket]
    scattered: list[Bucket]


class GradientReduction:
    """Sums gradients over the ranks: `begin`, `reduce` of each stage after its last backward, `finish` complete
    `.grad`.

    The loss is divided by the tokens of the whole batch, so replicas' gradients are summed, never averaged: buckets of
    several parameters are all-reduced or, with sharded masters, reduce-scattered, so that a replica gets its rows
    (ZeRO-1: Rajbhandari et al. 2020, "ZeRO", section 5.1). That runs while other stages still work, and `finish` waits
    for it. Every trained parameter takes part, with zeros where a backward left it no gradient, so that all ranks call
    the same collectives in the same order. With one replica and nothing partial, gradients stay where backward leaves
    them.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[NamedParameter]],
        data: RankGroup,
        tensor: RankGroup,
        added_over: Callable[[str], tuple[int, ...]],
        masters: MasterParameters,
        whole: Collection[str] = (),
    ) -> None:
        """Collective.

        Args:
            stages: the parameters in which each of this rank's stages leaves gradients, under the model's names. One
                that two stages hold is reduced with the first of them, whose backward ends last.
            data: the replicas.
            tensor: the ranks that share every layer.
            added_over: returns the tensor ranks over which a parameter's gradients are summed first; () for none.
            masters: receive the gradients, in their dtype; their buckets are as large as the gradients'.
            whole: names whose gradients `finish` leaves in `.grad`, of this step alone and with all rows, until
                `deliver` replaces them: tied weights, whose two gradients must be added first.
        """
        self._stages = _each_once(stages)
        self._data, self._masters, self._whole = data, masters, frozenset(whole)
        self._named = [named for parameters in self._stages.values() for named in parameters]
        self._added_over = {name: ranks for name in sorted(dict(self._named)) if (ranks := added_over(name))}
        self._groups = {ranks: _subgroup(tensor, ranks) for ranks in sorted({*self._added_over.values()})}
        for _, parameter in self._named:
            if parameter.requires_grad:
                parameter.grad_dtype = masters.dtype_of(parameter)  # in which every slice's gradient is added
        self._plans: dict[int, _StageCollectives] = {}
        self._missing: set[int] = set()
        self._earlier: dict[int, Tensor | None] = {}
        self._started: list[PendingReduction] = []
        self._scale, self._is_divided = 1.0, False

    def begin(self, scale: float = 1.0, is_divided: bool = False) -> None:
        """Begins a step whose losses are multiplied by `scale` (see LossScale), by which its gradients are divided;
        `is_divided` where `finish` may be given a divisor.

        Gradients of earlier steps are set aside, so that only this step's are reduced. Raises SlipstreamError where a
        parameter was frozen too late.
        """
        self._masters.check_trained()
        self._scale, self._started, self._earlier = scale, [], {}
        self._is_divided = is_divided or scale != 1
        self._plans = {stage: self._plan(parameters) for stage, parameters in self._stages.items()}
        self._missing = {stage for stage, plan in self._plans.items() if any(plan)}
        for name, parameter in self._handled():
            if self._masters.updates(name, parameter):
                self._earlier[id(parameter)] = parameter.grad
            parameter.grad = None

    def copy_earlier(self, is_written: Callable[[Tensor], bool]) -> None:
        """Copies what is set aside and lies where this step writes."""
        for key, earlier in self._earlier.items():
            if earlier is not None and is_written(earlier):
                self._earlier[key] = earlier.clone()

    @torch.no_grad()
    def reduce(self, stage: int) -> None:
        """Starts the reduction of a stage's gradients, after its last backward in this step. Collective."""
        plan = self._plans[stage]
        self._missing.discard(stage)
        for _, parameter in self._stages[stage] if self._data.size > 1 else ():
            if parameter.grad is not None and parameter.grad.is_sparse:  # whose rows differ between replicas
                parameter.grad = parameter.grad.to_dense()
        for group, bucket in plan.partial:
            for _, parameter, total in PendingReduction.sum(bucket, group).finish():
                parameter.grad = total
        self._started += [PendingReduction.sum(bucket, self._data) for bucket in plan.summed]
        self._started += [PendingReduction.scatter(bucket, self._data) for bucket in plan.scattered]

    @torch.no_grad()
    def finish(self, divisor: float = 1.0) -> None:
        """Waits for all reductions and adds this step's gradients, divided by `divisor`, to the earlier ones, in the
        masters' `.grad`.

        The parameters' own `.grad` are then None, unless they are their own masters or in `whole`.
        """
        if self._missing:
            raise RuntimeError(f"the gradients of stages {sorted(self._missing)} were not reduced in this step")
        self._scale *= divisor
        for name, parameter, gradient in self._reduced():
            if name in self._whole:
                parameter.grad = gradient
            else:
                parameter.grad = self._earlier.pop(id(parameter), None)
                self._masters.add(name, self._unscaled(gradient))

    @torch.no_grad()
    def deliver(self, name: str, total: Tensor) -> None:
        """Adds this step's gradient, with all rows, of a parameter in `whole`, after `finish`. It takes the tensor
        over."""
        for other, parameter in self._handled():
            if other == name:
                parameter.grad = self._earlier.pop(id(parameter), None)
        self._masters.add_whole(name, self._unscaled(total))

    def _reduced(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yields this replica's part of every gradient, in the order in which reductions end."""
        if self._data.size == 1:
            handled = [(name, parameter, parameter.grad) for name, parameter in self._handled()]
            yield from ((name, parameter, gradient) for name, parameter, gradient in handled if gradient is not None)
        for started in self._started:
            yield from started.finish()
        self._started = []

    def _unscaled(self, gradient: Tensor) -> Tensor:
        return gradient if self._scale == 1 else gradient.div_(self._scale)

    def _plan(self, parameters: Sequence[NamedParameter]) -> _StageCollectives:
        trained = [named for named in parameters if named[1].requires_grad]
        partial = [
            (group, bucket)
            for ranks, group in self._groups.items()
            for bucket in self._in_buckets(named for named in trained if self._added_over.get(named[0]) == ranks)
        ]
        if self._data.size == 1:
            return _StageCollectives(partial, [], [])
        whole = [named for named in trained if not self._masters.is_sharded or named[0] in self._whole]
        rows = [named for named in trained if self._masters.is_sharded and named[0] not in self._whole]
        return _StageCollectives(partial, self._in_buckets(whole), self._in_buckets(rows))

    def _in_buckets(self, parameters: Iterable[NamedParameter]) -> list[Bucket]:
        return in_buckets(parameters, self._masters.dtype_of, self._masters.bucket_bytes)

    def _handled(self) -> Iterator[NamedParameter]:
        """Yields the parameters whose gradients don't simply stay where backward leaves them."""
        everything = self._data.size > 1 or self._is_divided
        for name, parameter in self._named:
            special = name in self._whole or name in self._added_over or not self._masters.updates(name, parameter)
            if parameter.requires_grad and (everything or special):
                yield name, parameter


def _each_once(stages: Mapping[int, Sequence[NamedParameter]]) -> dict[int, Bucket]:
    seen: set[int] = set()
    once: dict[int, Bucket] = {}
    for stage in sorted(stages):
        once[stage] = [(name, parameter) for name, parameter in stages[stage] if id(parameter) not in seen]
        seen |= {id(parameter) for _, parameter in once[stage]}
    return once


def _subgroup(tensor: RankGroup, ranks: tuple[int, ...]) -> RankGroup:
    """Returns a group of some tensor ranks; what they exchange is counted for the axis."""
    if len(ranks) == tensor.size:
        return tensor
    members = [tensor.global_ranks[rank] for rank in ranks]
    group = RankGroup(dist.new_group(members, use_local_synchronization=True))
    group.calls, group.payload = tensor.calls, tensor.payload
    return group
