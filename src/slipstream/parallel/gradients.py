"""Reduces a step's gradients over tensor ranks and replicas, and keeps the parameters that the optimizer updates with
them.

Buckets: tensors of several parameters in one flat buffer, so that one collective exchanges them all.

A parameter's rows (dim 0; a scalar is one row) are spread over replicas as evenly as possible; where they don't divide,
the first replicas have one more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.cost import BUCKET_BYTES
from slipstream.errors import SlipstreamError
from slipstream.parallel.host_link import HostLink
from slipstream.parallel.parameter_share import part_bounds
from slipstream.parallel.rank_group import PendingWork, RankGroup, StagedWork

NamedParameter = tuple[str, nn.Parameter]
Bucket = list[NamedParameter]
RowBounds = Callable[[int, int, int], tuple[int, int]]  # (number of rows, owners, owner) -> [start, stop)


@dataclass(frozen=True)
class PendingReduction:
    """A running collective over the replicas: its inputs and outputs, and the parameters of these gradients."""

    bucket: Bucket
    shapes: Iterable[Sequence[int]]  # shapes of the gradients in the result
    sent: Tensor  # kept until the collective ends
    result: Tensor  # the whole sum, or this replica's rows of a scatter
    work: PendingWork | None

    @classmethod
    def sum(cls, bucket: Bucket, group: RankGroup) -> PendingReduction:
        """Starts to sum the gradients of a bucket, which it takes. Collective."""
        gradients = take_gradients(bucket)
        flat = flatten_tensors(gradients)
        return cls(bucket, [gradient.shape for gradient in gradients], flat, flat, group.start_sum(flat))

    @classmethod
    def scatter(cls, bucket: Bucket, group: RankGroup, bounds: RowBounds = part_bounds) -> PendingReduction:
        """Starts to sum the gradients of a bucket, which it takes, each rank's rows for that rank. Collective."""
        gradients = take_gradients(bucket)
        packed = pack_rows(gradients, group.size, bounds)
        shapes = shapes_of_rows(gradients, group.rank, group.size, bounds)
        return cls(bucket, shapes, packed, *group.start_reduce_scatter(packed))

    @property
    def ends_on_a_stream(self) -> bool:
        """Whether waiting for the collective keeps only the current stream, and not this thread."""
        return self.result.is_cuda and not isinstance(self.work, StagedWork)

    def finish(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Waits for the collective, and yields the parameters with their gradients, which are views of the result."""
        if self.work is not None:
            self.work.wait()
        for (name, parameter), gradient in zip(self.bucket, unflatten_tensors(self.result, self.shapes), strict=True):
            yield name, parameter, gradient


def in_buckets(
    parameters: Iterable[NamedParameter],
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Returns the parameters in order, those of each dtype in buckets of at most `bucket_bytes`.

    A larger parameter has a bucket for itself.
    """
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, Bucket] = {}
    for name, parameter in parameters:
        dtype = dtype_of(parameter)
        room = bucket_bytes // dtype.itemsize - parameter.numel()
        if dtype not in filling or sum(other.numel() for _, other in filling[dtype]) > room:
            filling[dtype] = []
            buckets.append(filling[dtype])
        filling[dtype].append((name, parameter))
    return buckets


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the tensors in one tensor of one dimension: a new one, or a view of a single one."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_tensors(flat: Tensor, shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    """Returns views of these shapes, one after the other; the rest at the end is padding."""
    views = []
    position = 0
    for shape in shapes:
        views.append(flat[position : position + prod(shape)].view(tuple(shape)))
        position += prod(shape)
    return views


def take_gradients(bucket: Bucket) -> list[Tensor]:
    """Moves the gradients of a bucket's parameters out of `.grad` and returns them, zeros where there is none."""
    gradients = []
    for _, parameter in bucket:
        gradient, parameter.grad = parameter.grad, None
        gradients.append(torch.zeros_like(parameter, dtype=parameter.grad_dtype) if gradient is None else gradient)
    return gradients


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a gradient to the parameter's `.grad`, or makes it that; it takes the tensor over."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def rows_of(tensor: Tensor, owner: int, num_owners: int, bounds: RowBounds = part_bounds) -> range:
    """Returns the rows of `tensor` that belong to one of several owners."""
    return range(*bounds(tensor.shape[0] if tensor.ndim else 1, num_owners, owner))


