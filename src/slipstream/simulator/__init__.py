"""Runs a schedule against costs instead of tensors: start and end times, and memory."""

from slipstream.simulator.costs import CostModel, MeasuredCost, MicrobatchCost, TableCost, UnitCost, result_seconds
from slipstream.simulator.memory_table import (
    Footprint,
    MemoryKind,
    MemoryTable,
    MemoryTables,
    RankMemory,
    StageSlice,
    table_of,
)
from slipstream.simulator.simulation import memory_of, rank_memory, simulate
