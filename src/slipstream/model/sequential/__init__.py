"""Builds the stages of an `nn.Sequential`: its layers, skip connections, token slices and batch norms."""

from __future__ import annotations

from slipstream.model.sequential.cut_tokens import check_cut, find_cut
from slipstream.model.sequential.layer_context import BatchSlice, LayerValue, as_tuple, as_value
from slipstream.model.sequential.layer_list import (
    SequentialLayer,
    check_weights_on_one_stage,
    find_skip_routes,
    flatten_layers,
    is_plain_sequential,
)
from slipstream.model.sequential.sequential_stage import SequentialStage
from slipstream.model.sequential.shape_trace import LayerBoundary, ShapeTrace, ShapeTracer
from slipstream.model.sequential.slice_check import compare_slices

__all__ = [
    "BatchSlice",
    "LayerBoundary",
    "LayerValue",
    "SequentialLayer",
    "SequentialStage",
    "ShapeTrace",
    "ShapeTracer",
    "as_tuple",
    "as_value",
    "check_cut",
    "check_weights_on_one_stage",
    "compare_slices",
    "find_cut",
    "find_skip_routes",
    "flatten_layers",
    "is_plain_sequential",
]
