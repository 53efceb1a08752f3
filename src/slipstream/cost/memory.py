"""The bytes that the actions of a plan keep and free, those of a spread head's parts among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.cost.costs import Costs
from slipstream.cost.host_memory import ANY_HOST, HostMemorySpec
from slipstream.cost.mode import WithoutLookups
from slipstream.cost.update import Update
from slipstream.cost.work import BY_LAYER, Stage, StageParts
from slipstream.options import tokens_on_host
from slipstream.schedule import Op, Schedule
from slipstream.simulator import Footprint, MemoryTable, StageSlice


@dataclass(frozen=True)
class HeldBeside:
    """What a rank of a training holds beside what the costs of its stages say.

    Args:
        header: bytes before the tensors of each message.
        batch: bytes of the step's tokens, which every rank has.
        unseen: the share of the counted bytes that parts hold only together.
    """

    header: float = 0.0
    batch: float = 0.0
    unseen: float = 0.0

    def added(self, counted: float) -> float:
        """Returns a rank's bytes, given those that are counted."""
        return (1 + self.unseen) * counted + self.batch


NOTHING_BESIDE = HeldBeside()


def memory_table(
    costs: Costs,
    stages: Sequence[Stage],
    schedule: Schedule,
    slices: tuple[int, ...],
    recompute: str,
    update: Update,
    alike: Callable[[Stage], Stage] = lambda stage: stage,
    host: HostMemorySpec = ANY_HOST,
) -> MemoryTable:
    """Returns the bytes of all actions of a schedule, per device.

    Args:
        costs: of stages.
        stages: the parts of each stage.
        schedule: with R, OFFLOAD and RELOAD where there are any.
        slices: tokens of each slice.
        recompute: the recomputed part: none, selective, full, stage or stage+full.
        update: that ends the step.
        alike: returns one of the stages with equal costs, so that their bytes are computed once.
        host: of a device.
    """
    length = sum(slices)
    state = update.held
    # No other slice reads the keys and values of a layer that makes them again.
    is_lone = recompute in BY_LAYER and len(slices) == 1
    keyed = costs.host_context or costs
    num_here = length - tokens_on_host(slices, costs.host_share)
    places = dict[Stage, int]()
    like = [places.setdefault(alike(stage), g) for g, stage in enumerate(stages)]

    def per_stage(value: Callable[[Stage], float]) -> dict[int, float]:
        of_first = {g: float(value(stages[g])) for g in places.values()}
        return {g: of_first[place] for g, place in enumerate(like)}

    footprints = {
        (StageSlice(g, *how), op): footprint
        for g in places.values()
        for how, of_slice in _footprints(costs, recompute, slices, schedule.ops, stages[g], num_here).items()
        for op, footprint in of_slice.items()
    }
    made = per_stage(lambda stage: state.gradients * costs.num_trained(stage))
    gradients: dict[tuple[int, Op], float] = {(g, op): made[g] for op, g in schedule.kinds if op in (Op.B, Op.W)}
    # a stage's first backward makes gradients while it frees activations, so the two never exist in full together
    first: dict[tuple[StageSlice, Op], float] = {
        (unit, op): footprint.peak + made[unit.stage] - min(made[unit.stage], -footprint.leaves)
        for (unit, op), footprint in footprints.items()
        if op in (Op.B, Op.W)
    }
    losses = _losses(costs, stages, slices)
    of_head = StageParts(len(costs.parts) - 1, len(costs.parts))
    for unit, op in [key for key in footprints if key[1] in (Op.B, Op.I) and losses.get((key[0].stage, key[0].slice))]:
        footprint = footprints[unit, op]
        during = losses[unit.stage, unit.slice] + max(0.0, footprint.leaves)
        footprints[unit, op] = replace(footprint, peak=max(footprint.peak, during))
        if op is Op.B:
            first[unit, op] = max(first[unit, op], during + state.gradients * costs.num_trained(of_head))
    messages = [float(costs.message_bytes(length)) for length in slices]
    return MemoryTable(
        footprints=footprints,
        first=first,
        context=per_stage(lambda stage: 0.0 if is_lone else keyed.context_bytes(stage, num_here)),
        context_gradients=per_stage(lambda stage: 0.0 if is_lone else keyed.context_gradient_bytes(stage, num_here)),
        message_bytes=messages,
        parameters=per_stage(partial(costs.weight_bytes, each=state.weights)),
        gradients=gradients,
        optimizer=per_stage(lambda stage: state.optimizer * costs.num_optimized(stage, update)),
        host_context={
            (g, *key): footprint
            for g, stage in enumerate(stages)
            for key, footprint in _host_context(costs, stage, slices, is_lone).items()
        },
        host_optimizer=per_stage(lambda stage: update.on_host * costs.num_optimized(stage, update)),
        # Most of what is offloaded is as large as a message: all of it where layers or stages are recomputed.
        host_shares=host.shares(messages),
        kept_gradients=None if update.place == "device" else per_stage(partial(_kept_gradients, costs, update)),
        like=like,
    )


