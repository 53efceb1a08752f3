"""The times of a model's parts on the slices of a sequence, and of the stages that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.cost import (
    BY_LAYER,
    OPS,
    REPLAYED,
    WITH_MESSAGES,
    Costs,
    LinkTime,
    Mode,
    Work,
    messages_of_stages,
)
from slipstream.planner.cuts import Cuts
from slipstream.planner.slicing.equal_stage_slicing import between_cuts
from slipstream.schedule import Action, Op, Schedule, freeze_stages
from slipstream.simulator import TableCost


@dataclass(frozen=True)
class SlicedUnits:
    """The times of all parts on the slices of a sequence, from which those of any stage follow by two subtractions.

    A stage is a run of units, as the joint search names a model's parts: stage g has bounds[g] to bounds[g + 1] - 1.

    With `recompute`, as `memory.recompute` has it, the parts that a forward doesn't keep run again before its backward
    or within it, which counts as longer by as much.
    """

    costs: Costs
    slices: tuple[int, ...]
    link: LinkTime  # between neighbours
    recompute: str = "none"
    contexts: tuple[int, ...] | None = None  # the tokens before each slice. None: the slices before it

    @cached_property
    def _lengths(self) -> Ints:
        return np.array(self.slices, np.int64)

    @cached_property
    def message_seconds(self) -> Floats:
        """The seconds of each slice's message."""
        latency, bandwidth = self.link
        sent = 0.0 if bandwidth is None else self._message_bytes / bandwidth
        return np.full(len(self.slices), latency) + sent

    @cached_property
    def _message_bytes(self) -> Floats:
        sizes: Floats = np.asarray(self.costs.message_bytes(self._lengths), float)
        return sizes

    def seconds(self, op: Op) -> tuple[Floats, Floats]:
        """Returns the seconds of F, B, I or W of each unit, (units, slices), and of a stage besides, (slices,)."""
        work = Work.of_slices(op, self.slices)
        if self.contexts is not None:
            work = work._replace(contexts=np.array(self.contexts, np.int64))
        return self.costs.each_seconds(work)[self._kinds], self.costs.fixed_seconds(work)

    @cached_property
    def _kinds(self) -> Ints:
        """The kind of each unit."""
        return np.array(self.costs.parts, np.int64)

    @cached_property
    def _prefixes(self) -> Mapping[Op, tuple[Floats, Floats]]:
        times = {op: self.seconds(op) for op in OPS}
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
            seconds = seconds + np.outer(messages_of_stages(ends.shape[-1]), self.handling)
        if op is not Op.F:
            seconds[~self.costs.trains_below(ends)] = 0.0
        return seconds

    def without_frozen_backwards(self, schedule: Schedule, bounds: Sequence[int]) -> Schedule:
        """Returns the schedule without the backwards of frozen stages."""
        return freeze_stages(schedule, int(self.costs.trains_below(bounds[1:]).argmax()))

    @cached_property
    def handling(self) -> Floats:
        """The seconds for which sending or receiving a message keeps a rank from computing, (slices,)."""
        seconds: Floats = np.asarray(self.costs.handling_seconds(self._lengths), float)
        return seconds

    def stage_activations(self, bounds: Sequence[int]) -> Floats:
        """Returns the bytes that a forward keeps, (stages, slices)."""
        return _of_stages(self._held, bounds)

    def computed_again(self, bounds: Sequence[int]) -> Floats:
        """Returns the most bytes that a stage holds of the slice that it computes again at once, (stages,)."""
        if self.recompute != "stage":
            return np.zeros(len(bounds) - 1)
        largest: Floats = _of_stages(self._whole, bounds).max(axis=1)
        largest[~self.costs.trains_below(bounds[1:])] = 0.0
        return largest

    @cached_property
    def _whole(self) -> tuple[Floats, Floats]:
        return _prefix(self._activations, self.costs.fixed_activation(self._lengths))

    @cached_property
    def _activations(self) -> Floats:
        """The bytes that F of each unit keeps for its backward, keys and values with their gradients among it."""
        kept = self.costs.each_activation(self._lengths) * self.costs.each_has_backward[:, None]
        activations: Floats = kept[self._kinds] + self._contexts
        return activations

    @cached_property
    def _contexts(self) -> Floats:
        """The bytes of the slices' keys and values and of their gradients, of units that have a backward."""
        costs = self.costs
        per_token = (costs.each_context + costs.each_context_gradient) * costs.each_has_backward
        contexts: Floats = np.outer(per_token, self._lengths)[self._kinds]
        return contexts

    @cached_property
    def _held(self) -> tuple[Floats, Floats]:
        """The bytes kept by F. Of layers that are recomputed one by one these are the inputs of whole ones, as the
        embedding and the head keep their saved tensors."""
        if self.recompute == "none":
            return self._whole
        states = (self.costs.each_state * self.costs.each_has_backward)[self._kinds]
        units = self._contexts + states[:, None]
        fixed = self._message_bytes
        if self.recompute == "full":
            units[1 : -1 : self.costs.units_per_layer] += fixed
            units[[0, -1]], fixed = self._activations[[0, -1]], np.zeros_like(fixed)
        return _prefix(units, fixed)

    def unit_work(self) -> Floats:
        """Returns the seconds of a microbatch's forwards and backwards of each unit, whole or split, (units,)."""
        forward, whole, inputs, weights = (np.diff(self._prefixes[op][0], axis=0) for op in (Op.F, Op.B, Op.I, Op.W))
        backward = np.minimum(whole, inputs + weights)
        backward[self.costs.each_has_backward[self._kinds] == 0] = 0.0
        work: Floats = (forward + backward).sum(axis=1)
        return work

    def table(self, bounds: Sequence[int]) -> TableCost:
        """Returns the simulator's costs of the stages with these bounds."""
        times: dict[tuple[int, int, Op], float] = {}
        for op in OPS:
            for (stage, index), seconds in np.ndenumerate(self.stage_seconds(op, bounds)):
                times[stage, index, op] = max(float(seconds), 1e-9)
        return _TrainedStages(
            sends_back=self.costs.trains_below(bounds[:-1]),
            times=times,
            message_bytes=self._message_bytes.tolist(),
            latency=self.link.latency,
            bandwidth=self.link.bandwidth,
            activations={key: float(size) for key, size in np.ndenumerate(self.stage_activations(bounds))},
        )


