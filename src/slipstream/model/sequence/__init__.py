"""Stages of an `nn.Sequential`: its layers, skip connections, token slices and batch norms."""

from __future__ import annotations

from slipstream.model.sequence.cut_tokens import check_cut, find_cut
from slipstream.model.sequence.layers import (
    Layer,
    check_weights,
    find_routes,
    flatten,
    is_plain,
)
from slipstream.model.sequence.sequence_context import (
    Microbatch,
    Value,
    as_tuple,
    as_value,
)
from slipstream.model.sequence.sequence_stage import SequenceStage
from slipstream.model.sequence.shape_trace import Boundary, Trace, Tracer
from slipstream.model.sequence.slice_check import compare_slices

__all__ = [
    "Boundary",
    "Layer",
    "Microbatch",
    "SequenceStage",
    "Trace",
    "Tracer",
    "Value",
    "as_tuple",
    "as_value",
    "check_cut",
    "check_weights",
    "compare_slices",
    "find_cut",
    "find_routes",
    "flatten",
    "is_plain",
]
