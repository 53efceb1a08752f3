"""memory_limit: what every rank would hold, rehearsed and added up, and orders that keep to the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.pipeline.tuning import TrialMemory
from slipstream.schedule import Op, Schedule
from slipstream.simulator import MemoryTable, RankMemory, Unit, memory_of

if TYPE_CHECKING:
    from slipstream.pipeline.engine import Engine

_BATCH_TENSORS = 6  # ids, labels, positions and documents; labels and positions once more


def check_limit(limit: float | None) -> None:
    if limit is not None and (isinstance(limit, (bool, str)) or not limit > 0):
        raise SlipstreamError(f"memory_limit={limit!r}: bytes of each rank, such as 12e9, or None for any.")


class MemoryLimit:
    """What a pipeline's ranks would hold in a step; what isn't known yet is rehearsed, on all ranks at once."""

    def __init__(self, limit: float | None) -> None:
        check_limit(limit)
        self.limit = limit
        self._tables: dict[tuple[int, ...], MemoryTable] = {}  # by the rows of a batch, and slices
        self._fitting: set[tuple[Schedule, tuple[int, ...]]] = set()

    def check(self, pipeline: Engine, inputs: Tensor, targets: Tensor) -> None:
        """Collective. Raises SlipstreamError where the next step would hold more than the limit, before it runs."""
        if self.limit is None:
            return
        ran = pipeline.layout.training, _key(pipeline, inputs)
        if ran not in self._fitting:
            held = self._memory(pipeline, inputs, targets)
            worst = max(range(len(held)), key=lambda rank: held[rank].peak)
            if held[worst].peak + _token_bytes(inputs) > self.limit:
                raise SlipstreamError(_too_much(pipeline, worst, held[worst], self.limit, inputs))
            self._fitting.add(ran)

    def holdings(self, pipeline: Engine, inputs: Tensor, targets: Tensor) -> TrialMemory:
        """Collective: of the order that the pipeline has adopted."""
        held = self._memory(pipeline, inputs, targets)
        schedule, table = pipeline.layout.training, self._tables[_key(pipeline, inputs)]
        units = {(unit.stage, unit.slice): _held(unit, table, schedule) for unit in _units(schedule)}
        return TrialMemory(tuple(rank.peak + _token_bytes(inputs) for rank in held), units)

    def _memory(self, pipeline: Engine, inputs: Tensor, targets: Tensor) -> tuple[RankMemory, ...]:
        from slipstream.pipeline.memory.rehearsal import rehearse

        key, schedule = _key(pipeline, inputs), pipeline.layout.training
        table = self._tables.get(key)
        if table is None or not _covers(table, schedule):
            tables = pipeline._ranks.gather(rehearse(pipeline, inputs, targets))
            table = self._tables[key] = _merged([*([] if table is None else [table]), *tables])
        return memory_of(schedule, table)


def _key(pipeline: Engine, inputs: Tensor) -> tuple[int, ...]:
    return (inputs.shape[0], *pipeline.slices(inputs.shape[1]))


def _token_bytes(inputs: Tensor) -> int:
    """Of the batch, cut and uncut, which the table leaves out: rather too many."""
    return _BATCH_TENSORS * inputs.numel() * inputs.element_size()


def _units(schedule: Schedule) -> set[Unit]:
    return {Unit.of(action, schedule) for action in schedule.positions if action.op is Op.F}


def _covers(table: MemoryTable, schedule: Schedule) -> bool:
    computes = (action for action in schedule.positions if action.op in (Op.F, Op.B, Op.I))
    return all((Unit.of(action, schedule), action.op) in table.footprints for action in computes)


def _held(unit: Unit, table: MemoryTable, schedule: Schedule) -> float:
    """What its forward leaves, and its part of keys and values."""
    leaves = table.footprint(unit, Op.F).leaves
    if unit.offloaded:
        leaves += table.footprint(unit, Op.OFFLOAD).leaves
    left = table.footprints.get((unit, Op.I))
    leaves += max(0, left.leaves) if left else 0  # output gradients, until W
    share = table.message_bytes[unit.slice] / sum(table.message_bytes)  # as its tokens
    return leaves + share * (table.context.get(unit.stage, 0) + table.context_gradients.get(unit.stage, 0))


def _merged(tables: Sequence[MemoryTable]) -> MemoryTable:
    """Of several ranks, or of several rehearsals."""

    def joined(name: str) -> Any:
        values = [getattr(table, name) for table in tables]
        if isinstance(values[0], Mapping):
            return {key: value for each in values for key, value in each.items()}
        return values[0]

    return MemoryTable(**{field.name: joined(field.name) for field in fields(MemoryTable)})


def _too_much(pipeline: Engine, rank: int, held: RankMemory, limit: float, inputs: Tensor) -> str:
    most = {str(kind): size for kind, size in held.worst.during.items() if size} | {"tokens": _token_bytes(inputs)}
    parts = ", ".join(f"{kind} {size:.4g}" for kind, size in sorted(most.items(), key=lambda pair: -pair[1]))
    total = sum(most.values())
    return (
        f"memory_limit={limit:.6g} bytes, but rank {rank} would hold {total:.6g}, {total - limit:.3g} too many, in the "
        f"schedule {pipeline.layout.training.name!r} on slices {pipeline.slices(inputs.shape[1])}: {parts}. Try "
        "recompute='full', offload=0.5, a larger num_flushes, more slices or microbatches, or schedule='auto', which "
        "keeps to the limit where it can."
    )
