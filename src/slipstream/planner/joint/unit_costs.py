"""The costs of the units between which a model can be cut, computed or measured, and the times of their stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.cost import (
    BY_LAYER,
    OPS,
    REPLAYED,
    WITH_MESSAGES,
    AnalyticCosts,
    Profile,
    StageCosts,
    StageParts,
    StateBytes,
    messages_of_stages,
)
from slipstream.planner.slicing.equal_stage_slicing import between_cuts
from slipstream.schedule import Action, Op, Schedule, freeze_stages
from slipstream.simulator import TableCost


class UnitCosts(Protocol):
    """The costs of each unit of a model, for microbatches of one size.

    The units are the embedding, the layers or, where they can be cut, the attention and feed-forward half of each, and
    the head with the loss. A stage is a run of units; `of a stage` below is the cost of each stage besides its units.
    """

    @property
    def num_layers(self) -> int:
        """The number of the model's layers."""
        ...

    @property
    def units_per_layer(self) -> int:
        """2 where layers can be cut in half, else 1."""
        ...

    @property
    def num_frozen_units(self) -> int:
        """The first units up to which nothing is trained: stages of these alone have no backwards."""
        ...

    @property
    def latency(self) -> float:
        """The seconds of a message, however short."""
        ...

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None: messages take only their latency."""
        ...

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        """Returns the seconds of F, B, I or W of each unit, (units, slices), and of a stage besides, (slices,)."""
        ...

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        """Returns the bytes that F of each unit keeps for its backward, (units, slices), and of a stage, (slices,)."""
        ...

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        """Returns the part of them that is kept where forwards are computed again before their backwards."""
        ...

    def state_bytes(self) -> Floats:
        """Returns the bytes of each unit's weights, gradients and optimizer state, (units,)."""
        ...

    def message_bytes(self, lengths: Ints) -> Floats:
        """Returns the bytes of each slice's message between stages, (slices,)."""
        ...

    def handling_seconds(self, lengths: Ints) -> Floats:
        """Returns the seconds for which sending or receiving it keeps a rank from computing, (slices,)."""
        ...


