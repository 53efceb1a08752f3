"""Runs a schedule against costs instead of tensors: start and end times, and memory."""

from __future__ import annotations

from slipstream.simulator.costs import CostModel, MeasuredCost, TableCost, UnitCost
from slipstream.simulator.memory_account import (
    Footprint,
    Kind,
    MemoryTable,
    RankMemory,
    Unit,
    memory_of,
)
from slipstream.simulator.simulation import simulate

__all__ = [
    "CostModel",
    "Footprint",
    "Kind",
    "MeasuredCost",
    "MemoryTable",
    "RankMemory",
    "TableCost",
    "Unit",
    "UnitCost",
    "memory_of",
    "simulate",
]
