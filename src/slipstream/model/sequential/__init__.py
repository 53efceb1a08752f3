"""Builds the stages of an `nn.Sequential`: its layers, skip connections, token slices and batch norms."""

from slipstream.model.sequential.cut_tokens import check_cut, find_cut
from slipstream.model.sequential.layer_context import BatchSlice, LayerValue, as_tuple, as_value
from slipstream.model.sequential.layer_list import (
    SequentialLayer,
    check_reads_on_one_stage,
    check_runs_as_written,
    check_runs_its_children,
    check_weights_on_one_stage,
    find_skip_routes,
    flatten_layers,
    nested_sequences,
)
from slipstream.model.sequential.sequential_stage import SequentialStage
from slipstream.model.sequential.shape_trace import LayerBoundary, ShapeTrace, ShapeTracer
from slipstream.model.sequential.slice_check import compare_slices
