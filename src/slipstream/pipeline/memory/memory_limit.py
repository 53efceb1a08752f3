"""Keeps steps within the memory limit: rehearses unknown actions, adds their bytes up, and refuses or plans by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from slipstream.errors import SlipstreamError
from slipstream.model import recompute_advice
from slipstream.options import Memory
from slipstream.parallel import Ranks
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import SplitBatch, token_bytes
from slipstream.pipeline.families import ModelFamily, StageLayout
from slipstream.pipeline.memory.linear_memory import LinearMemoryModel, both_backwards, rows_to_rehearse
from slipstream.pipeline.memory.rehearsal import RehearsedStep, rehearse
from slipstream.pipeline.planning import HeldBytes
from slipstream.planner.find_plan import find_plan
from slipstream.planner.ragged import StepMemory, StepPlan, StepProblem
from slipstream.schedule import Op, Schedule, SlicedMicrobatch, add_reductions
from slipstream.simulator import MemoryKind, MemoryTable, RankMemory, StageSlice, memory_of
from slipstream.units import bytes_text, sizes_text

# Peaks and sums by kind add the same numbers in different orders, and may differ in the last digits.
_ROUNDED_UP = 1 + 1e-9
_MOST_TABLES = 256  # different microbatches with a table kept; ragged batches make many


class MemoryLimit:
    """Knows the memory of a pipeline's ranks in a step, and refuses or plans by it; unknown actions are rehearsed, on
    all ranks at the same time.

    Args:
        memory: has the bytes that each rank may hold, on its device and on its host.
        records: whether steps may be recorded as CUDA graphs, which free offloaded tensors an action later.
        ranks: of the pipeline.
        family: splits batches.
        layout: of some step; others differ in their order alone.
        lay_out: returns the layout of another order.
        rehearsal: returns the rehearsal of a step, whose `schedule`, `recompute`, `batch` and `microbatches` it
            is given: it knows the parts of the pipeline.
        device: of this rank.
    """

    def __init__(
        self,
        memory: Memory,
        records: bool,
        ranks: Ranks,
        family: ModelFamily,
        layout: StageLayout,
        lay_out: Callable[[Schedule], StageLayout],
        rehearsal: Callable[..., RehearsedStep],
        device: torch.device,
    ) -> None:
        self.limit = memory.limit
        self._memory_options = memory
        self._ranks = ranks
        self._family = family
        self._device = device
        self._layout = layout
        self._lay_out = lay_out
        self._rehearsal = rehearsal
        self._frees_late = records
        self._tables: dict[tuple[int, ...], MemoryTable] = {}  # (rows and slices of a microbatch) -> its table
        self.rows: LinearMemoryModel | None = None  # the model for batches of unequal sequences
        # Steps that fit, oldest first.
        self._fitting: dict[tuple[Schedule, tuple[SlicedMicrobatch, ...], int], None] = {}
        self.most_steps = 1024  # known steps within the limit; more drop the oldest

    def check(self, step: RehearsedStep, lengths: Sequence[int] = ()) -> None:
        """Raises SlipstreamError where the step would hold more than the limit, on a rank or on its host, before it
        runs. Collective.

        `lengths` are the tokens of each sequence where they differ: the longest is then named.
        """
        if not self._memory_options.is_limited:
            return
        checked = step.schedule, tuple(step.batch.microbatches), step.batch.further_bytes
        if checked not in self._fitting:
            held = self._memory(step, bool(lengths))
            worst = max(range(len(held)), key=lambda rank: held[rank].peak)
            if self.limit is not None and held[worst].peak + _token_bytes(step) > self.limit:
                raise SlipstreamError(_too_much(step, worst, held[worst], self.limit) + _longest(lengths))
            self._check_hosts(step, held, lengths)
            self._fitting[checked] = None
            _forget_oldest(self._fitting, self.most_steps)

    def _check_hosts(self, step: RehearsedStep, held: Sequence[RankMemory], lengths: Sequence[int]) -> None:
        limit = self._memory_options.host_limit
        worst = max(range(len(held)), key=lambda rank: held[rank].host_peak)
        if limit is None or held[worst].host_peak <= limit:
            return
        on_host = held[worst].worst_on_host.on_host
        most = held[worst].host_peak
        raise SlipstreamError(
            f"memory.host_limit={limit:.6g} ({bytes_text(limit)}), but rank {worst} would have "
            f"{bytes_text(most)} on its host, {bytes_text(most - limit)} too much (memory.host_limit={math.ceil(most)} "
            f"would do), in the schedule {step.schedule.name!r}: {sizes_text(on_host)}. Try "
            f"{_advice_for_host(self._memory_options, on_host)}" + _longest(lengths)
        )

    def peak_memory_of_rows(self, schedule: Schedule, slices: Sequence[tuple[int, ...]]) -> list[float]:
        """Returns the bytes that every rank would hold in a step of rows in these slices, which was planned; raises
        SlipstreamError where some action was never rehearsed.

        Without sends and receives a schedule may be given too, and takes far less time.
        """
        assert self.rows is not None
        peaks = self.rows.order_bytes(schedule, slices).rank_peaks().tolist()
        return [peak * _ROUNDED_UP + token_bytes(sum(map(sum, slices))) for peak in peaks]

    def peak_memory_of(self, step: RehearsedStep) -> HeldBytes:
        """Returns the bytes that every rank, and every slice on a stage, would hold in the step. Collective.

        All its microbatches are alike.
        """
        held = self._memory(step)
        table = self._tables[_key(step.microbatches[0])]
        forwards = (action for action in step.schedule.positions if action.op is Op.F)
        units = {StageSlice.of(forward, step.schedule) for forward in forwards}
        peaks = tuple(rank.peak + _token_bytes(step) for rank in held)
        return HeldBytes(peaks, {(unit.stage, unit.slice): _held(unit, table) for unit in units})

    def _memory(self, step: RehearsedStep, has_lengths: bool = False) -> tuple[RankMemory, ...]:
        if has_lengths and self.rows is not None:
            slices = [microbatch.slices for microbatch in step.microbatches]
            # An action that wasn't rehearsed on other rows has no bytes in the linear model.
            with suppress(SlipstreamError):
                return self.rows.order_bytes(step.schedule, slices).memory(self._frees_late)
        alike = len(step.microbatches) == 1
        for index, microbatch in enumerate(step.microbatches):
            key = _key(microbatch)
            table = self._tables.get(key)
            if table is None or not _covers(table, step.schedule, None if alike else index):
                earlier = [] if table is None else [table]
                self._tables[key] = _merged([*earlier, *self._ranks.pipeline.gather(rehearse(step, index))])
        tables = [self._tables[_key(microbatch)] for microbatch in step.microbatches]
        _forget_oldest(self._tables, _MOST_TABLES)
        return memory_of(step.schedule, tables[0] if alike else tables, self._frees_late)

    def rehearsed(
        self, layout: StageLayout, batch: SplitBatch, microbatches: Sequence[SlicedMicrobatch]
    ) -> RehearsedStep:
        """Returns the rehearsal of a step of these microbatches in this layout."""
        return self._rehearsal(layout=layout, batch=batch, microbatches=microbatches)

    @property
    def knows_lengths(self) -> bool:
        """Whether steps on sequences of any lengths can be planned: without a limit, or once some were rehearsed."""
        return self.limit is None or self.rows is not None

    def prepare_rows(self, splits: bool) -> None:
        """Learns the memory of rows of any length, where it isn't known and follows from others. Collective."""
        if not self.knows_lengths and not self._counts_by_shape:
            self._rehearse_rows(splits)

    def _rehearse_rows(self, splits: bool) -> None:
        """Rehearses a few short rows, so that any rows' memory is known; not of a model whose rows can't be cut.
        `splits` is whether weight gradients may be computed apart. Collective."""
        config = self._family.config.get_text_config()
        device = self._device
        steps = []
        for slices in rows_to_rehearse(getattr(config, "max_position_embeddings", None)):
            order = both_backwards(self._layout.order.placement, len(slices), splits)
            layout = replace(self._layout, order=order)
            token_ids = torch.zeros((1, sum(slices)), dtype=torch.int64, device=device)
            microbatches = [SlicedMicrobatch(1, slices)]
            try:
                whole = Batch.of(device, token_ids, token_ids)
                self._family.lengths(whole)
                batch = self._family.split(whole, microbatches, 0)
            except SlipstreamError:
                return
            for variant in (layout, replace(layout, recompute=None)) if layout.recompute else (layout,):
                # The rows of a step may run in any order, so all kinds of backward are rehearsed.
                every = variant.with_all_backwards
                steps.append((slices, self.rehearsed(every, batch, microbatches)))
        measured: dict[tuple[int, ...], list[MemoryTable]] = {}
        for slices, step in steps:
            measured.setdefault(slices, []).extend(self._ranks.pipeline.gather(rehearse(step)))
        self.rows = LinearMemoryModel(tuple((slices, _merged(tables)) for slices, tables in measured.items()))

    def find_plan(self, problem: StepProblem) -> StepPlan:
        """Returns the fastest plan that is found for sequences of some lengths; where known rows let it, within the
        limit."""
        rows, limit = self.rows, self.limit
        if rows is None or limit is None:
            return find_plan(problem)
        held = rows.activation_bytes(len(problem.placement))
        memory = StepMemory(limit, rows.state_bytes(problem.placement), self._held_with)
        return find_plan(replace(problem, rates=replace(problem.rates, held=held), memory=memory))

    def fits(self, plan: StepPlan) -> bool:
        """Returns whether a step's plan keeps to the limit, as far as known rows tell."""
        return self.limit is None or self.rows is None or max(self._held_with(plan)) <= self.limit

    def _held_with(self, plan: StepPlan) -> list[float]:
        """Returns the bytes that every rank would hold with a step's plan."""
        if self._layout.recompute or self._layout.spreads_vocabulary or self._counts_by_shape:
            return self.peak_memory_of_rows(self._lay_out(plan.schedule).with_all_backwards.training, plan.slices)
        order = add_reductions(plan.schedule) if self._layout.reduces else plan.schedule
        return self.peak_memory_of_rows(order, plan.slices)

    @property
    def _counts_by_shape(self) -> bool:
        """Whether rows' memory doesn't follow from others."""
        by_layer = self._layout.recompute is not None and self._layout.recompute.num_layers > 0
        # What a share of a row has on the device depends on where its slices end.
        has_share = 0 < self._layout.context_on_host < 1
        return bool(self._layout.offload) or by_layer or has_share


