"""Runs a schedule against costs instead of tensors: start and end times, and memory."""

from slipstream.simulator.costs import (
    CostModel,
    Footprint,
    MeasuredCost,
    MemoryKind,
    MemoryTable,
    MemoryTables,
    MicrobatchCost,
    RankMemory,
    StageSlice,
    TableCost,
    UnitCost,
    result_seconds,
    table_of,
)
from slipstream.simulator.simulation import activation_peaks, memory_of, rank_memory, simulate, step_seconds
