"""The costs of the units between which a model can be cut, and the times of stages that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.costs import OPS, WITH_MESSAGES, messages_of_stages
from slipstream.schedule import Action, Op, Schedule, freeze_stages
from slipstream.simulator import TableCost


class UnitCosts(Protocol):
    """What each unit of a model costs, for microbatches of one size.

    The units are the embedding, the layers or, where they can be cut, the attention and feed-forward half of each, and
    the head with the loss. A stage is a run of units; `of a stage` below is what each stage costs besides its units.
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

    With `recompute`, a forward keeps its stage's input alone and runs again before its backward, which counts as longer
    by as much.
    """

    costs: UnitCosts
    slices: tuple[int, ...]
    recompute: bool = False

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
        contexts = np.array([0, *accumulate(self.slices)][:-1], np.int64)
        times = {op: self.costs.seconds(op, self._lengths, contexts) for op in OPS}
        if self.recompute:
            units, fixed = times[Op.F]
            times |= {op: (times[op][0] + units, times[op][1] + fixed) for op in (Op.B, Op.I)}
        return {op: _prefix(*each) for op, each in times.items()}

    def stage_seconds(self, op: Op, bounds: Sequence[int]) -> Floats:
        """Returns the seconds of an op, (stages, slices); stage g has the units bounds[g] to bounds[g+1] - 1."""
        seconds = _of_stages(self._prefixes[op], bounds)
        if op in WITH_MESSAGES:
            seconds = seconds + np.outer(messages_of_stages(len(bounds) - 1), self._handling)
        if op is not Op.F:
            seconds[: self.frozen_stages(bounds)] = 0.0
        return seconds

    def frozen_stages(self, bounds: Sequence[int]) -> int:
        """Returns the number of the first stages that have no backwards."""
        return sum(bound <= self.costs.num_frozen_units for bound in bounds[1:])

    def without_frozen_backwards(self, schedule: Schedule, bounds: Sequence[int]) -> Schedule:
        """Returns the schedule without the backwards of frozen stages."""
        number = self.frozen_stages(bounds)
        return freeze_stages(schedule, number) if number > schedule.num_frozen_stages else schedule

    @cached_property
    def _handling(self) -> Floats:
        return self.costs.handling_seconds(self._lengths)

    def stage_activations(self, bounds: Sequence[int]) -> Floats:
        """Returns the bytes that a forward keeps, (stages, slices)."""
        return _of_stages(self._held, bounds)

    def computed_again(self, bounds: Sequence[int]) -> Floats:
        """Returns the most bytes that a stage holds of the slice that it computes again, (stages,)."""
        if not self.recompute:
            return np.zeros(len(bounds) - 1)
        largest: Floats = _of_stages(self._whole, bounds).max(axis=1)
        largest[: self.frozen_stages(bounds)] = 0.0
        return largest

    @cached_property
    def _whole(self) -> tuple[Floats, Floats]:
        return _prefix(*self.costs.activation_bytes(self._lengths))

    @cached_property
    def _held(self) -> tuple[Floats, Floats]:
        return _prefix(*self.costs.kept_bytes(self._lengths)) if self.recompute else self._whole

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
            message_bytes=[float(each) for each in self.costs.message_bytes(self._lengths)],
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
    """Returns the sums of the first 0, 1, ... units, (units + 1, slices), and the part of every stage."""
    return np.concatenate([np.zeros((1, units.shape[1])), np.cumsum(units, axis=0)]), fixed


def _of_stages(prefix: tuple[Floats, Floats], bounds: Sequence[int]) -> Floats:
    """Returns the sums over the units of each stage, (stages, slices)."""
    sums, fixed = prefix
    rows = sums[np.array(bounds, np.int64)]
    total: Floats = rows[1:] - rows[:-1] + fixed
    return total