def _key(microbatch: SlicedMicrobatch) -> tuple[int, ...]:
    return (microbatch.num_sequences, *microbatch.slices)


def _forget_oldest(kept: dict[Any, Any], most: int) -> None:
    """Removes the oldest entries until no more than `most` are left: on every rank the same."""
    while len(kept) > most:
        del kept[next(iter(kept))]


def _longest(lengths: Sequence[int]) -> str:
    if not lengths:
        return ""
    row = max(range(len(lengths)), key=lengths.__getitem__)
    return f" The longest sequence is inputs[{row}], of {lengths[row]} tokens: cut it, or leave it out."


def _token_bytes(step: RehearsedStep) -> int:
    # An upper bound of the bytes of the batch, cut and uncut, which the table leaves out.
    return token_bytes(step.batch.num_tokens) + step.batch.further_bytes


def _covers(table: MemoryTable, schedule: Schedule, microbatch: int | None) -> bool:
    """Returns whether the table has all actions of a microbatch, or of any."""
    computes = (action for action in schedule.positions if action.op in (Op.F, Op.B, Op.I))
    chosen = (action for action in computes if microbatch in (None, action.microbatch))
    return all((StageSlice.of(action, schedule), action.op) in table.footprints for action in chosen)


def _held(unit: StageSlice, table: MemoryTable) -> float:
    """Returns the bytes that a slice's forward leaves, with its part of keys and values."""
    leaves = table.footprint(unit, Op.F).leaves
    if unit.offloaded:
        leaves += table.footprint(unit, Op.OFFLOAD).leaves
    left = table.footprints.get((unit, Op.I))
    leaves += max(0, left.leaves) if left else 0  # output gradients, until W
    # A slice's messages are as large as its share of the row's tokens.
    share = table.message_bytes[unit.slice] / sum(table.message_bytes)
    return leaves + share * (table.context.get(unit.stage, 0) + table.context_gradients.get(unit.stage, 0))