@dataclass(frozen=True)
class SlicedUnits:
    """The times of all units on the slices of a sequence, from which those of any stage follow by two subtractions.

    With `recompute`, as `memory.recompute` has it, the parts that a forward doesn't keep run again before its backward
    or within it, which counts as longer by as much.
    """

    costs: UnitCosts
    slices: tuple[int, ...]
    recompute: str = "none"
    contexts: tuple[int, ...] | None = None  # the tokens before each slice. None: the slices before it

    @cached_property
    def _lengths(self) -> Ints:
        return np.array(self.slices, np.int64)

    @cached_property
    def message_seconds(self) -> Floats:
        """The seconds of each slice's message."""
        costs = self.costs
        sent = 0.0 if costs.bandwidth is None else costs.message_bytes(self._lengths) / costs.bandwidth
        return np.full(len(self.slices), costs.latency) + sent

    @cached_property
    def _prefixes(self) -> Mapping[Op, tuple[Floats, Floats]]:
        starts = [0, *accumulate(self.slices)][:-1] if self.contexts is None else self.contexts
        contexts = np.array(starts, np.int64)
        times = {op: self.costs.seconds(op, self._lengths, contexts) for op in OPS}
        units, fixed = times[Op.F]
        again, besides = units * (self.recompute in REPLAYED), fixed * (self.recompute in REPLAYED)
        again[1:-1] += units[1:-1] * (self.recompute in BY_LAYER)
        times |= {op: (times[op][0] + again, times[op][1] + besides) for op in (Op.B, Op.I)}
        return {op: _prefix(*unit_times) for op, unit_times in times.items()}

    def stage_seconds(self, op: Op, bounds: Sequence[int] | Ints) -> Floats:
        """Returns the seconds of an op, (..., stages, slices); stage g has the units bounds[g] to bounds[g+1] - 1."""
        ends = np.asarray(bounds)[..., 1:]
        seconds = _of_stages(self._prefixes[op], bounds)
        if op in WITH_MESSAGES:
            seconds = seconds + np.outer(messages_of_stages(ends.shape[-1]), self._handling)
        if op is not Op.F:
            seconds[ends <= self.costs.num_frozen_units] = 0.0
        return seconds

    def frozen_stages(self, bounds: Sequence[int]) -> int:
        """Returns the number of the first stages that have no backwards."""
        return sum(bound <= self.costs.num_frozen_units for bound in bounds[1:])

    def without_frozen_backwards(self, schedule: Schedule, bounds: Sequence[int]) -> Schedule:
        """Returns the schedule without the backwards of frozen stages."""
        num_frozen = self.frozen_stages(bounds)
        return freeze_stages(schedule, num_frozen) if num_frozen > schedule.num_frozen_stages else schedule

    @cached_property
    def _handling(self) -> Floats:
        return self.costs.handling_seconds(self._lengths)

    def stage_activations(self, bounds: Sequence[int]) -> Floats:
        """Returns the bytes that a forward keeps, (stages, slices)."""
        return _of_stages(self._held, bounds)

    def computed_again(self, bounds: Sequence[int]) -> Floats:
        """Returns the most bytes that a stage holds of the slice that it computes again at once, (stages,)."""
        if self.recompute != "stage":
            return np.zeros(len(bounds) - 1)
        largest: Floats = _of_stages(self._whole, bounds).max(axis=1)
        largest[: self.frozen_stages(bounds)] = 0.0
        return largest

    @cached_property
    def _whole(self) -> tuple[Floats, Floats]:
        return _prefix(*self.costs.activation_bytes(self._lengths))

    @cached_property
    def _held(self) -> tuple[Floats, Floats]:
        """The bytes that F keeps. Of layers that are recomputed one by one these are the inputs of whole ones, as the
        embedding and the head keep their saved tensors."""
        if self.recompute == "none":
            return self._whole
        units, fixed = self.costs.kept_bytes(self._lengths)
        if self.recompute == "full":
            units, saved = units.copy(), self.costs.activation_bytes(self._lengths)[0]
            units[1 : -1 : self.costs.units_per_layer] += fixed
            units[[0, -1]], fixed = saved[[0, -1]], np.zeros_like(fixed)
        return _prefix(units, fixed)

    def unit_work(self) -> Floats:
        """Returns the seconds of a microbatch's forwards and backwards of each unit, whole or split, (units,)."""
        forward, whole, inputs, weights = (np.diff(self._prefixes[op][0], axis=0) for op in (Op.F, Op.B, Op.I, Op.W))
        backward = np.minimum(whole, inputs + weights)
        backward[: self.costs.num_frozen_units] = 0.0
        work: Floats = (forward + backward).sum(axis=1)
        return work

    def table(self, bounds: Sequence[int]) -> TableCost:
        """Returns the simulator's costs of the stages with these bounds."""
        times: dict[tuple[int, int, Op], float] = {}
        for op in OPS:
            for (stage, index), seconds in np.ndenumerate(self.stage_seconds(op, bounds)):
                times[stage, index, op] = max(float(seconds), 1e-9)
        return _TrainedStages(
            num_frozen=self.frozen_stages(bounds),
            times=times,
            message_bytes=[float(num_bytes) for num_bytes in self.costs.message_bytes(self._lengths)],
            latency=self.costs.latency,
            bandwidth=self.costs.bandwidth,
            activations={key: float(size) for key, size in np.ndenumerate(self.stage_activations(bounds))},
        )


@dataclass(frozen=True, kw_only=True)
class _TrainedStages(TableCost):
    """Costs of which gradients that nobody needs are no part, also where an order has them still."""

    num_frozen: int

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return 0.0 if self._is_needless(send) else super().link_seconds(send, source, destination)

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        return 0.0 if self._is_needless(send) else super().link_occupied(send, source, destination)

    def _is_needless(self, send: Action) -> bool:
        return send.op is Op.SEND_B and send.stage <= self.num_frozen


def _prefix(units: Floats, fixed: Floats) -> tuple[Floats, Floats]:
    return np.concatenate([np.zeros((1, units.shape[1])), np.cumsum(units, axis=0)]), fixed


def _of_stages(prefix: tuple[Floats, Floats], bounds: Sequence[int] | Ints) -> Floats:
    """Returns the sums over the units of each stage, (..., stages, slices)."""
    sums, fixed = prefix
    total: Floats = np.diff(sums[np.asarray(bounds)], axis=-2) + fixed
    return total


