"""The costs of a model's units on described hardware, computed from counted operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.costs import OPS, AnalyticCosts, StageParts, StateBytes
from slipstream.schedule import Action, Op


@dataclass(frozen=True)
class AnalyticUnits:
    """The computed costs of the embedding, the layers or their halves, and the head (see `UnitCosts`), of one rank.

    A stage costs what its units cost, and the device's `action_seconds` once.

    Args:
        costs: what stages cost at a tensor-parallel degree, for microbatches of one size.
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
        kept, context = self._bytes_per_token
        return np.outer(kept + context, lengths) + self._left[:, None], np.zeros(len(lengths))

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        _, context = self._bytes_per_token
        return np.outer(context, lengths) + self._left[:, None], self.message_bytes(lengths)

    def state_bytes(self) -> Floats:
        state = StateBytes.of(self.costs.model.dtype)
        trained = state.gradients + state.optimizer / self.optimizer_shards
        sizes = state.weights * self._of_kinds(self.costs.num_parameters)
        found: Floats = (sizes + trained * self._of_kinds(self.costs.num_trained))[self._kinds]
        return found

    def handling_seconds(self, lengths: Ints) -> Floats:
        seconds: Floats = np.asarray(self.costs.handling_seconds(lengths), float)
        return seconds

    def message_bytes(self, lengths: Ints) -> Floats:
        sizes: Floats = np.asarray(self.costs.message_bytes(lengths), float)
        return sizes

    @cached_property
    def _kinds(self) -> Ints:
        """The kind of every unit."""
        return np.array(self.costs.model.parts)

    def _of_kinds(self, value: Callable[[StageParts], Any]) -> Floats:
        """Returns the value of a unit of each kind."""
        first = [self.costs.model.parts.index(kind) for kind in range(self._kinds.max() + 1)]
        return np.array([value(StageParts(unit, unit + 1)) for unit in first], float)

    @cached_property
    def _tables(self) -> dict[Op, Floats]:
        """The seconds of each kind of unit on the slice between any two places to cut, (kinds, ends, starts)."""
        bounds = np.append(np.arange(0, self.seq_len, self.granularity), self.seq_len)
        ends, starts = np.tril_indices(len(bounds), -1)
        lengths, contexts = bounds[ends] - bounds[starts], bounds[starts]
        shape = (self._kinds.max() + 1, len(bounds), len(bounds))
        tables = {op: np.zeros(shape) for op in OPS}
        for op, table in tables.items():
            table[:, ends, starts] = self._of_kinds(partial(self._seconds, op=op, lengths=lengths, contexts=contexts))
        return tables

    def _seconds(self, unit: StageParts, op: Op, lengths: Ints, contexts: Ints) -> Floats:
        seconds = np.asarray(self.costs.seconds(unit, op, lengths, contexts))
        return np.broadcast_to(np.maximum(seconds - self._fixed, 0.0), lengths.shape)

    @property
    def _fixed(self) -> float:
        return self.costs.cluster.device.action_seconds

    @cached_property
    def _bytes_per_token(self) -> tuple[Floats, Floats]:
        """What each unit keeps for its backward, and its keys and values with their gradients; nothing of a unit that
        has no backward, which keeps them for its forwards alone."""
        costs = self.costs
        none, one = (self._of_kinds(partial(costs.activation_bytes, length=length)) for length in (0, 1))
        context = self._of_kinds(partial(costs.context_bytes, length=1))
        context = context + self._of_kinds(partial(costs.context_gradient_bytes, length=1))
        context = context * self._of_kinds(costs.has_backward)
        return (one - none)[self._kinds], context[self._kinds]

    @cached_property
    def _left(self) -> Floats:
        """The states that a slice of any length leaves to the next one."""
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