def _merged(tables: Sequence[MemoryTable]) -> MemoryTable:
    """Merges the tables of several ranks, or of several rehearsals."""
    names = [name for name, value in vars(tables[0]).items() if isinstance(value, Mapping)]
    joined: dict[str, Any] = {
        name: {key: value for table in tables for key, value in vars(table)[name].items()} for name in names
    }
    return replace(tables[0], **joined)


def less_on_host(memory: Memory, on_host: Mapping[MemoryKind, float]) -> dict[str, Any]:
    """Returns the settings of `memory` that put less on the host, each by itself, the cheapest first."""
    settings: dict[str, Any] = {}
    if on_host.get(MemoryKind.CONTEXT) and memory.context_gradients == "wide":
        settings["context_gradients"] = "model"
    if on_host.get(MemoryKind.ACTIVATIONS):
        settings["offload"] = memory.offload / 2
    if on_host.get(MemoryKind.CONTEXT):
        settings["context"] = "device"
    if on_host.get(MemoryKind.OPTIMIZER):
        settings["optimizer"] = "device"
    return settings


def _advice_for_host(memory: Memory, on_host: Mapping[MemoryKind, float]) -> str:
    changes = [f"memory.{name}={value!r}" for name, value in less_on_host(memory, on_host).items()]
    if on_host.get(MemoryKind.CONTEXT) or on_host.get(MemoryKind.ACTIVATIONS):
        changes.append("shorter sequences")
    return f"{', '.join(changes[:-1])} or {changes[-1]}." if len(changes) > 1 else f"{changes[0]}."


def _too_much(step: RehearsedStep, rank: int, held: RankMemory, limit: float) -> str:
    most = {str(kind): size for kind, size in held.worst.during.items()} | {"tokens": _token_bytes(step)}
    total = held.peak + _token_bytes(step)
    slices = ", ".join(str([*microbatch.slices]) for microbatch in step.microbatches)
    setting = "none" if step.layout.recompute is None else step.layout.recompute.setting
    waits = any(
        before.op is Op.F and (before.microbatch, before.slice) != (action.microbatch, action.slice)
        for row in step.schedule.actions
        for before, action in pairwise(action for action in row if action.op in (Op.F, Op.B, Op.I))
    )
    return (
        f"memory.limit={limit:.6g} ({bytes_text(limit)}), but rank {rank} would hold {bytes_text(total)}, "
        f"{bytes_text(total - limit)} too much (memory.limit={math.ceil(total)} would do), in the "
        f"schedule {step.schedule.name!r} on slices {slices}: {sizes_text(most)}. Try "
        f"{recompute_advice(setting, waits)}"
        "memory.offload=0.5, a larger memory.num_flushes, more slices or microbatches, or schedule='auto', which keeps "
        "to the limit where it can."
    )
