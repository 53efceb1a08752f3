"""Builds the stages of an `nn.Sequential`: its layers, skip connections, token slices and batch norms."""

from slipstream.sequential.cut_tokens import check_cut, find_cut
from slipstream.sequential.layer_list import (
    BatchSlice,
    LayerValue,
    SequentialLayer,
    as_tuple,
    as_value,
    check_reads_on_one_stage,
    check_runs_as_written,
    check_runs_its_children,
    check_weights_on_one_stage,
    find_skip_routes,
    flatten_layers,
    nested_sequences,
)
from slipstream.sequential.shape_trace import LayerBoundary, ShapeTrace, ShapeTracer
from slipstream.sequential.slice_check import compare_slices
from slipstream.sequential.stage import SequentialStage