def _losses(costs: Costs, stages: Sequence[Stage], slices: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """Returns what backwards need while they differentiate a loss that runs on some tokens at a time, by (stage,
    slice); nothing where it runs on all."""
    last = len(stages) - 1
    if not costs.action_bytes(stages[last], slices[0]).loss:
        return {}
    return {(last, s): costs.action_bytes(stages[last], length).loss for s, length in enumerate(slices)}


def _host_context(
    costs: Costs, stage: Stage, slices: tuple[int, ...], is_lone: bool
) -> dict[tuple[int, Op], Footprint]:
    """Returns the bytes of keys, values and their gradients that the actions of one stage have on the host, by (slice,
    op).

    A slice's forward leaves its keys and values there. In a backward each layer makes the sums of the gradients of all
    slices that it attends to, unless a later one has, and frees what the slice itself has. Later slices than those on
    the host leave nothing there.

    Args:
        costs: of stages.
        stage: the parts of the stage.
        slices: tokens of each.
        is_lone: whether each layer's keys and values are made for its forward, and again for its backward.
    """
    if (there := costs.host_context) is None:
        return {}
    length = sum(slices)

    def held(each: Floats, lengths: Ints | Sequence[int]) -> Floats:
        """Returns the bytes of blocks of some lengths, (parts, slices): half are keys, half values."""
        held_bytes: Floats = 2 * costs.on_host(np.outer(each, lengths) / 2)
        return held_bytes

    if is_lone:
        one = _LargestLayer.of(there, stage, length, length)
        forward, more = (float(held(np.array([size]), [1])[0, 0]) for size in (one.keys, one.key_gradients))
        backward = Footprint(0.0, forward + more)
        return {(0, Op.F): Footprint(0.0, forward), (0, Op.B): backward, (0, Op.I): backward}
    has_backward = there.has_backward(stage)
    ends = np.cumsum(np.array(slices, np.int64))
    starts = ends - np.array(slices, np.int64)
    # Tokens of each slice whose keys and values are there.
    lengths = np.where(ends <= tokens_on_host(slices, costs.host_share), slices, 0)
    # Of each part, the last one first, as a backward has them.
    kinds = [there.parts[part] for part in reversed(there.parts_of(stage))]
    keys, sums = held(there.each_context[kinds], lengths), held(there.each_context_gradient[kinds], lengths)
    # The first slice with a key that each slice sees, (parts, slices).
    first = np.searchsorted(starts, starts - there.each_reach(starts)[kinds], side="right") - 1
    # A later slice has made the sums from there on.
    until = np.minimum(
        np.arange(1, len(slices) + 1), np.concatenate([first[:, 1:], np.full_like(first[:, :1], len(slices))], axis=1)
    )
    up_to = np.concatenate([np.zeros((len(kinds), 1)), np.cumsum(sums, axis=1)], axis=1)
    until_then, before = (np.take_along_axis(up_to, which, axis=1) for which in (until, first))
    made = np.maximum(0.0, until_then - before)
    freed = keys + sums
    most = np.cumsum(made, axis=0) - np.cumsum(freed, axis=0) + freed
    found = dict[tuple[int, Op], Footprint]()
    for s in range(len(slices)):
        left = float(keys[:, s].sum())
        is_dropped = s == len(slices) - 1 and not has_backward
        found[s, Op.F] = Footprint(left - is_dropped * float(keys.sum()), left)
        backward = Footprint(float(made[:, s].sum() - freed[:, s].sum()), float(most[:, s].max(initial=0.0)))
        found[s, Op.B] = found[s, Op.I] = backward
    return found


def _kept_gradients(costs: Costs, update: Update, stage: Stage) -> float:
    """Returns the bytes of a stage's gradients that don't go to the host by themselves: those of tied weights, which
    are added first."""
    parts = costs.parts_of(stage)
    has_end = parts.start == 0 or parts.stop == len(costs.parts)
    return update.state.gradients * costs.num_head_weights if costs.is_tied and has_end else 0.0


def _footprints(
    costs: Costs, recompute: str, slices: tuple[int, ...], ops: frozenset[Op], layers: Stage, num_here: int
) -> dict[tuple[int, bool, bool], dict[Op, Footprint]]:
    """Returns the bytes of one stage's actions by (slice, recomputed, offloaded); `num_here` tokens have their keys and
    values on the device."""
    every = {}
    keyed = costs.host_context or costs
    for s, length in enumerate(slices):
        total = costs.action_bytes(layers, length)
        by_layer = recompute in BY_LAYER
        whole, ready = total.kept, costs.kept_bytes(layers, "full", length) if by_layer else total.kept
        left_by_forward = ready if recompute == "none" else costs.kept_bytes(layers, recompute, length)
        one = _LargestLayer.of(costs, layers, length, num_here) if by_layer else _LargestLayer()
        # the first slice's forward and the last slice's backward allocate for the whole microbatch
        keys = keyed.context_bytes(layers, num_here) if s == 0 else 0
        made = keyed.context_gradient_bytes(layers, num_here) if s == len(slices) - 1 else 0
        if by_layer and len(slices) == 1:
            keys, made = one.keys, one.keys + one.key_gradients
        for recomputed, offloaded in product({False, Op.R in ops}, {False, Op.OFFLOAD in ops}):
            left = left_by_forward if recomputed else ready
            during = total.alone if recomputed else max(total.peaks[Op.F], one.forward)
            bytes_by_op = {
                Op.F: Footprint(left, left + during + keys),
                Op.R: Footprint(ready - left, max(0.0, ready - left) + max(total.peaks[Op.F], one.forward)),
                Op.B: Footprint(-ready, max(total.peaks[Op.B], one.backward) + made),
                # W's inputs are there from I on, of layers that were recomputed too
                Op.I: Footprint(whole - ready + total.deferred, max(0.0, whole - ready) + total.peaks[Op.I] + made),
                Op.W: Footprint(-whole - total.deferred, total.peaks[Op.W]),
                Op.OFFLOAD: Footprint(-left, 0.0),
                Op.RELOAD: Footprint(left, left),
            }
            every[s, recomputed, offloaded] = {op: bytes_by_op[op] for op in bytes_by_op if op in ops}
    return every


def backward_bytes(costs: Costs, stage: Stage, by_layer: bool, length: int, splits: bool) -> float:
    """Returns the bytes of one slice's activations at the peak of its backward, at least: those that were kept or made
    again for it, and those that it works on. Keys, values and their gradients, which other slices need, aren't counted.

    Args:
        costs: of stages.
        stage: its parts.
        by_layer: whether layers are recomputed one by one.
        length: tokens of the slice.
        splits: whether the backward ends with the input gradient, so that the weight gradient is yet to come.
    """
    if not costs.has_backward(stage):
        return 0.0
    total = costs.action_bytes(stage, length)
    if not by_layer:
        return total.kept + min(total.peaks[Op.B], total.peaks[Op.I])
    ready = costs.kept_bytes(stage, "full", length)
    if splits:
        return max(ready, total.kept) + total.peaks[Op.I]
    return ready + max(total.peaks[Op.B], _LargestLayer.of(costs, stage, length, length).backward)


class _LargestLayer(NamedTuple):
    """The most bytes of one layer of a stage that is recomputed alone, besides its input."""

    forward: float = 0.0  # the most in its forward, with all that it saves
    backward: float = 0.0  # the most in its backward
    keys: float = 0.0  # its keys and values
    key_gradients: float = 0.0

    @classmethod
    def of(cls, costs: Costs, stage: Stage, length: int, num_keys: int) -> _LargestLayer:
        """`num_keys` tokens have their keys and values where they are counted."""
        keyed = costs.host_context or costs
        layers = costs.layers_with_backward(stage)
        kinds = {tuple(costs.parts[part] for part in range(*layer)): layer for layer in layers}
        largest, entered = [cls()], float(costs.message_bytes(length))
        for layer in kinds.values():
            layer_bytes = costs.action_bytes(layer, length)
            saved = max(0.0, layer_bytes.kept - entered)
            keys, gradients = keyed.context_bytes(layer, num_keys), keyed.context_gradient_bytes(layer, num_keys)
            largest.append(cls(saved + layer_bytes.peaks[Op.F], saved + layer_bytes.peaks[Op.B], keys, gradients))
        return cls(*map(max, zip(*largest, strict=True)))


_WIDE = 4  # bytes of a logit, at least: softmax is computed in float32
_SMALL = 64  # bytes of a token, for the indices of its target and the like
_HEADER = 256  # bytes before the tensors of a message of V, and at most of one of L
_NORM = 3  # hidden states in float32 that the last stage keeps of the norm before the head, with the head's input


def head_part_memory(
    costs: Costs,
    stages: Sequence[StageParts],
    schedule: Schedule,
    slices: tuple[int, ...],
    recompute: str,
    update: Update,
    host: HostMemorySpec = ANY_HOST,
) -> MemoryTable:
    """Returns the bytes of all actions of a schedule that spreads the head: those of `memory_table` for the stages
    without it, and of the parts next to the last stage of each rank. Of tied weights the rows embed, too.

    Arguments are those of `memory_table`; the last of the stages has the head.
    """
    bare = WithoutLookups(costs) if schedule.spreads_embedding else costs
    cut = [*stages[:-1], stages[-1]._replace(stop=stages[-1].stop - 1)]
    table = memory_table(bare, cut, schedule, slices, recompute, update, host=host)
    return _with_parts(table, costs, schedule, slices, update)


def _with_parts(
    table: MemoryTable,
    costs: Costs,
    schedule: Schedule,
    slices: tuple[int, ...],
    update: Update,
) -> MemoryTable:
    last = schedule.num_stages - 1
    stages = schedule.vocabulary_stages
    state = update.held
    head = StageParts(len(costs.parts) - 1, len(costs.parts))
    rows = -(-costs.vocab_size // schedule.num_ranks)
    numbers = costs.num_parameters(head) / schedule.num_ranks
    optimized = costs.num_optimized(head, update) / schedule.num_ranks
    made = state.gradients * numbers
    footprints = {
        (StageSlice(g, s, *how), op): footprint
        for g, (s, length) in product(stages, enumerate(slices))
        for op, footprint in _part_footprints(costs, rows, schedule, length, g == last).items()
        for how in product({False, Op.R in schedule.ops}, {False, Op.OFFLOAD in schedule.ops})
    }
    own_footprints = {
        (unit, op): _at_ends(unit, op, footprint, costs, schedule, slices)
        for (unit, op), footprint in table.footprints.items()
    }
    first: dict[tuple[StageSlice, Op], float] = {
        (unit, op): footprint.peak + made for (unit, op), footprint in footprints.items() if op is Op.VW
    }
    return replace(
        table,
        footprints={**own_footprints, **footprints},
        first={**table.first, **first},
        gradients={**table.gradients, **{(g, Op.VW): made for g in stages}},
        parameters=_added(table.parameters, dict.fromkeys(stages, state.weights * numbers)),
        optimizer=_added(table.optimizer, dict.fromkeys(stages, state.optimizer * optimized)),
        host_optimizer=_added(table.host_optimizer, dict.fromkeys(stages, update.on_host * optimized)),
        vocabulary_bytes={(op, s): _sent(costs, op, length) for op in (Op.V, Op.L) for s, length in enumerate(slices)},
    )


def _at_ends(
    unit: StageSlice, op: Op, own: Footprint, costs: Costs, schedule: Schedule, slices: tuple[int, ...]
) -> Footprint:
    """Returns the bytes of a stage's action with the tensors between its layers and the spread head, and the sum of its
    rows' lookups, from which a replayed forward starts."""
    hidden = float(costs.message_bytes(slices[unit.slice]))
    if unit.stage == schedule.num_stages - 1:
        more = _NORM * hidden * max(1.0, _WIDE / costs.dtype_bytes)
        made = Op.R if unit.recomputed else Op.F
        if op is made:
            own = Footprint(own.leaves + more, own.peak + more)
        elif op in (Op.B, Op.W):
            own = replace(own, leaves=own.leaves - more)
    if schedule.spreads_embedding and unit.stage == 0 and unit.recomputed:
        if op is Op.F:
            own = Footprint(own.leaves + hidden, own.peak + hidden)
        elif op is Op.R:
            own = replace(own, leaves=own.leaves - hidden)
    return own


def _part_footprints(costs: Costs, rows: int, schedule: Schedule, length: int, is_last: bool) -> dict[Op, Footprint]:
    """Returns the bytes of the actions; see `slipstream.model.vocabulary` for the tensors of HeadRows."""
    wide = max(_WIDE, costs.dtype_bytes)
    tokens = costs.microbatch_size * length
    hidden, wide_bytes, small = float(costs.message_bytes(length)), float(wide * tokens), float(_SMALL * tokens)
    wide_hidden = hidden * wide / costs.dtype_bytes
    probabilities = wide_bytes * rows
    narrow = probabilities if costs.dtype_bytes < _WIDE else 0.0  # a copy in the weights' dtype, and one to add up
    kept_bytes = probabilities + 2 * wide_bytes
    footprints = {
        Op.V: Footprint(kept_bytes, max(2 * probabilities, probabilities + narrow + 2 * hidden) + small),
        Op.VW: Footprint(-kept_bytes, 1.5 * narrow + small),
    }
    # V's part of the gradient stays on the last stage until L, L's sums and the stage's output until VW.
    if is_last:
        footprints[Op.V] = replace(footprints[Op.V], leaves=kept_bytes + 2 * hidden)
        footprints[Op.L] = Footprint(wide_bytes - hidden, 4 * wide_hidden + 6 * schedule.num_ranks * wide_bytes)
        footprints[Op.VW] = replace(footprints[Op.VW], leaves=-kept_bytes - hidden - wide_bytes)
    if schedule.spreads_embedding:
        footprints[Op.E] = Footprint(0.0, 2 * hidden + small)
        footprints[Op.EW] = Footprint(0.0, hidden + (wide_hidden if costs.dtype_bytes < _WIDE else 0.0) + small)
    return footprints


def _sent(costs: Costs, op: Op, length: int) -> float:
    """Returns the bytes of a message with V's part of a slice, or L's sums."""
    statistics = max(_WIDE, costs.dtype_bytes) * costs.microbatch_size * length
    return _HEADER + (2 * statistics + 2 * float(costs.message_bytes(length)) if op is Op.V else statistics)


def _added(there: Mapping[int, float], more: Mapping[int, float]) -> dict[int, float]:
    return {g: num_bytes + more.get(g, 0.0) for g, num_bytes in there.items()}
