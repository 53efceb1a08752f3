"""The costs of layers, slices and messages: described hardware, counted operations, measured profiles."""

from slipstream.planner.costs.action_memory import head_part_memory, memory_table
from slipstream.planner.costs.analytic_costs import AnalyticCosts
from slipstream.planner.costs.cluster import SHIPPED, Cluster, Device, LinkKind, load_cluster
from slipstream.planner.costs.cost_sources import AnalyticSource, CostSource, HostMemorySpec, ProfileSource, StageCosts
from slipstream.planner.costs.operation_counts import Amount, AttentionCall, ModelCount, OpCount, PartCount, StateBytes
from slipstream.planner.costs.pipeline_costs import OPS, WITH_MESSAGES, ActionBytes, messages_of_stages
from slipstream.planner.costs.profile import (
    Hardware,
    MeasuredLink,
    MeasuredStage,
    Measurement,
    ModelIdentity,
    Profile,
    load_profile,
)
from slipstream.planner.costs.stage_basis import (
    Stage,
    StageParts,
    choose_stages,
    part_kinds,
    partition_of,
    parts_of,
    unit_bounds,
)
from slipstream.planner.costs.time_fit import AttentionWindow, SlicePoint, TimeFit, find_windows, fit_times