@dataclass(frozen=True, kw_only=True)
class _TrainedStages(TableCost):
    """Costs of which gradients that nobody needs are no part, also where an order has them still."""

    sends_back: Flags  # True for stages whose previous stage has a backward

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return 0.0 if self._is_needless(send) else super().link_seconds(send, source, destination)

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        return 0.0 if self._is_needless(send) else super().link_occupied(send, source, destination)

    def _is_needless(self, send: Action) -> bool:
        return send.op is Op.SEND_B and not self.sends_back[send.stage]


def _prefix(units: Floats, fixed: Floats) -> tuple[Floats, Floats]:
    return np.concatenate([np.zeros((1, units.shape[1])), np.cumsum(units, axis=0)]), fixed


def _of_stages(prefix: tuple[Floats, Floats], bounds: Sequence[int] | Ints) -> Floats:
    """Returns the sums over the units of each stage, (..., stages, slices)."""
    sums, fixed = prefix
    total: Floats = np.diff(sums[np.asarray(bounds)], axis=-2) + fixed
    return total


@dataclass(frozen=True)
class Tabulated(Mode):
    """Costs whose times are looked up for the slices between places to cut, so that a search computes each once.

    Args:
        seq_len: tokens of a sequence.
        cuts: its places. Slices that they don't allow take infinitely long.
    """

    seq_len: int
    cuts: Cuts

    def each_seconds(self, work: Work) -> Floats:
        ends = self.cuts.place_from(work.contexts + work.lengths)
        return self._table(work.op)[:, ends, self.cuts.place_from(work.contexts)]

    def _table(self, op: Op) -> Floats:
        """Returns the seconds of each kind of part on the slice between any two places to cut, (kinds, ends, starts);
        computed once."""
        if op not in self._tables:
            self._tables[op] = between_cuts(
                self.seq_len,
                self.cuts,
                lambda lengths, contexts: self.costs.each_seconds(Work(op, lengths, contexts)),
            )
        return self._tables[op]

    @cached_property
    def _tables(self) -> dict[Op, Floats]:
        return {}