def take_rows(tensor: Tensor, rows: range) -> Tensor:
    """Returns a view of these rows; for a scalar itself or, with no rows, nothing."""
    if tensor.ndim:
        return tensor[rows.start : rows.stop]
    return tensor if rows else tensor.reshape(1)[:0]


def pack_rows(tensors: Sequence[Tensor], num_owners: int, bounds: RowBounds = part_bounds) -> Tensor:
    """Returns each owner's rows of all tensors in one line, padded with zeros: (num_owners, width)."""
    pieces = [piece for owner in range(num_owners) for piece in _line(tensors, owner, num_owners, bounds)]
    return torch.cat(pieces).view(num_owners, sum(piece.numel() for piece in pieces) // num_owners)


def gather_rows(tensors: Sequence[Tensor], data: RankGroup) -> None:
    """Copies every replica's rows to the tensors, which have its own rows already. Collective."""
    mine = torch.cat(_line(tensors, data.rank, data.size))
    for owner, line in enumerate(data.all_gather(mine)):
        pieces = unflatten_tensors(line, shapes_of_rows(tensors, owner, data.size))
        for tensor, piece in zip(tensors, pieces, strict=True):
            take_rows(tensor, rows_of(tensor, owner, data.size)).copy_(piece)


def shapes_of_rows(
    tensors: Iterable[Tensor], owner: int, num_owners: int, bounds: RowBounds = part_bounds
) -> list[torch.Size]:
    """Returns the shapes that one owner's rows of each tensor have, by which `unflatten_tensors` undoes `pack_rows`."""
    return [take_rows(tensor, rows_of(tensor, owner, num_owners, bounds)).shape for tensor in tensors]


def _line(tensors: Sequence[Tensor], owner: int, num_owners: int, bounds: RowBounds = part_bounds) -> list[Tensor]:
    """Returns an owner's rows of every tensor, and zeros up to the first owner's length, which is the largest."""
    first, mine = (
        [take_rows(tensor, rows_of(tensor, place, num_owners, bounds)).reshape(-1) for tensor in tensors]
        for place in (0, owner)
    )
    padding = sum(piece.numel() for piece in first) - sum(piece.numel() for piece in mine)
    return [*mine, tensors[0].new_zeros(padding)]


class _StageCollectives(NamedTuple):
    """One stage's collectives, in order: buckets to sum over tensor ranks, then to sum or to scatter over replicas."""

    partial: list[tuple[RankGroup, Bucket]]
    summed: list[tuple[RankGroup, Bucket]]
    scattered: list[tuple[RankGroup, Bucket]]


class GradientReduction:
    """Sums gradients over the ranks: `begin`, `reduce` of each stage after its last backward, `finish` complete
    `.grad`.

    The loss is divided by the tokens of the whole batch, so replicas' gradients are summed, never averaged: buckets of
    several parameters are all-reduced or, with sharded masters, reduce-scattered, so that a replica gets its rows
    (ZeRO-1: Rajbhandari et al. 2020, "ZeRO", section 5.1). That runs while other stages still work, and `finish` waits
    for it. With masters on the host each gradient is copied out as soon as it is reduced. Every trained parameter takes
    part, with zeros where a backward left it no gradient, so that all ranks call the same collectives in the same
    order. With one replica and nothing partial, gradients stay where backward leaves them.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[NamedParameter]],
        copies_of: Callable[[str], RankGroup],
        tensor: RankGroup,
        added_over: Callable[[str], tuple[int, ...]],
        masters: MasterParameters,
        whole: Collection[str] = (),
    ) -> None:
        """Collective.

        Args:
            stages: the parameters in which each of this process's stages leaves gradients, under the model's names. One
                that several hold, as ranks of one process may, is reduced by `finish`, once all of them have ended.
            copies_of: returns the ranks that hold a parameter and see other tokens.
            tensor: the ranks that share every layer.
            added_over: returns the tensor ranks over which a parameter's gradients are summed first; () for none.
            masters: receive the gradients, in their dtype; their buckets are as large as the gradients'.
            whole: names whose gradients `finish` leaves in `.grad`, of this step alone and with all rows, until
                `deliver` replaces them: tied weights, whose two gradients must be added first.
        """
        self._stages, self._shared = _by_stage(stages)
        self._masters = masters
        self._whole = frozenset(whole)
        self._copies = {name: copies_of(name) for named in stages.values() for name, _ in named}
        self._sharing = [group for group in dict.fromkeys(self._copies.values()) if group.size > 1]
        self._named = [named for parameters in (*self._stages.values(), self._shared) for named in parameters]
        self._added_over = {name: ranks for name in sorted(dict(self._named)) if (ranks := added_over(name))}
        self._groups = {ranks: _subgroup(tensor, ranks) for ranks in sorted({*self._added_over.values()})}
        for _, parameter in self._named:
            if parameter.requires_grad:
                parameter.grad_dtype = masters.dtype_of(parameter)  # dtype of the sum over slices
        self._plans: dict[int, _StageCollectives] = {}
        self._missing: set[int] = set()
        self._earlier: dict[int, Tensor | None] = {}
        self._started: list[PendingReduction] = []
        self._taken: list[tuple[str, nn.Parameter, Tensor]] = []  # gradients on their way to the host
        self._scale = 1.0
        self._is_divided = False

    def begin(self, scale: float = 1.0, is_divided: bool = False) -> None:
        """Begins a step whose losses are multiplied by `scale` (see LossScale), by which its gradients are divided;
        `is_divided` where `finish` may be given a divisor.

        Gradients of earlier steps are set aside, so that only this step's are reduced. Raises SlipstreamError where a
        parameter was frozen too late.
        """
        self._masters.check_trained()
        self._scale = scale
        self._started = []
        self._taken = []
        self._earlier = {}
        self._is_divided = is_divided or scale != 1
        self._missing = set()
        for stage, parameters in self._stages.items():
            self._plans[stage] = plan = self._plan(parameters)
            if any(plan):
                self._missing.add(stage)
        for name, parameter in self._handled():
            if self._masters.updates(name, parameter):
                self._earlier[id(parameter)] = parameter.grad
            parameter.grad = None

    def copy_earlier(self, is_written: Callable[[Tensor], bool]) -> None:
        """Copies gradients that are set aside where this step writes."""
        for key, earlier in self._earlier.items():
            if earlier is not None and is_written(earlier):
                self._earlier[key] = earlier.clone()

    @torch.no_grad()
    def reduce(self, stage: int) -> None:
        """Starts the reduction of a stage's gradients, after its last backward in this step. Collective."""
        self._missing.discard(stage)
        self._start(self._stages[stage], self._plans[stage])

    def _start(self, parameters: Sequence[NamedParameter], plan: _StageCollectives) -> None:
        for name, parameter in parameters:
            if self._copies[name].size > 1 and parameter.grad is not None and parameter.grad.is_sparse:
                # The rows of a sparse gradient differ between replicas.
                parameter.grad = parameter.grad.to_dense()
        for group, bucket in plan.partial:
            for _, parameter, total in PendingReduction.sum(bucket, group).finish():
                parameter.grad = total
        started = [PendingReduction.sum(bucket, group) for group, bucket in plan.summed]
        started += [PendingReduction.scatter(bucket, group) for group, bucket in plan.scattered]
        if self._masters.host is not None:
            started = self._take_out(parameters, started, self._masters.host)
        self._started += started

    @torch.no_grad()
    def finish(self, divisor: float = 1.0) -> None:
        """Waits for all reductions and adds this step's gradients, divided by `divisor`, to the earlier ones, in the
        masters' `.grad`.

        The parameters' own `.grad` are then None, unless they are their own masters or in `whole`.
        """
        if self._missing:
            raise RuntimeError(f"the gradients of stages {sorted(self._missing)} were not reduced in this step")
        if self._shared:
            self._start(self._shared, self._plan(self._shared))
        self._scale *= divisor
        host = self._masters.host
        for name, parameter, gradient in self._reduced() if host is None else self._on_host(host):
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
        for name, parameter in [*self._handled()]:
            if self._copies[name].size == 1 and parameter.grad is not None:
                yield name, parameter, parameter.grad
        for started in self._started:
            yield from started.finish()
        self._started = []

    def _take_out(
        self, parameters: Sequence[NamedParameter], started: Sequence[PendingReduction], host: HostLink
    ) -> list[PendingReduction]:
        """Starts to copy gradients to the host: those that are complete, and those that will be without this thread.
        Returns the other reductions."""
        for name, parameter in parameters:
            if self._copies[name].size == 1 and name not in self._whole and parameter.grad is not None:
                self._taken.append((name, parameter, host.take(name, parameter.grad)))
                parameter.grad = None
        with host.beside():
            for reduction in started:
                if reduction.ends_on_a_stream:
                    self._taken += self._taken_out(reduction.finish(), host)
        return [reduction for reduction in started if not reduction.ends_on_a_stream]

    def _taken_out(
        self, reduced: Iterable[tuple[str, nn.Parameter, Tensor]], host: HostLink
    ) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yields copies on the host, on their way; of parameters in `whole` the gradients themselves, as others are
        added to them first."""
        for name, parameter, gradient in reduced:
            yield name, parameter, gradient if name in self._whole else host.take(name, gradient)

    def _on_host(self, host: HostLink) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Returns this replica's part of every gradient, on the host but for those in `whole`."""
        arrived = [*self._taken, *self._taken_out(self._reduced(), host)]
        self._taken = []
        host.wait()
        return arrived

    def _unscaled(self, gradient: Tensor) -> Tensor:
        return gradient if self._scale == 1 else gradient.div_(self._scale)

    def _plan(self, parameters: Sequence[NamedParameter]) -> _StageCollectives:
        if not self._sharing and not self._groups:
            return _StageCollectives([], [], [])
        trained = [named for named in parameters if named[1].requires_grad]
        partial = [
            (group, bucket)
            for ranks, group in self._groups.items()
            for bucket in self._in_buckets(named for named in trained if self._added_over.get(named[0]) == ranks)
        ]
        plan = _StageCollectives(partial, [], [])
        for group in self._sharing:
            here = [named for named in trained if self._copies[named[0]] is group]
            for scatters, collectives in ((False, plan.summed), (True, plan.scattered)):
                alike = [named for named in here if self._scatters(named[0]) == scatters]
                collectives.extend((group, bucket) for bucket in self._in_buckets(alike))
        return plan

    def _scatters(self, name: str) -> bool:
        return self._masters.is_spread(name) and name not in self._whole

    def _in_buckets(self, parameters: Iterable[NamedParameter]) -> list[Bucket]:
        return in_buckets(parameters, self._masters.dtype_of, self._masters.bucket_bytes)

    def _handled(self) -> Iterator[NamedParameter]:
        """Yields the parameters whose gradients don't simply stay where backward leaves them."""
        for name, parameter in self._named:
            special = name in self._whole or name in self._added_over or not self._masters.updates(name, parameter)
            if parameter.requires_grad and (self._is_divided or self._copies[name].size > 1 or special):
                yield name, parameter


def _by_stage(stages: Mapping[int, Sequence[NamedParameter]]) -> tuple[dict[int, Bucket], Bucket]:
    """Returns the parameters that one stage alone holds, by stage, and those of several, each once."""
    holders = Counter(id(parameter) for named in stages.values() for _, parameter in named)
    own = {
        stage: [(name, parameter) for name, parameter in stages[stage] if holders[id(parameter)] == 1]
        for stage in sorted(stages)
    }
    shared = {
        id(parameter): (name, parameter)
        for stage in sorted(stages)
        for name, parameter in stages[stage]
        if holders[id(parameter)] > 1
    }
    return own, [*shared.values()]


def _subgroup(tensor: RankGroup, ranks: tuple[int, ...]) -> RankGroup:
    """Returns a group of some tensor ranks; their exchanges are counted for the axis."""
    if len(ranks) == tensor.size:
        return tensor
    members = [tensor.global_ranks[rank] for rank in ranks]
    group = RankGroup(dist.new_group(members, use_local_synchronization=True))
    group.calls, group.payload = tensor.calls, tensor.payload
    return group


class MasterParameters:
    """Every parameter's master, which the optimizer updates; after its step `publish` updates the parameters.

    Without sharding and another dtype the masters are the parameters. With a wider `dtype` they are copies, which keep
    updates that are too small for the parameters' dtype (Micikevicius et al. 2018, "Mixed Precision Training", section
    3.1). Sharded (ZeRO-1: Rajbhandari et al. 2020, "ZeRO", P_os), a replica's masters are its rows (dim 0) of each:
    views of the parameters, or copies where the dtype differs, so that the optimizer's state is spread over replicas
    too. A parameter of fewer rows than replicas has no master on some. On the host they are copies, of any dtype, with
    their gradients beside them. Frozen parameters are always their own masters, where they are.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        copies_of: Callable[[str], RankGroup],
        shard: bool = False,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        on_host: bool = False,
    ) -> None:
        """`parameters` are the rank's, each once; `copies_of` returns the ranks that hold one and see other tokens; a
        collective exchanges about `bucket_bytes`; `on_host` says whether the masters are in the host's memory.

        Raises SlipstreamError where `dtype` can't hold a parameter's values.
        """
        self._dtype = dtype
        self.bucket_bytes = bucket_bytes
        self.host = HostLink(parameters[0][1].device) if on_host and parameters else None
        self._parameters = dict(parameters)
        self._trained = {name for name, parameter in parameters if parameter.requires_grad}
        groups = {name: copies_of(name) for name in self._parameters}
        self._spread = {name: group for name, group in groups.items() if shard and group.size > 1}
        # The names of parameters that aren't their own masters, where they are trained
        self._made = {
            name
            for name, parameter in parameters
            if on_host or name in self._spread or self.dtype_of(parameter) != parameter.dtype
        }
        made = {name: self._make(name, parameter) for name, parameter in parameters}
        self._masters = {name: master for name, master in made.items() if master is not None}
        spread = [named for named in parameters if self.is_spread(named[0])]
        self._buckets = [
            (group, bucket)
            for group in dict.fromkeys(self._spread.values())
            for bucket in in_buckets(
                (named for named in spread if self._spread[named[0]] is group), lambda p: p.dtype, bucket_bytes
            )
        ]

    def named_parameters(self) -> Iterator[NamedParameter]:
        """Yields the optimizer's parameters, under their names and with their number of dimensions."""
        return iter(self._masters.items())

    def rows(self, name: str) -> range:
        """Returns the rows (dim 0; a scalar is one) of the rank's parameter that this replica updates."""
        return rows_of(self._parameters[name], *self._owner(name))

    def is_spread(self, name: str) -> bool:
        """Returns whether each replica has different rows of it, as of parameters that aren't frozen."""
        return name in self._spread and name in self._trained

    def _owner(self, name: str) -> tuple[int, int]:
        return (self._spread[name].rank, self._spread[name].size) if self.is_spread(name) else (0, 1)

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype of the parameter's master, and so of its gradients."""
        return self._dtype or parameter.dtype

    def updates(self, name: str, parameter: nn.Parameter) -> bool:
        """Returns whether the optimizer updates this parameter itself."""
        return self._masters.get(name) is parameter

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of this replica's `rows` to the master's `.grad`; it takes the tensor over."""
        if name in self._masters:
            add_gradient(self._masters[name], gradient)

    def add_whole(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of all rows like `add`."""
        if self.is_spread(name):
            # A copy lets the other rows' memory go.
            gradient = take_rows(gradient, self.rows(name)).clone()
        if self.host is not None:
            gradient = self.host.take(name, gradient)
            self.host.wait()
        self.add(name, gradient)

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters to the parameters after an optimizer's step. Collective over the replicas when sharded."""
        for name in self._trained:
            if name in self._masters and not self.updates(name, self._parameters[name]):
                mine = take_rows(self._parameters[name], self.rows(name))
                if self.host is None:
                    mine.copy_(self._masters[name])
                else:
                    self.host.put(mine, self._masters[name])
        for group, bucket in self._buckets:
            gather_rows([parameter for _, parameter in bucket], group)

    def check_trained(self) -> None:
        """Raises SlipstreamError where parameters were frozen or unfrozen since the masters were made."""
        for name, parameter in self._parameters.items():
            master = self._masters.get(name, parameter)
            if name in self._made and {parameter.requires_grad, master.requires_grad} != {name in self._trained}:
                raise SlipstreamError(
                    f"requires_grad of {name} was changed. With an optimizer that is sharded or on the host, or with "
                    "masters of another dtype, freeze parameters of the model before the Pipeline is made of it."
                )

    def _make(self, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        dtype = self.dtype_of(parameter)
        if not parameter.requires_grad or name not in self._made:
            return parameter
        if torch.promote_types(parameter.dtype, dtype) != dtype:
            raise SlipstreamError(
                f"the masters' dtype {dtype} can't hold the values of {name}, which is {parameter.dtype}. "
                "Give torch.float32, or none: then the optimizer updates the parameters themselves."
            )
        rows = rows_of(parameter, *self._owner(name))
        # Its separate version counter lets a save that reads the master see changes: `publish` makes none, though it
        # writes to the parameter.
        mine = take_rows(parameter.data, rows)
        made = mine.to(dtype) if self.host is None else mine.to("cpu", dtype, copy=True)
        return nn.Parameter(made) if rows else None