@dataclass(frozen=True)
class AnalyticUnits:
    """The computed costs of the embedding, the layers or their halves, and the head (see `UnitCosts`), of one rank.

    A stage's cost is the sum of its units', and the device's `action_seconds` once.

    Args:
        costs: of stages at a tensor-parallel degree, for microbatches of one size.
        seq_len: tokens of a sequence.
        granularity: slices begin at multiples of this many tokens.
        num_ranks: ranks of the pipeline. The slowest of their links counts for all.
        data_parallel: pipelines that share the batch.
        optimizer_shards: ranks over which the optimizer's state is spread.
    """

    costs: AnalyticCosts
    seq_len: int
    granularity: int
    num_ranks: int
    data_parallel: int = 1
    optimizer_shards: int = 1

    @property
    def num_layers(self) -> int:
        return len(self.costs.model.kinds)

    @property
    def units_per_layer(self) -> int:
        return self.costs.model.units_per_layer

    @property
    def num_frozen_units(self) -> int:
        return self.costs.model.num_frozen_parts

    @property
    def latency(self) -> float:
        return self._link[0]

    @property
    def bandwidth(self) -> float | None:
        return self._link[1]

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        ends, starts = -(-(contexts + lengths) // self.granularity), contexts // self.granularity
        return self._tables[op][:, ends, starts][self._kinds], np.full(len(lengths), self._fixed)

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        kept_bytes, context = self._bytes_per_token
        return np.outer(kept_bytes + context, lengths) + self._left[:, None], np.zeros(len(lengths))

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        _, context = self._bytes_per_token
        return np.outer(context, lengths) + self._left[:, None], self.message_bytes(lengths)

    def state_bytes(self) -> Floats:
        state = StateBytes.of(self.costs.model.dtype)
        sizes = self._of_kinds(partial(self.costs.weight_bytes, each=state.weights))
        sizes = sizes + state.gradients * self._of_kinds(self.costs.num_trained)
        optimized = self._of_kinds(partial(self.costs.num_optimized, shards=self.optimizer_shards))
        state_bytes: Floats = (sizes + state.optimizer * optimized)[self._kinds]
        return state_bytes

    def handling_seconds(self, lengths: Ints) -> Floats:
        seconds: Floats = np.asarray(self.costs.handling_seconds(lengths), float)
        return seconds

    def message_bytes(self, lengths: Ints) -> Floats:
        sizes: Floats = np.asarray(self.costs.message_bytes(lengths), float)
        return sizes

    @cached_property
    def _kinds(self) -> Ints:
        return np.array(self.costs.model.parts)

    def _of_kinds(self, value: Callable[[StageParts], Any]) -> Floats:
        """Returns the value of a unit of each kind."""
        first = [self.costs.model.parts.index(kind) for kind in range(self._kinds.max() + 1)]
        return np.array([value(StageParts(unit, unit + 1)) for unit in first], float)

    @cached_property
    def _tables(self) -> dict[Op, Floats]:
        """The seconds of each kind of unit on the slice between any two places to cut, (kinds, ends, starts)."""

        def of_op(op: Op) -> Callable[[Ints, Ints], Floats]:
            return lambda lengths, contexts: self._of_kinds(
                partial(self._seconds, op=op, lengths=lengths, contexts=contexts)
            )

        return {op: between_cuts(self.seq_len, self.granularity, of_op(op)) for op in OPS}

    def _seconds(self, unit: StageParts, op: Op, lengths: Ints, contexts: Ints) -> Floats:
        seconds = np.asarray(self.costs.seconds(unit, op, lengths, contexts))
        return np.broadcast_to(np.maximum(seconds - self._fixed, 0.0), lengths.shape)

    @property
    def _fixed(self) -> float:
        return self.costs.cluster.device.action_seconds

    @cached_property
    def _bytes_per_token(self) -> tuple[Floats, Floats]:
        """The bytes that each unit keeps for its backward, and its keys and values with their gradients; nothing of a
        unit that has no backward, which keeps them for its forwards alone."""
        costs = self.costs
        none, one = (self._of_kinds(partial(costs.activation_bytes, length=length)) for length in (0, 1))
        context = self._of_kinds(partial(costs.context_bytes, length=1))
        context = context + self._of_kinds(partial(costs.context_gradient_bytes, length=1))
        context = context * self._of_kinds(costs.has_backward)
        return (one - none)[self._kinds], context[self._kinds]

    @cached_property
    def _left(self) -> Floats:
        return self._of_kinds(partial(self.costs.activation_bytes, length=0))[self._kinds]

    @cached_property
    def _link(self) -> tuple[float, float | None]:
        """The latency, and the bandwidth at which the slowest link between neighbours carries a token's message."""
        ranks = range(self.num_ranks)
        if self.num_ranks == 1:
            return 0.0, None
        cost = self.costs.action_costs({}, [1], self.data_parallel)
        seconds = partial(cost.link_seconds, Action(Op.SEND_F, 0, 0, 0))
        occupied = partial(cost.link_occupied, Action(Op.SEND_F, 0, 0, 0))
        slowest = max(((a, (a + 1) % self.num_ranks) for a in ranks), key=lambda pair: seconds(*pair))
        busy = occupied(*slowest)
        return seconds(*slowest) - busy, float(self.costs.message_bytes(1)) / busy


@dataclass(frozen=True)
class ProfileUnits:
    """The measured costs of the embedding, the layers or their halves, and the head (see `UnitCosts`)."""

    profile: Profile
    state: StateBytes

    @property
    def num_layers(self) -> int:
        return len(self.profile.kinds)

    @property
    def units_per_layer(self) -> int:
        return self.profile.units_per_layer

    @property
    def num_frozen_units(self) -> int:
        return 0

    @property
    def latency(self) -> float:
        return self.profile.link.latency if self.profile.link else 0.0

    @property
    def bandwidth(self) -> float | None:
        return self.profile.link.bandwidth if self.profile.link else None

    @property
    def longest_slice(self) -> int:
        """The longest slice whose time is known, in tokens."""
        return min(fit.lengths[-1] for stage in self.profile.stages for fit in stage.fits.values())

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        units, fixed = self._by_part([stage.fits[op](lengths, contexts) for stage in self.profile.stages])
        # differences of noisy measurements may be below 0
        return self.profile.slowdown * np.maximum(units, 0.0), self.profile.slowdown * np.maximum(fixed, 0.0)

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        kept_bytes, _ = self._contexts(lengths)
        units, fixed = self._by_part([stage.activation_bytes_at(lengths) for stage in self.profile.stages])
        return units + kept_bytes, fixed

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return self._contexts(lengths)[0], self.message_bytes(lengths)

    def state_bytes(self) -> Floats:
        bytes_each = self.state.weights + self.state.gradients + self.state.optimizer
        parameters, _ = self.profile.by_part([float(stage.num_parameters) for stage in self.profile.stages])
        return bytes_each * np.maximum(parameters, 0.0)

    def message_bytes(self, lengths: Ints) -> Floats:
        sizes: Floats = np.asarray(self.profile.message_bytes(lengths), float)
        return sizes

    def handling_seconds(self, lengths: Ints) -> Floats:
        seconds: Floats = np.asarray(self.profile.handling_seconds(lengths), float)
        return seconds

    def _contexts(self, lengths: Ints) -> tuple[Floats, Floats]:
        """The keys and values of the slices' tokens and their gradients."""
        context_bytes = [float(stage.context_bytes + stage.context_gradient_bytes) for stage in self.profile.stages]
        return self._by_part(list(np.outer(context_bytes, lengths)))

    def _by_part(self, stages: list[Floats]) -> tuple[Floats, Floats]:
        """Splits a quantity of the measured stages among the parts, (parts, slices), and the fixed part."""
        columns = [self.profile.by_part(column) for column in np.transpose(stages).tolist()]
        units = np.array([units for units, _ in columns], float).T.reshape(len(self.profile.parts), -1)
        return units, np.array([fixed for _, fixed in columns], float)


def units_of(
    costs: StageCosts,
    state: StateBytes,
    seq_len: int,
    granularity: int,
    num_ranks: int,
    data_parallel: int = 1,
    optimizer_shards: int = 1,
) -> UnitCosts:
    """Returns the costs of a model's units by those of its stages; `state` is bytes per parameter, and the other
    arguments are those of `AnalyticUnits`."""
    if isinstance(costs, Profile):
        return ProfileUnits(costs, state)
    return AnalyticUnits(costs, seq_len, granularity, num_ranks, data_parallel, optimizer_shards)
